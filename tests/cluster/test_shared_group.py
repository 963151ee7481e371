"""A group whose ranks are threads or take turns in one thread: interleavings, wrap-around, lateness, abort."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import Aborted, ManyhandsError, OutOfSharedMemory, PeerTimeout, UserError
from manyhands.native.group import shared_group
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles, slice_of
from manyhands.native.segment import Segment
from manyhands.native.waiting import LEAVE_BYTES, TIMED_OUT, announce, leave_cores, on_my_core, wait_until

LAST = 2**32 - 1
Result = TypeVar("Result")


@contextmanager
def ranks(world: int, *, first_operation: int = 1, timeout_s: float = 20.0) -> Iterator[list[SharedGroup]]:
    with ExitStack() as stack:
        files = stack.enter_context(SharedGroupFiles.create(world, first_operation=first_operation))
        yield [
            stack.enter_context(
                SharedGroup(
                    control=os.dup(files.control),
                    arena=os.dup(files.arena),
                    rank=rank,
                    world=world,
                    timeout_s=timeout_s,
                )
            )
            for rank in range(world)
        ]


def together(groups: list[SharedGroup], act: Callable[[SharedGroup], Result]) -> list[Result]:
    """Run `act` for every rank at once, each in its own thread."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(240) for future in [pool.submit(act, group) for group in groups]]


def outcome(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except ManyhandsError as error:
        return error
    return None


def allocate(groups: list[SharedGroup], num_bytes: int) -> None:
    together(groups, lambda group: group.allocate(num_bytes, "a test"))


def until_asleep(group: SharedGroup, rank: int, phase: int = shared_group.ARRIVED) -> None:
    """Wait until someone sleeps on the word of `rank`."""
    sleepers = group._control.array(shared_group.word_offset(rank, phase), 2, np.uint32)
    deadline = time.monotonic() + 180
    while sleepers[1] == 0:
        assert time.monotonic() < deadline, "nobody fell asleep"
        os.sched_yield()


@pytest.mark.parametrize("world", range(1, 9))
def test_threads_reduce_every_type_and_operation(world: int) -> None:
    counts = (0, 1, 7, 1000, 4099)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def contribution(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(count, generator=torch.Generator().manual_seed(rank + 100 * count)).to(dtype)

    def act(group: SharedGroup) -> None:
        for dtype in dtypes:
            for count in counts:
                bucket = group.bucket(0, count, dtype)
                parts = [contribution(rank, count, dtype) for rank in range(world)]
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                total = parts[0].to(wide)
                for part in parts[1:]:
                    total = total + part.to(wide)
                largest = torch.stack(parts).amax(0) if count else parts[0]
                for op, wanted in (("sum", total), ("mean", total / world), ("max", largest)):
                    bucket.tensor.copy_(parts[group.rank])
                    group.all_reduce(bucket, op)
                    assert torch.equal(bucket.tensor, wanted.to(dtype)), (dtype, count, op)
                bucket.tensor.copy_(parts[group.rank])
                group.broadcast(bucket, root=world - 1)
                assert torch.equal(bucket.tensor, parts[-1])

    with ranks(world) as groups:
        allocate(groups, 4099 * 8)
        together(groups, act)


@pytest.mark.parametrize("first_operation", [1, LAST - 20])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_threads_overlap_many_buckets_over_many_rounds(world: int, first_operation: int) -> None:
    sizes = [64, 1, 500, 33]
    rounds = 40

    def act(group: SharedGroup) -> None:
        buckets = [group.bucket(4096 * i, size, torch.float64) for i, size in enumerate(sizes)]
        for turn in range(rounds):
            for i, bucket in enumerate(buckets):
                bucket.tensor.fill_((group.rank + 1) * 10.0**i + turn)
                group.launch(bucket)
                if (turn + i + group.rank) % 3 == 0:
                    group.poll()
            group.finish()
            for i, bucket in enumerate(buckets):
                wanted = sum((rank + 1) * 10.0**i + turn for rank in range(world))
                assert bucket.tensor.eq(wanted).all()

    with ranks(world, first_operation=first_operation) as groups:
        allocate(groups, 4096 * len(sizes))
        together(groups, act)


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 4),
    first_operation=st.sampled_from([1, LAST - 1, LAST]),
    moves=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40),
)
def test_any_interleaving_of_launch_and_poll(
    world: int, first_operation: int, moves: list[tuple[int, bool]]
) -> None:
    """All ranks in one thread, so nothing may wait: a rank's slice is reduced by its first poll after all arrived."""
    count, operations = 100, 3
    everyone = [
        (rank, launch) for launch in (True, False) for rank in range(world) for _ in range(operations)
    ]
    with ranks(world, first_operation=first_operation) as groups:
        allocate(groups, 1024 * operations)
        buckets = [[g.bucket(1024 * k, count, torch.float64) for k in range(operations)] for g in groups]
        model = torch.tensor([[[10.0**k * (r + 1)] * count for k in range(operations)] for r in range(world)])
        totals = model.sum(0)
        for rank in range(world):
            for k in range(operations):
                buckets[rank][k].tensor.copy_(model[rank, k])
        launched, reduced = [0] * world, [0] * world
        for number, launch in [*moves, *everyone]:
            rank = number % world
            mine = slice_of(count, 8, rank, world)
            if launch and launched[rank] < operations:
                groups[rank].launch(buckets[rank][launched[rank]])
                launched[rank] += 1
            else:
                more = groups[rank].poll()
                for k in range(reduced[rank], min(launched)):
                    model[:, k, mine.start : mine.stop] = totals[k, mine.start : mine.stop]
                reduced[rank] = min(launched)
                assert more == (launched[rank] > reduced[rank])
            held = torch.stack([bucket.tensor for row in buckets for bucket in row])
            assert torch.equal(held, model.flatten(0, 1).double())
        assert reduced == [operations] * world
        for group in groups:
            group.finish()


