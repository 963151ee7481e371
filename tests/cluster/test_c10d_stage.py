"""The backend's shared memory among threads of one process: many ranks, rounds that wrap, aborts, and much post."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.interop.c10d.collective_calls import Reduction
from manyhands.interop.c10d.collectives import Collectives
from manyhands.interop.c10d.point_to_point import PointToPoint
from manyhands.interop.c10d.shared_stage import CollectiveStage, StageReason, create_segment
from manyhands.interop.c10d.works import Conductor, PendingWork

TIMEOUT_S = 20.0


@contextmanager
def stages(world: int, first_round: int = 1) -> Iterator[list[CollectiveStage]]:
    with create_segment(world, first_round=first_round) as segment:
        made = [CollectiveStage(os.dup(segment.descriptor), rank, world) for rank in range(world)]
    try:
        yield made
    finally:
        for stage in made:
            stage.close()


def all_ranks(world: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return [future.result(TIMEOUT_S) for future in [pool.submit(act, rank) for rank in range(world)]]


@pytest.mark.parametrize("first_round", [1, 2**32 - 30])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_mix_of_collectives_gives_the_exact_results(world: int, first_round: int) -> None:
    """Small integers, so that every sum is exact; the rounds' numbers wrap on the way."""
    counts = random.Random(5).choices([0, 1, 33, 1000, 70_000, 200_000], k=8)

    def act(rank: int) -> None:
        on = Collectives(ends[rank])
        for turn, count in enumerate(counts):
            mine = torch.full((count,), float(rank + turn))
            on.all_reduce([mine], Reduction.SUM, TIMEOUT_S)
            total = sum(range(world)) + world * turn
            assert mine.eq(total).all(), (turn, count)
            whole = torch.arange(count, dtype=torch.int64) * (rank + 1)
            on.all_reduce([whole], Reduction.MAX, TIMEOUT_S)
            assert torch.equal(whole, torch.arange(count) * world)
            everyones = torch.empty(world * count)
            on.all_gather_into(everyones, torch.full((count,), float(rank)), TIMEOUT_S)
            assert torch.equal(everyones, torch.arange(float(world)).repeat_interleave(count))
            part = torch.empty(count)
            on.reduce_scatter_from(part, everyones, Reduction.AVG, TIMEOUT_S)
            assert part.eq(rank).all()
            root = turn % world
            on.broadcast(part, root, TIMEOUT_S)
            assert part.eq(root).all()
            on.barrier(TIMEOUT_S)

    with stages(world, first_round) as ends:
        all_ranks(world, act)


def test_a_call_that_some_rank_never_makes_ends_for_all_who_wait() -> None:
    with stages(3) as ends:

        def act(rank: int) -> ManyhandsError | None:
            if rank == 1:
                return None
            with pytest.raises(PeerTimeout) as caught:
                Collectives(ends[rank]).all_reduce([torch.ones(2)], Reduction.SUM, 0.3 if rank == 0 else 30)
            return caught.value

        first, _, last = all_ranks(3, act)
        assert (
            "all_reduce(sum) of float32[2] #1: waited 0.3 s for rank 1: rank 1 has made no call yet"
            in str(first)
        )
        assert "for rank 1: rank 1 has made no call yet" in str(last)
        assert first.peer == last.peer == 1
        assert "timed out" in str(first), "what programs look for"
        assert "timed out" in str(last)
        assert re.search(" (Timed out|closed|timeout) ", str(first)), "as torch's own distributed suite does"
        with pytest.raises(PeerTimeout, match=r"timed out: .* rank 1 did not arrive in time"):
            Collectives(ends[1]).barrier(TIMEOUT_S)


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        (StageReason.DIED, WorkerFailed, "rank 1 died: its process ended without leaving"),
        (StageReason.LEFT, WorkerFailed, "rank 1 left the group while others waited"),
        (StageReason.FAILED, Aborted, "because rank 1 failed or was interrupted"),
        (StageReason.ENDED, Aborted, "because rank 1 aborted the group"),
    ],
)
def test_an_abort_wakes_whoever_waits_and_the_first_reason_stands(
    reason: StageReason, kind: type[ManyhandsError], text: str
) -> None:
    with stages(2) as ends, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Collectives(ends[0]).barrier, TIMEOUT_S)
        ends[1].abort(1, reason)
        with pytest.raises(kind, match=text):
            waiting.result(TIMEOUT_S)
        ends[1].abort(0, StageReason.ENDED)
        for end in ends:
            with pytest.raises(kind, match=text):
                Collectives(end).barrier(TIMEOUT_S)


def test_a_closed_stage_takes_no_calls_and_its_rank_counts_as_gone() -> None:
    with stages(2) as ends:
        ends[1].close()
        with pytest.raises(UserError, match="the process group is closed"):
            Collectives(ends[1]).barrier(TIMEOUT_S)
        ends[1].abort(0, StageReason.ENDED)  # too late to matter
        with pytest.raises(WorkerFailed, match="rank 1 has left the group"):
            Collectives(ends[0]).barrier(TIMEOUT_S)


