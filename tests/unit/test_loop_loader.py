"""Shares of a user's loader, put together again, are its batches; whatever the loader is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from manyhands.loop.loader import LoaderPart, Readings, SplitLoader, StreamLoader, prepare_loader


class Worker:
    """A reader that meets nobody: its random numbers are the same as the others' because they share a process."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.shares: list[float] = []
        self.readings = Readings(world, self.shares.append)

    def in_worker_0s_order(self, draw: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        return draw()

    def all_have_a_batch(self, mine: bool) -> bool:
        return mine


class Words(Dataset[tuple[str, int]]):
    """Looked up by key, not by number."""

    def __getitem__(self, key: str) -> tuple[str, int]:
        return key.upper(), len(key)


def as_it_is(batch: Any) -> Any:
    return batch


KEYS = [["a", "bb", "ccc"], ["dddd"], ["e", "f", "g", "h"]]
NUMBERS = TensorDataset(torch.arange(23), torch.arange(23) * 2)

LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(NUMBERS, batch_size=5),
    "shuffled": lambda: DataLoader(
        NUMBERS, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "last dropped": lambda: DataLoader(NUMBERS, batch_size=5, drop_last=True),
    "own batch sampler": lambda: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(SequentialSampler(NUMBERS), 4, drop_last=False)
    ),
    "own keys": lambda: DataLoader(Words(), batch_sampler=KEYS, collate_fn=lambda rows: rows),
    "worker processes": lambda: DataLoader(NUMBERS, batch_size=3, num_workers=2, prefetch_factor=3),
}


def flat(batch: Any) -> list[Any]:
    """The samples of a batch, one by one."""
    if isinstance(batch[0], torch.Tensor):
        return list(zip(*(column.tolist() for column in batch), strict=True))
    return list(batch)


CASES = [
    (kind, world) for kind in LOADERS for world in ((2,) if kind == "worker processes" else (1, 2, 3, 7))
]


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_shares_make_up_the_batches(kind: str, world: int) -> None:
    together: list[list[Any]] = [[] for _ in LOADERS[kind]()]
    marks = []
    for rank in range(world):
        worker = Worker(rank, world)
        loader = prepare_loader(LOADERS[kind](), worker, as_it_is)
        assert isinstance(loader, SplitLoader)
        assert len(loader) == len(together)
        parts: list[LoaderPart] = []
        for number, batch in enumerate(loader):
            parts.append(worker.readings.part)
            samples = flat(batch)
            assert samples, "an empty batch reached the user"
            together[number] += samples[: parts[-1].samples]
        marks.append([part.mark for part in parts])
        assert worker.shares[-1] == 1 / world, "after the loop an even split counts again"
    assert together == [flat(batch) for batch in LOADERS[kind]()]
    assert all(mark == marks[0] for mark in marks)


def test_shares_are_parts_of_one() -> None:
    for world in (2, 3, 7):
        shares = []
        for rank in range(world):
            worker = Worker(rank, world)
            shares.append(
                [worker.readings.part.share for _ in prepare_loader(LOADERS["in order"](), worker, as_it_is)]
            )
        assert all(sum(of_batch) == pytest.approx(1, abs=1e-12) for of_batch in zip(*shares, strict=True))


def test_an_inner_loop_gives_the_outer_one_its_part_back() -> None:
    worker = Worker(0, 2)
    outer, inner = (prepare_loader(LOADERS["in order"](), worker, as_it_is) for _ in range(2))
    for _ in outer:
        before = worker.readings.part
        for _ in inner:
            break
        assert worker.readings.part == before
    assert len(worker.shares) > 10


def test_the_same_loader_may_be_read_twice_at_once() -> None:
    worker = Worker(0, 2)
    loader = prepare_loader(LOADERS["in order"](), worker, as_it_is)
    pairs = [(len(one[0]), len(other[0])) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [(3, 3)] * 4 + [(2, 2)]


def test_a_loader_keeps_what_else_it_has() -> None:
    loader = prepare_loader(LOADERS["in order"](), Worker(0, 2), as_it_is)
    assert loader.batch_size == 5
    assert loader.dataset is NUMBERS
    with pytest.raises(AttributeError):
        _ = loader.colour


def test_what_can_not_be_split_is_a_stream_and_tells_its_last_batch_ahead() -> None:
    worker = Worker(1, 4)

    def numbers() -> Iterator[int]:
        yield from range(3)

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return numbers()

    for source in (Endless(), [0, 1, 2], DataLoader(list(range(3)), batch_size=None)):  # type: ignore[arg-type]
        loader = prepare_loader(source, worker, as_it_is)
        assert isinstance(loader, StreamLoader)
        seen = [(int(number), worker.readings.part) for number in loader]
        assert seen == [
            (number, LoaderPart(share=0.25, last=last))
            for number, last in ((0, False), (1, False), (2, True))
        ]