def test_a_late_rank_is_named_and_finish_can_be_tried_again() -> None:
    with ranks(3, timeout_s=0.05) as groups:
        allocate(groups, 400)
        buckets = [group.bucket(0, 100, torch.float32) for group in groups]
        for group, bucket in zip(groups, buckets, strict=True):
            bucket.tensor.fill_(group.rank + 1.0)
        groups[0].launch(buckets[0])
        groups[1].launch(buckets[1])
        with pytest.raises(
            PeerTimeout,
            match=r"rank 0 waited 0\.\d s for rank 2 to arrive at operation 2 \(last seen at operation 1\)",
        ) as late:
            groups[0].finish()
        assert late.value.peer == 2
        groups[2].launch(buckets[2])
        with pytest.raises(
            PeerTimeout, match=r"rank 1 to reduce its slice of operation 2 .*; also late: rank 2; "
        ) as late:
            groups[0].finish()
        assert late.value.peer == 1
        together(groups, SharedGroup.finish)
        for bucket in buckets:
            assert bucket.tensor.eq(6.0).all()


def test_waiting_is_charged_to_the_rank_that_was_late() -> None:
    with ranks(3) as groups, ThreadPoolExecutor(1) as pool:
        allocate(groups, 0)
        buckets = [group.bucket(0, 0, torch.float32) for group in groups]
        groups[0].take_stats()
        groups[1].launch(buckets[1])
        waiter = pool.submit(groups[0].all_reduce, buckets[0])
        until_asleep(groups[0], rank=2)
        lateness_s = 0.05
        time.sleep(lateness_s)  # what is measured
        groups[2].launch(buckets[2])
        groups[1].poll()
        groups[2].poll()
        waiter.result(240)
        stats = groups[0].take_stats()
        assert stats.waiting_ns[2] > lateness_s * 1e9
        assert stats.waiting_ns[0] == 0
        assert stats.waiting_ns[1] < stats.waiting_ns[2] / 2
        assert groups[0].take_stats().waiting_ns == (0, 0, 0)


