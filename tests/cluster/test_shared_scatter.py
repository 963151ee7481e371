"""The halfway reduction of a group, its common memory, and ranges that are not even."""

from __future__ import annotations

import pytest
import torch

from manyhands.errors import Aborted, OutOfSharedMemory, UserError
from manyhands.native.group.shared_group import SharedGroupFiles, slice_of
from ways import in_threads, join


@pytest.mark.parametrize("world", range(1, 6))
def test_each_rank_keeps_the_sum_of_its_own_slice_only(world: int) -> None:
    count = 3000
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part

    def act(rank: int) -> torch.Tensor:
        with join(files, rank) as group:
            group.allocate(2 * 16384, "a test")
            scattered, summed = (
                group.bucket(0, count, torch.float32),
                group.bucket(16384, count, torch.float32),
            )
            for bucket in (scattered, summed):
                bucket.tensor.copy_(parts[rank])
            group.launch(scattered, scatter=True)
            group.launch(summed)
            group.finish()
            assert torch.equal(summed.tensor, total)
            assert all(torch.equal(part, total) for part in summed.parts)
            group.barrier()
            return scattered.tensor.clone()

    with SharedGroupFiles.create(world) as files:
        results = in_threads(world, act)
    for rank, result in enumerate(results):
        mine = slice_of(count, 4, rank, world)
        expected = parts[rank].clone()
        expected[mine.start : mine.stop] = total[mine.start : mine.stop]
        assert torch.equal(result, expected)


def test_ranges_may_be_uneven() -> None:
    ranges = [range(5), range(5, 5), range(5, 100)]

    def act(rank: int) -> torch.Tensor:
        with join(files, rank) as group:
            group.allocate(4096, "a test")
            bucket = group.bucket(0, 100, torch.float64, ranges)
            bucket.tensor.fill_(rank + 1)
            group.launch(bucket, scatter=True)
            group.finish()
            return bucket.tensor.clone()

    with SharedGroupFiles.create(3) as files:
        first, second, third = in_threads(3, act)
    assert first.tolist() == [6.0] * 5 + [1.0] * 95
    assert second.tolist() == [2.0] * 100
    assert third.tolist() == [3.0] * 5 + [6.0] * 95


@pytest.mark.parametrize(
    "ranges",
    [
        [range(100)],
        [range(50), range(50, 99)],
        [range(50), range(49, 100)],
        [range(50), range(51, 100)],
    ],
)
def test_ranges_that_miss_or_repeat_an_item_are_refused(ranges: list[range]) -> None:
    def act(rank: int) -> None:
        with join(files, rank) as group:
            group.allocate(4096, "a test")
            with pytest.raises(UserError, match="2 ranges, one after the other from 0 to 100"):
                group.bucket(0, 100, torch.float32, ranges)

    with SharedGroupFiles.create(2) as files:
        in_threads(2, act)


def test_common_memory_is_one_and_stays_beside_the_buckets() -> None:
    world = 3

    def act(rank: int) -> list[float]:
        with join(files, rank) as group, group.share(5000 * 8, "a test") as common:
            values = common.tensor(0, 5000, torch.float64)
            values[rank::world] = torch.arange(5000, dtype=torch.float64)[rank::world]
            group.allocate(1000 * 8, "a test")
            bucket = group.bucket(0, 1000, torch.float64)
            bucket.tensor.fill_(1)
            group.all_reduce(bucket)
            assert bucket.tensor.eq(world).all()
            group.barrier()
            read = values.tolist()
            del values
            return read

    with SharedGroupFiles.create(world) as files:
        for read in in_threads(world, act):
            assert read == [float(number) for number in range(5000)]


def test_what_fails_to_be_allocated_leaves_the_common_memory_alone() -> None:
    def act(rank: int) -> bool:
        with join(files, rank) as group, group.share(8, "the parameters") as common:
            value = common.tensor(0, 1, torch.float64)
            group.barrier()
            if rank == 0:
                value.fill_(7)
            group.barrier()
            with pytest.raises(OutOfSharedMemory if rank == 0 else Aborted):
                group.allocate(1 << 50, "the gradients")
            return value.item() == 7

    with SharedGroupFiles.create(2) as files:
        assert in_threads(2, act) == [True, True]


def test_share_comes_once_and_first_and_alike() -> None:
    def act(rank: int) -> None:
        with join(files, rank) as group:
            group.share(100, "a test").close()
            for _ in range(2):
                with pytest.raises(UserError, match=r"share\(1\): call it once, before allocate"):
                    group.share(1, "a test")
                group.barrier()
            group.allocate(100, "a test")
            with pytest.raises(UserError, match="call it once"):
                group.share(1, "a test")

    with SharedGroupFiles.create(2) as files:
        in_threads(2, act)

    def differ(rank: int) -> str:
        with join(files, rank) as group:
            try:
                group.share(4096 << rank, "a test").close()
            except (UserError, Aborted) as error:
                return f"{type(error).__name__}: {error}"
        return ""

    with SharedGroupFiles.create(2) as files:
        first, second = in_threads(2, differ)
    assert first.startswith("Aborted: rank 0 stopped its exchange: rank 1 failed first")
    assert second.startswith("UserError: rank 1 asks for 8192 bytes of shared memory, but rank 0 for 4096")