def test_memory_of_another_group_is_refused() -> None:
    with (
        create_segment(2) as segment,
        pytest.raises(ManyhandsError, match="does not belong to a process group of 3"),
    ):
        CollectiveStage(os.dup(segment.descriptor), 0, 3)


@contextmanager
def posts(world: int) -> Iterator[list[PointToPoint]]:
    memory = os.memfd_create("manyhands:test")
    with stages(world) as ends:
        made = [PointToPoint(os.dup(memory), end, "a test") for end in ends]
        os.close(memory)
        try:
            yield made
        finally:
            for post in made:
                post.close()


@pytest.mark.parametrize("seed", range(3))
def test_much_post_arrives_whole_and_in_order(seed: int) -> None:
    """Every rank sends many messages to every other, of random tags and sizes, and asks for them in a random order."""
    world, tags, messages = 3, 4, 60

    def plan(sender: int, receiver: int) -> list[tuple[int, int]]:
        chance = random.Random(f"{seed} {sender} {receiver}")
        sizes = [0, 1, 100, 5_000, 400_000]
        return [(chance.randrange(tags), chance.choice(sizes)) for _ in range(messages)]

    def content(sender: int, number: int, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32) + 1000 * sender + number

    def act(rank: int) -> None:
        others = [other for other in range(world) if other != rank]
        sends = [
            ends[rank].send(content(rank, number, count), other, tag, TIMEOUT_S)
            for other in others
            for number, (tag, count) in enumerate(plan(rank, other))
        ]
        asked = [
            (other, number, *plan(other, rank)[number]) for other in others for number in range(messages)
        ]
        asked.sort(
            key=lambda one: (one[2], random.Random(one[0]).random(), one[1])
        )  # in order for each tag only
        for other, number, tag, count in asked:
            got = torch.empty(count, dtype=torch.int32)
            work = ends[rank].receive(got, other, tag, TIMEOUT_S)
            assert work.wait()
            assert work.source_rank() == other
            assert torch.equal(got, content(other, number, count)), (other, number, tag, count)
        for send in sends:
            send.wait()

    with posts(world) as ends:
        all_ranks(world, act)


def test_a_wait_for_a_call_that_is_not_complete_says_that_it_timed_out() -> None:
    with pytest.raises(TimeoutError, match=r"timed out: .* after the timeout of 0\.001 s"):
        PendingWork([]).wait(timedelta(milliseconds=1))


def test_messages_that_can_not_come_are_failed() -> None:
    with posts(2) as ends:
        pending = ends[0].receive(torch.empty(3), 1, 0, 0.3)
        with pytest.raises(
            PeerTimeout,
            match=r"timed out: recv of float32\[3\] from rank 1 \(tag 0\): no rank sent it in time: rank 1",
        ):
            pending.wait()
        with pytest.raises(PeerTimeout):
            ends[1].send(torch.ones(3), 0, 0, TIMEOUT_S)
    with posts(2) as ends:
        waiting = ends[0].receive(torch.empty(3), None, 0, TIMEOUT_S)
        ends[0].close()
        with pytest.raises(
            UserError, match=r"recv of float32\[3\] from any rank \(tag 0\): a test was closed"
        ):
            waiting.wait()
        with pytest.raises(UserError, match="a test is closed"):
            ends[0].send(torch.ones(3), 1, 0, TIMEOUT_S)


def test_jobs_run_one_at_a_time_in_order_and_callbacks_may_wait_for_more() -> None:
    conductor = Conductor("a test")
    order: list[int] = []
    nested: list[bool] = []

    def from_a_callback(_: object) -> None:
        nested.append(conductor.perform(lambda: order.append(100), [], background=True).wait())

    first = conductor.perform(lambda: order.append(0), [], background=True)
    done = first.get_future().then(from_a_callback)
    works = [conductor.perform(lambda n=n: order.append(n), [], background=True) for n in range(1, 50)]  # type: ignore[misc]
    conductor.perform(lambda: order.append(50), [], background=False)
    done.wait()
    assert nested == [True]
    assert [n for n in order if n != 100] == list(range(51))
    assert all(work.is_success() for work in works)

    def fail() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        conductor.perform(fail, [], background=False)
    failed = conductor.perform(fail, [], background=True)
    with pytest.raises(UserError, match="no"):
        failed.wait()
    conductor.close(lambda: None, 1)
    conductor.close(lambda: None, 1)
    with pytest.raises(UserError, match="a test is closed"):
        conductor.perform(fail, [], background=True)


def test_a_conductor_that_closes_drops_what_has_not_begun() -> None:
    conductor = Conductor("a test")
    release = threading.Event()
    begun = conductor.perform(lambda: release.wait(TIMEOUT_S) and None, [], background=True)
    dropped = conductor.perform(lambda: None, [], background=True)
    conductor.close(release.set, 0.05)
    begun.wait()
    with pytest.raises(UserError, match="closed before this call began"):
        dropped.wait()
    assert isinstance(dropped, PendingWork)
