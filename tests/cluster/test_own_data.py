"""Data of which every worker reads its own: who reads which file, what a batch is, and where a resumed run goes on."""

from __future__ import annotations

import copy
import gzip
import itertools
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import manyhands as mh
from equality import distance
from manyhands.data.batches import split
from manyhands.data.own import RayShards, own_data
from manyhands.data.randomness import mix, seed_all
from manyhands.data.reading import OwnShares
from manyhands.engine.options import Options
from manyhands.engine.request import Length, Request
from manyhands.errors import DataError, UserError
from manyhands.strategy import Strategy

STEPS, BATCH = 7, 7
MODEL = nn.Linear(1, 1).double()


def write_files(folder: Path, files: int = 5) -> None:
    """File i holds the numbers 100 i, 100 i + 1, …: more of them in later files."""
    for number in range(files):
        lines = "".join(f"{100 * number + line}\n" for line in range(3 + number))
        (folder / f"{number}.txt").write_text(lines)


def numbers(path: Path) -> Iterable[Tensor]:
    return (torch.tensor([float(line)], dtype=torch.float64) for line in path.read_text().split())


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch / 100) - batch).square().mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def task(data: Any, **changes: Any) -> mh.Task:
    settings = {"loss": loss, "optimizer": optimizer, "batch_size": BATCH, **changes}
    return mh.Task(model=lambda: copy.deepcopy(MODEL), data=data, **settings)


def plain_loop(folder: Path, workers: int, steps: int = STEPS) -> dict[str, Tensor]:
    """What a user writes who has all files at hand."""
    streams = [
        itertools.cycle(
            [one for path in sorted(folder.glob("*.txt"))[rank::workers] for one in numbers(path)]
        )
        for rank in range(workers)
    ]
    model = copy.deepcopy(MODEL)
    stepper = optimizer(model.parameters())
    for _ in range(steps):
        batch = [
            sample
            for rank, stream in enumerate(streams)
            for sample in itertools.islice(stream, len(split(BATCH, rank, workers)))
        ]
        stepper.zero_grad()
        loss(model, torch.stack(batch)).backward()  # type: ignore[no-untyped-call]
        stepper.step()
    return model.state_dict()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_file_is_read_by_one_worker_and_shares_are_those_of_common_batches(
    tmp_path: Path, workers: int
) -> None:
    write_files(tmp_path)
    data = mh.Files(f"{tmp_path}/*.txt").dealt(workers)
    seen = [list(data.stream(part, workers)) for part in range(workers)]
    expected = [str(100 * number + line) for number in range(5) for line in range(3 + number)]
    assert sorted(itertools.chain(*seen), key=int) == expected
    assert [int(lines[0]) // 100 for lines in seen] == list(range(workers)), "dealt in turn, by name"
    shares = [OwnShares(data, None, BATCH, 2, lambda step, part: None) for _ in range(workers)]
    for step in range(6):
        mine = [found.share(step, part, workers) for part, found in enumerate(shares)]
        assert [one.samples for one in mine] == [len(split(BATCH, part, workers)) for part in range(workers)]
        assert sum(one.weight for one in mine) == pytest.approx(1.0)
        for part, one in enumerate(mine):
            first = step * one.samples
            endless = itertools.islice(itertools.cycle(seen[part]), first, first + one.samples)
            assert [line for piece in one.pieces for line in piece.fetch()] == list(endless)


def test_lines_are_read_from_gzip_too_and_each_worker_finds_what_is_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"part-{rank}-of-2.gz").write_bytes(gzip.compress(f"ä{rank}\r\n\nb\n".encode()))
    local = mh.Files(f"{tmp_path}/part-{{rank}}-of-{{world}}.gz")
    assert pickle.loads(pickle.dumps(local)) == local
    assert [list(local.stream(rank, 2)) for rank in range(2)] == [["ä0", "", "b"], ["ä1", "", "b"]]
    with pytest.raises(UserError, match=r"worker 2 finds no file that matches '.*part-2-of-3.gz'"):
        local.stream(2, 3)
    (tmp_path / "part-0-of-1.gz").write_bytes(gzip.compress(b"whole lines\n" * 1000)[:-9])
    with pytest.raises(DataError, match=r"part-0-of-1.gz cannot be read"):
        list(local.stream(0, 1))