def test_time_spent_reducing_is_counted() -> None:
    with ranks(1) as (group,):
        group.allocate(1 << 20, "a test")
        group.all_reduce(group.bucket(0, 1 << 18, torch.float32))
        before = time.monotonic_ns()
        stats = group.take_stats()
        assert 0 < stats.reducing_ns < before
        assert group.take_stats().reducing_ns == 0


@pytest.mark.parametrize("blamed", [None, 2])
def test_abort_wakes_sleepers_and_says_who_failed_first(blamed: int | None) -> None:
    with ranks(3, timeout_s=100) as groups, ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(outcome, group.barrier) for group in groups[:2]]
        until_asleep(groups[0], rank=2)
        began = time.monotonic()
        groups[2].abort(blamed)
        groups[2].abort(0)  # too late: the first to be blamed stays blamed
        errors = [waiter.result(240) for waiter in waiters]
        assert time.monotonic() - began < 50
        for error in errors:
            assert isinstance(error, Aborted)
            assert ("rank 2 failed first" if blamed else "the run is ending") in str(error)
        for call in (groups[2].poll, groups[2].finish, groups[2].barrier):
            assert isinstance(outcome(call), Aborted)


def test_the_parent_can_abort() -> None:
    with SharedGroupFiles.create(2) as files:
        group = SharedGroup(
            control=os.dup(files.control), arena=os.dup(files.arena), rank=1, world=2, timeout_s=100
        )
        with group, ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(outcome, group.barrier)
            until_asleep(group, rank=0)
            files.abort(0)
            error = waiter.result(240)
        assert isinstance(error, Aborted)
        assert "rank 0 failed first" in str(error)


def test_too_little_memory_is_said_by_rank_0_and_hangs_nobody() -> None:
    with ranks(3) as groups:
        errors = together(groups, lambda group: outcome(lambda: group.allocate(1 << 50, "the gradients")))
        assert isinstance(errors[0], OutOfSharedMemory)
        assert "the gradients" in str(errors[0])
        assert all(isinstance(error, Aborted) for error in errors[1:])


def test_ranks_that_ask_for_different_sizes_are_reported() -> None:
    with ranks(2) as groups:
        errors = together(groups, lambda group: outcome(lambda: group.allocate(4096 << group.rank, "a test")))
        assert errors[0] is None
        assert isinstance(errors[1], UserError)
        assert "8192" in str(errors[1])
        assert "4096" in str(errors[1])
        assert isinstance(outcome(groups[0].barrier), Aborted)


def test_bad_input_gets_a_sentence() -> None:
    with ranks(1) as (group,), ranks(1) as (other,):
        with pytest.raises(UserError, match="call allocate first"):
            group.bucket(0, 1, torch.float32)
        group.allocate(1024, "a test")
        other.allocate(1024, "a test")
        with pytest.raises(UserError, match="once"):
            group.allocate(1024, "a test")
        with pytest.raises(UserError, match=r"torch.int32.*torch.float16"):
            group.bucket(0, 1, torch.int32)
        for offset, count in ((64, 1), (-128, 1), (0, 1025), (0, -1)):
            with pytest.raises(UserError, match=f"offset={offset}, count={count}"):
                group.bucket(offset, count, torch.float32)
        bucket = group.bucket(0, 4, torch.float32)
        with pytest.raises(UserError, match=r"'maximum'.*did you mean 'max'"):
            group.all_reduce(bucket, "maximum")
        with pytest.raises(UserError, match="root=1"):
            group.broadcast(bucket, root=1)
        with pytest.raises(UserError, match="another group"):
            group.launch(other.bucket(0, 4, torch.float32))
        group.launch(bucket)
        with pytest.raises(UserError, match="still in use"):
            group.launch(bucket)
        group.finish()
        group.close()
        group.close()
        with pytest.raises(UserError, match="closed"):
            group.finish()


def test_a_control_segment_of_another_world_is_refused() -> None:
    with SharedGroupFiles.create(2) as files, pytest.raises(ManyhandsError, match="world 2"):
        SharedGroup(control=os.dup(files.control), arena=os.dup(files.arena), rank=0, world=3, timeout_s=1)


