"""Over a network buckets are summed by a thread while backward goes on: the same bits, and no wait without an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import TypeVar

import pytest
import torch

from manyhands.errors import PeerTimeout, WorkerFailed
from manyhands.interop.own_loop.small_sums import Call, Word, Words
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule_collective import (
    Background,
    CodecChooser,
    ScheduleCollective,
    carrier,
)
from manyhands.transport.link.interface import Link
from manyhands.transport.link.shared_link import SharedLink
from manyhands.transport.link.tcp import TcpLink
from manyhands.wire.parcels import Parcel

WORLD, ITEMS, SOON_S = 2, 5000, 10.0
PARCELS = [Parcel.whole(number, ITEMS, torch.float32) for number in range(3)]
_T = TypeVar("_T")


def with_collectives(
    work: Callable[[ScheduleCollective], _T],
    codec: str = "raw",
    timeout_s: float = 30.0,
    pair: Callable[[], tuple[Link, Link]] = TcpLink.pair,
    more: int = 0,
) -> list[_T]:
    ends, *others = (pair() for _ in range(1 + more))

    def act(rank: int) -> _T:
        links: Mapping[int, Link] = {1 - rank: ends[rank]}
        make = partial(carrier, feedback=True, seed=3, rank=rank, world=WORLD)
        executor = ScheduleExecutor(ALGORITHMS["direct"], rank, WORLD, links, timeout_s, codec=make(codec))
        chooser = CodecChooser(codec, executor, make) if codec.startswith("auto") else None
        turns = [
            ScheduleExecutor(ALGORITHMS["direct"], rank, WORLD, {1 - rank: other[rank]}, timeout_s)
            for other in others
        ]
        collective = ScheduleCollective(executor, links, codec=codec, chooser=chooser, more=turns)
        try:
            return work(collective)
        finally:
            collective.close()

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(act, range(WORLD)))


def given(rank: int, step: int, parcel: Parcel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + parcel.number)
    return torch.randn(parcel.count, generator=generator)


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def sums(collective: ScheduleCollective, steps: int, *, begins: bool) -> list[torch.Tensor]:
    buckets = collective.allocate(PARCELS)
    found = []
    for step in range(steps):
        if begins:
            collective.begin(step)
        for number, bucket in enumerate(buckets):
            bucket.copy_(given(collective.rank, step, PARCELS[number]))
            collective.launch(number)
        collective.step = step
        collective.finish()
        found += [bucket.clone() for bucket in buckets]
    return found


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "topk:0.1"])
def test_the_bits_are_those_of_sums_after_backward(codec: str) -> None:
    after = with_collectives(partial(sums, steps=3, begins=False), codec)
    overlapped = with_collectives(partial(sums, steps=3, begins=True), codec)
    for found in overlapped:
        assert all(torch.equal(one, other) for one, other in zip(found, after[0], strict=True))


def test_buckets_over_several_links_have_the_same_bits_and_share_what_is_sent() -> None:
    def work(collective: ScheduleCollective) -> tuple[list[torch.Tensor], list[int], int]:
        found = sums(collective, steps=3, begins=True)
        sent = [mailbox.bytes_sent for mailbox in collective.mailboxes]
        return found, sent, collective.take_times().posts[1 - collective.rank].bytes_sent

    [one] = [sent for _, sent, _ in with_collectives(work)[:1]]
    for found, sent, told in with_collectives(work, more=1):
        expected = with_collectives(partial(sums, steps=3, begins=False))[0]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert sent == [
            one[0] * 2 // 3,
            one[0] // 3,
        ]  # of three buckets the first and the last go over one link
        assert told == sum(sent)


def test_a_loss_over_either_link_ends_the_step() -> None:
    def work(collective: ScheduleCollective) -> str:
        collective.allocate(PARCELS)
        collective.begin(0)
        if collective.rank == 1:  # it sums what goes over the first link, and leaves
            collective.launch(0)
            collective._backgrounds[0].wait(1)
            return ""
        for number in range(3):
            collective.launch(number)
        with pytest.raises(WorkerFailed) as caught:
            collective.finish()
        return str(caught.value)

    said = with_collectives(work, more=1)
    assert "lost rank 1" in said[0]


def test_a_bucket_is_summed_before_the_last_one_is_launched() -> None:
    def work(collective: ScheduleCollective) -> bool:
        buckets = collective.allocate(PARCELS)
        collective.begin(0)
        buckets[0].fill_(collective.rank + 1)
        collective.launch(0)
        came = comes_true(lambda: bool((buckets[0] == 3).all()))
        assert comes_true(lambda: collective._backgrounds[0].is_idle)
        assert not collective.take_times().posts, "those of a step are told together, at its end"
        for number in (1, 2):
            buckets[number].fill_(1)
            collective.launch(number)
        collective.finish()
        posts = collective.take_times().posts
        assert posts[1 - collective.rank].bytes_sent == sum(parcel.num_bytes for parcel in PARCELS)
        return came and all(bool((bucket == 2).all()) for bucket in buckets[1:])

    assert with_collectives(work) == [True, True]


def test_without_begin_and_through_memory_everything_waits_for_finish() -> None:
    def work(collective: ScheduleCollective, *, begins: bool) -> bool:
        [bucket, *_] = collective.allocate(PARCELS)
        if begins:
            collective.begin(0)
        bucket.fill_(1)
        collective.launch(0)
        stayed = collective._backgrounds[0]._given == 0
        collective.finish()
        return stayed and bool((bucket == 2).all())

    assert with_collectives(partial(work, begins=False)) == [True, True]
    assert with_collectives(partial(work, begins=True), pair=SharedLink.pair) == [True, True]


def test_where_codecs_are_weighed_all_buckets_wait_for_it() -> None:
    def work(collective: ScheduleCollective) -> list[int]:
        buckets = collective.allocate(PARCELS)
        left = []
        for step in (2, 3):
            collective.begin(step)
            buckets[0].fill_(1)
            before = collective._backgrounds[0]._given
            collective.launch(0)
            if step == 2:
                assert comes_true(lambda: bool((buckets[0] == 2).all()))
            left.append(collective._backgrounds[0]._given - before)
            for number in (1, 2):
                collective.launch(number)
            collective.finish()
        return left

    assert with_collectives(work, "auto:0.5") == [[1, 0]] * WORLD


def test_what_goes_wrong_in_the_thread_is_raised_by_finish() -> None:
    def work(collective: ScheduleCollective) -> str:
        [bucket, *_] = collective.allocate(PARCELS)
        collective.begin(0)
        if collective.rank == 1:
            return ""  # leaves without a bucket
        bucket.fill_(1)
        collective.launch(0)
        collective.launch(1)
        with pytest.raises(WorkerFailed, match="lost rank 1") as caught:
            collective.finish()
        return str(caught.value)

    assert "all-reduce by direct" in with_collectives(work)[0]


def test_a_worker_that_does_not_come_is_named_in_time() -> None:
    named = Event()

    def work(collective: ScheduleCollective) -> None:
        [bucket, *_] = collective.allocate(PARCELS)
        if collective.rank == 1:
            assert named.wait(SOON_S)
            return
        collective.begin(0)
        bucket.fill_(1)
        collective.launch(0)
        with pytest.raises(PeerTimeout, match=r"rank 1 sent nothing within 0\.3 s"):
            collective.finish()
        named.set()

    with_collectives(work, timeout_s=0.3)


def test_words_over_the_same_links_come_before_gradients_and_do_not_wait_for_them() -> None:
    """Worker 1 is elsewhere: worker 0 hears of it, though nobody sums the buckets that it has launched."""

    def work(collective: ScheduleCollective, *, apart: bool) -> list[Call]:
        buckets = collective.allocate(PARCELS)
        words = Words(collective.of_words())
        leaves = apart and collective.rank == 1
        words.send(Word(call=Call.LEAVE if leaves else Call.BACKWARD))
        if not leaves:
            collective.begin(0)
            for number, bucket in enumerate(buckets):
                bucket.fill_(1)
                collective.launch(number)
        heard = [word.call for word in words.receive()]
        if not apart:
            collective.finish()
            assert all(bool((bucket == 2).all()) for bucket in buckets)
        return heard

    assert with_collectives(partial(work, apart=False)) == [[Call.BACKWARD, Call.BACKWARD]] * 2
    assert with_collectives(partial(work, apart=True)) == [[Call.BACKWARD, Call.LEAVE]] * 2


def test_who_leaves_brings_nothing_to_sums_that_have_begun() -> None:
    def work(collective: ScheduleCollective) -> bool:
        buckets = collective.allocate(PARCELS)
        words = Words(collective.of_words())
        leaves = collective.rank == 1
        words.send(Word(call=Call.LEAVE if leaves else Call.BACKWARD))
        if not leaves:
            collective.begin(0)
        else:
            words.receive()
        for number, bucket in enumerate(buckets):
            bucket.fill_(0 if leaves else 1)
            collective.launch(number)
        if not leaves:
            words.receive()
        collective.finish()
        return all(bool((bucket == 1).all()) for bucket in buckets)

    assert with_collectives(work) == [True, True]


def test_closing_in_the_middle_of_a_sum_ends_it() -> None:
    """What is sent lies in the middle, for worker 1 sends nothing; long before anybody's time is over."""
    closed = Event()

    def work(collective: ScheduleCollective) -> None:
        [bucket, *_] = collective.allocate(PARCELS)
        collective.begin(0)
        bucket.fill_(1)
        if collective.rank == 1:
            assert closed.wait(2 * SOON_S)
            return
        collective.launch(0)
        assert comes_true(lambda: collective.traffic().messages_sent > 0)
        thread = collective._backgrounds[0]._thread
        assert thread is not None
        assert thread.is_alive()
        collective.close()
        assert not thread.is_alive()
        closed.set()

    with_collectives(work, timeout_s=60.0)


def test_work_is_done_in_order_and_none_after_an_error() -> None:
    done: list[int] = []
    background = Background("test")
    numbers = [background.give(partial(done.append, number)) for number in range(20)]
    background.wait(numbers[-1])
    assert done == list(range(20))
    assert background.is_idle
    broken = background.give(lambda: done.remove(-1))
    background.wait(numbers[3])
    for number in (broken, background.give(partial(done.append, 99))):
        with pytest.raises(ValueError, match="not in list"):
            background.wait(number)
    background.close(lambda: None)
    background.close(lambda: None)
    assert done == list(range(20))