class Chance(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        for _ in range(4):
            yield float(torch.rand(()))


def test_workers_draw_by_chance_apart_and_again_the_same() -> None:
    def drawn(rank: int, steps: Iterable[int]) -> list[list[float]]:
        shares = OwnShares(
            mh.PerWorker(lambda rank, world: Chance()),
            None,
            6,
            1,
            lambda step, part: seed_all(mix(3, step, part, 1)),
        )
        return [shares.share(step, rank, 2).pieces[0].fetch().tolist() for step in steps]

    zero, one = drawn(0, range(4)), drawn(1, range(4))
    assert not set(itertools.chain(*zero)) & set(itertools.chain(*one))
    assert drawn(0, [3, 1, 2]) == [zero[3], zero[1], zero[2]], "begins late, and goes back"


def test_weights_are_those_of_a_loop_that_has_all_files_also_after_a_resume(tmp_path: Path) -> None:
    write_files(tmp_path)
    described = task(mh.Files(f"{tmp_path}/*.txt", read=numbers), evaluation=torch.ones(4, 1).double())
    alone = mh.fit(described, "single", steps=STEPS)
    assert distance(alone.model.state_dict(), plain_loop(tmp_path, 1)) < 1e-9
    arguments: dict[str, Any] = {"workers": 3, "out": tmp_path / "run"}
    mh.fit(described, "mirrored", steps=3, **arguments)
    run = mh.fit(described, "mirrored", steps=STEPS, resume=True, **arguments)
    assert distance(run.model.state_dict(), plain_loop(tmp_path, 3)) < 1e-9
    assert run.summary["samples"] == BATCH * (STEPS - 3), "of the second life"


class RowsOfRay:
    """What we call of a Ray Dataset, in the module that it says it is from."""

    __module__ = "ray.data.dataset"

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def split(self, n: int, *, equal: bool) -> list[RowsOfRay]:
        assert equal
        each = len(self.rows) // n
        return [RowsOfRay(self.rows[part * each : (part + 1) * each]) for part in range(n)]

    def count(self) -> int:
        return len(self.rows)

    def iter_rows(self) -> Iterator[Any]:
        return iter(self.rows)


def test_a_ray_dataset_is_dealt_where_the_run_is_asked_for_and_travels_as_its_shards() -> None:
    rows = [{"x": torch.tensor([float(number)])} for number in range(7)]
    described = task(RowsOfRay(rows), loss=lambda model, batch: model(batch["x"].double()).mean())
    dealt = request(described, "mirrored", 3).plan.task.data
    assert isinstance(dealt, RayShards)
    assert dealt.dealt(3) is dealt
    travelled = dealt.__reduce__()
    assert travelled == (RayShards, (None, dealt.shards))
    read = [[float(row["x"]) for row in dealt.stream(part, 3)] for part in range(3)]
    assert read == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UserError, match="fewer rows than the 8 workers"):
        RayShards(RowsOfRay(rows)).dealt(8)
    assert own_data(rows) is None


def request(described: mh.Task, strategy: str, workers: int, **length: int) -> Request:
    asked = Length(**(length or {"steps": 2}))
    return Request.make(described, Strategy.parse(strategy), workers, asked, 0, Options(), "cpu")


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path)
    pattern = f"{tmp_path}/*.txt"
    files = task(mh.Files(pattern, read=numbers))
    assert request(files, "pipeline stages=2 data=2", 4).plan.task.data.paths[0] == f"{tmp_path}/0.txt"
    for strategy, workers, length, sentence in (
        ("mirrored", 6, {}, "matches 5 of the 6 files that 6 workers need, one each"),
        (
            "mirrored",
            2,
            {"epochs": 1},
            "data is each worker's own, whose epochs have no known length",
        ),
        ("ps", 2, {}, "data is each worker's own: a batch of ps may be computed again"),
        ("hogwild", 2, {}, "data is each worker's own: under hogwild one worker computes each batch"),
    ):
        with pytest.raises(UserError, match=sentence):
            request(files, strategy, workers, **length)
    with pytest.raises(UserError, match="batch_size=2: each of 3 workers reads data of its own"):
        request(task(mh.Files(pattern), batch_size=2), "mirrored", 3)
    with pytest.raises(UserError, match=r"there is no file that matches '.*\.csv'"):
        mh.Files(f"{tmp_path}/*.csv")
    with pytest.raises(UserError, match=r"pattern is ''; it must be a string such as"):
        mh.Files("")
    with pytest.raises(UserError, match="weights need data with indices, but data is each"):
        task(mh.Files(pattern), weights=torch.ones(3))
    with pytest.raises(UserError, match="evaluation is each worker's own data"):
        task(mh.Files(pattern), evaluation=mh.Files(pattern))
    with pytest.raises(
        UserError, match=r"make\(0, 1\) returned a list_iterator; it must return something that starts again"
    ):
        mh.PerWorker(lambda rank, world: iter([1])).stream(0, 1)
    empty = OwnShares(mh.PerWorker(lambda rank, world: []), None, 4, 1, lambda step, part: None)
    with pytest.raises(UserError, match="data of worker 1, a list, gave no sample; give at least one"):
        empty.share(0, 1, 2)