def test_results_outlive_the_group() -> None:
    with ranks(1) as (group,):
        group.allocate(1024, "a test")
        bucket = group.bucket(0, 256, torch.float32)
        bucket.tensor.fill_(3.0)
        group.all_reduce(bucket)
    assert bucket.tensor.eq(3.0).all()


@pytest.mark.parametrize("start", [0, LAST - 500])
def test_announcements_are_never_missed(start: int) -> None:
    """Two threads wake each other a thousand times without spinning: a lost wake-up would cost a slice each."""
    turns = 1000
    with Segment.create(4096, "a test") as segment:
        ping, pong, abort = (segment.address + offset for offset in (0, 512, 1024))
        for offset in (0, 512):
            segment.array(offset, 1, np.uint32)[0] = start
        deadline = time.monotonic_ns() + 20_000_000_000

        def answer() -> None:
            for turn in range(start + 1, start + 1 + turns):
                assert wait_until(ping, turn, abort, deadline, 0) == 0
                announce(pong, turn)

        thread = threading.Thread(target=answer)
        thread.start()
        for turn in range(start + 1, start + 1 + turns):
            announce(ping, turn)
            assert wait_until(pong, turn, abort, deadline, 0) == 0
        thread.join(20)
        assert time.monotonic_ns() < deadline - 10_000_000_000
        assert wait_until(pong, start + turns + 1, abort, time.monotonic_ns() + 1_000_000, 5) == TIMED_OUT


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one core to be on")
def test_a_thread_leaves_the_cores_of_others_and_stays_free() -> None:
    allowed = os.sched_getaffinity(0)
    with Segment.create(4096, "a test") as segment:
        word, room = segment.address, segment.address + 4096 - LEAVE_BYTES

        def moved() -> bool:
            announce(word, 1)
            before = on_my_core(word)
            leave_cores(word, 1, 128, room)
            return before and not on_my_core(word)

        assert any(moved() for _ in range(20))  # the scheduler may move the thread at any time, too
        assert os.sched_getaffinity(0) == allowed
        segment.array(8, 1, np.uint32)[0] = 4_000_000_000  # a core that cannot be
        leave_cores(word, 1, 128, room)
        assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("world", [2, 3])
def test_who_passes_an_exchange_proves_that_all_have_its_result_whatever_comes_after(world: int) -> None:
    """What an elastic run stands on: a rank that is cut after its part can go on from its own memory."""
    with ranks(world) as groups:
        allocate(groups, 4096)
        buckets = [group.bucket(0, 1000, torch.float32) for group in groups]
        for rank, (group, bucket) in enumerate(zip(groups, buckets, strict=True)):
            bucket.tensor.fill_(float(rank + 1))
            group.launch(bucket)
        for group in groups[1:]:
            assert not group.poll()  # each does its part and looks no further
        groups[0].finish()
        groups[0].abort(None)
        buckets[0].tensor.zero_()  # the one that passed goes on to its next gradient
        for group, bucket in zip(groups[1:], buckets[1:], strict=True):
            with pytest.raises(Aborted):
                group.finish()
            assert torch.equal(bucket.tensor, torch.full((1000,), world * (world + 1) / 2))


def test_a_wait_shows_the_number_that_the_launcher_knows_a_rank_by() -> None:
    with SharedGroupFiles.create(2) as files:
        group = SharedGroup(
            control=os.dup(files.control),
            arena=os.dup(files.arena),
            rank=0,
            world=2,
            timeout_s=4.0,  # three seconds to look, on a busy machine, too
            roles=[7, 9],
        )
        sign = np.zeros(2, np.int64)
        group._state[shared_group.GROUP_SIGN] = sign.ctypes.data
        seen = []

        def look() -> None:
            deadline = time.monotonic() + 180
            while not seen and time.monotonic() < deadline:
                if sign[1]:
                    seen.append(int(sign[1]) - 1)
                time.sleep(0.001)

        with group, ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            with pytest.raises(PeerTimeout, match=r"rank 7 waited .* for rank 9 to arrive") as raised:
                group.barrier()
            looking.result(240)
        assert seen == [raised.value.peer] == [9]
