"""Shares of a user's loader, put together again, are its batches; whatever the loader is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from manyhands.engine.exchange import WorkerPart
from manyhands.errors import UserError
from manyhands.interop.own_loop.backward_rounds import Rounds
from manyhands.interop.own_loop.prepared_loader import (
    OwnStreamLoader,
    SharedStreamLoader,
    SplitLoader,
    mark_of,
    prepare_loader,
)
from manyhands.interop.own_loop.readings import Draws, LoaderPart, Readings


class Worker:
    """A reader that meets nobody: its random numbers are the same as the others' because they share a process.

    Worker 0 leaves its draws of every reading in `report`, where the others find them.
    """

    synchronous = True
    sharing, require_own_streams = Rounds.sharing, Rounds.require_own_streams

    def __init__(self, rank: int, world: int, report: list[torch.Tensor] | None = None) -> None:
        self.rank = rank
        self.world = world
        self.part = WorkerPart(index=rank, count=world)
        self._report = report
        self._readings = 0
        self.shares: list[float] = []
        self.readings = Readings(world, self.shares.append)

    def in_worker_0s_order(self, draw: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        return draw()

    def count_reading(self) -> None:
        pass

    def all_have_a_batch(self, mine: bool) -> bool:
        return mine

    def worker_0s_draws(self) -> Draws:
        if self._report is None:
            return Draws()
        if self.rank == 0:
            self._report.append(Draws().content())
        self._readings += 1
        return Draws.from_content(self._report[self._readings - 1])

    def require_one_batch(self, mark: int) -> None:
        self.first_mark = mark


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


def test_a_stream_of_ones_own_tells_its_last_batch_ahead() -> None:
    worker = Worker(1, 4)

    def numbers() -> Iterator[int]:
        yield from range(3)

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return numbers()

    for source in (Endless(), [0, 1, 2], DataLoader(list(range(3)), batch_size=None)):  # type: ignore[arg-type]
        loader = prepare_loader(source, worker, as_it_is, to_split=False)
        assert isinstance(loader, OwnStreamLoader)
        seen = [(int(number), worker.readings.part) for number in loader]
        assert seen == [
            (number, LoaderPart(share=0.25, last=last))
            for number, last in ((0, False), (1, False), (2, True))
        ]


def test_a_loader_that_the_script_has_split_keeps_its_distributed_sampler() -> None:
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(NUMBERS, batch_size=5, sampler=sampler)
    with pytest.raises(UserError, match=r"leave it out.*or keep it with prepare\(loader, split=False\)"):
        prepare_loader(loader, Worker(1, 2), as_it_is)
    prepared = prepare_loader(loader, Worker(1, 2), as_it_is, to_split=False)
    assert prepared.sampler is sampler
    assert [batch[0].tolist() for batch in prepared] == [[1, 3, 5, 7, 9], [11, 13, 15, 17, 19], [21, 0]]


class Stream(IterableDataset[tuple[int, int]]):
    """Numbers that can only be iterated; worker processes of the loader share them as torch's docs say."""

    def __init__(self, end: int | None, draw: Callable[[], int] = lambda: 0) -> None:
        self._end, self._draw = end, draw

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        begin, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for number in islice(
            count(begin, stride), None if self._end is None else -(-(self._end - begin) // stride)
        ):
            yield number, self._draw()


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict[str, Any]


def whole(number: int) -> Pair:
    rows = torch.arange(5) + 5 * number
    return Pair(rows, {"twice": 2 * rows, "thrice": [3 * rows.numpy()]})


STREAMS: dict[str, Callable[[], Any]] = {
    "samples": lambda: DataLoader(Stream(23), batch_size=5),
    "last dropped": lambda: DataLoader(Stream(23), batch_size=5, drop_last=True),
    "own collate": lambda: DataLoader(Stream(23), batch_size=4, collate_fn=lambda rows: rows),
    "worker processes": lambda: DataLoader(Stream(23), batch_size=3, num_workers=2),
    "drawn by torch": lambda: DataLoader(Stream(23, lambda: int(torch.randint(9, ()))), batch_size=5),
    "drawn by Python": lambda: DataLoader(Stream(23, lambda: random.randrange(9)), batch_size=5),
    "drawn by numpy": lambda: DataLoader(Stream(23, lambda: int(np.random.randint(9))), batch_size=5),
    "drawn in processes": lambda: DataLoader(
        Stream(23, lambda: int(torch.randint(9, ()))), batch_size=5, num_workers=1
    ),
    "whole batches": lambda: [(torch.arange(5) + 5 * n, torch.ones(5)) for n in range(3)],
    "batch_size=None": lambda: DataLoader(list(torch.arange(24).view(3, 4, 2)), batch_size=None),  # type: ignore[arg-type]
}


def seeded() -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


def samples_of(batch: Any) -> list[Any]:
    return flat(batch) if not isinstance(batch, torch.Tensor) else batch.tolist()


@pytest.mark.parametrize("kind", STREAMS)
def test_shares_of_a_stream_make_up_its_batches(kind: str) -> None:
    world = 3
    seeded()
    wanted = [[samples_of(batch) for batch in loader] for loader in [STREAMS[kind]()] for _ in range(2)]
    together: list[list[list[Any]]] = [[[] for _ in epoch] for epoch in wanted]
    marks, report = [], list[torch.Tensor]()
    for rank in range(world):
        if rank == 0:
            seeded()
        worker = Worker(rank, world, report)
        loader = prepare_loader(STREAMS[kind](), worker, as_it_is)
        assert isinstance(loader, SharedStreamLoader)
        seen = []
        for epoch in together:
            for number, batch in enumerate(loader):
                seen.append(worker.readings.part)
                epoch[number] += samples_of(batch)[: seen[-1].samples]
        assert worker.shares[-1] == 1 / world
        marks.append([part.mark for part in seen])
        assert worker.first_mark in marks[-1]
    assert together == wanted
    assert all(mark == marks[0] for mark in marks)
    assert len(set(marks[0])) > 1


def test_an_endless_stream_is_read_as_far_as_the_loop_goes() -> None:
    loader = prepare_loader(DataLoader(Stream(None), batch_size=4), Worker(1, 2), as_it_is)
    assert [batch[0].tolist() for batch in islice(loader, 3)] == [[2, 3], [6, 7], [10, 11]]


def test_a_batch_of_any_make_is_cut_along_its_first_dimension() -> None:
    loader = prepare_loader(map(whole, range(2)), Worker(1, 2), as_it_is)
    first, second = loader
    assert isinstance(first, Pair)
    assert first.left.tolist() == [3, 4]
    assert first.right["twice"].tolist() == [6, 8]
    assert second.right["thrice"][0].tolist() == [24, 27]


def test_a_worker_without_a_share_gets_a_filler_that_weighs_nothing() -> None:
    for source in (DataLoader(Stream(2), batch_size=4), [(torch.arange(2), torch.zeros(2))]):
        worker = Worker(3, 4)
        parts = [(len(batch[0]), worker.readings.part) for batch in prepare_loader(source, worker, as_it_is)]
        ((rows, part),) = parts
        assert (rows, part.share, part.samples) == (2, 0.0, 0)


def test_what_can_not_be_split_is_read_whole_with_one_warning_that_says_what_to_do() -> None:
    batches = [{"text": "a", "x": torch.ones(3)}, {"text": "b", "x": torch.ones(3)}]
    worker = Worker(0, 2)
    loader = prepare_loader(batches, worker, as_it_is)
    with pytest.warns(UserWarning, match=r"prepare\(stream, split=False\)") as report:
        seen = [batch["text"] for batch in loader]
    assert seen == ["a", "b"]
    assert len(report) == 1
    assert [worker.readings.part.share for _ in loader] == [0.5, 0.5], (
        "and no second warning, which is an error"
    )
    assert [batch["text"] for batch in prepare_loader(batches, Worker(1, 2), as_it_is)] == ["a", "b"]
    assert [batch["text"] for batch in prepare_loader(batches, Worker(0, 1), as_it_is)] == ["a", "b"]


def test_marks_tell_batches_apart() -> None:
    alike = [{"x": torch.ones(3), "y": ["a", 1]}, {"x": torch.ones(3), "y": ["a", 1]}]
    words = [
        np.array(["".join(["many", "hands"]), None], dtype=object) for _ in range(2)
    ]  # at other addresses
    assert mark_of(words[0]) == mark_of(words[1]) != mark_of(words[0][::-1])
    assert mark_of(alike[0]) == mark_of(alike[1]) != 0
    others = [torch.zeros(3), torch.zeros(3, 1), torch.zeros(3).double(), np.zeros(3), (), [0.0], "0.0", None]
    others += [torch.zeros(0), torch.cat([torch.zeros(5000), torch.ones(1)]), torch.zeros(5001), object()]
    assert len({mark_of(one) for one in others}) == len(others)


def test_draws_are_lent_and_given_back() -> None:
    def numbers() -> list[float]:
        return [float(torch.rand(())), random.gauss(), random.random(), float(np.random.randn())]

    seeded()
    random.gauss()
    np.random.randn()
    draws = Draws.from_content(Draws().content())
    wanted = [numbers(), numbers()]
    own = Draws().content()
    with draws.lent():
        assert numbers() == wanted[0]
    assert torch.equal(Draws().content(), own)
    draws.leave_out_unused()
    seeded()
    random.gauss()
    np.random.randn()
    torch.rand(())  # the process itself has drawn from this one
    draws.keep()
    assert numbers()[1:] == wanted[1][1:]


def test_draws_that_nobody_used_are_left_alone() -> None:
    seeded()
    draws = Draws()
    with draws.lent():
        random.random()
    draws.leave_out_unused()
    before = np.random.get_state()[2]
    with draws.lent():
        lent = random.random()
        np.random.random()  # not lent any more: the process's own
    assert np.random.get_state()[2] != before
    seeded()
    random.random()
    assert random.random() == lent
