"""GloVe by batches: one thread against plain numpy, and every split of the work against one thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.engine.fitting import fit
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.glove_model import GloveModel, GloveSnapshot
from manyhands.workloads.glove.glove_server import GloveTables, glove_tables
from manyhands.workloads.glove.glove_task import AllReduceStep, GloveTask, TensorStep
from manyhands.workloads.glove.learning import train_glove
from manyhands.workloads.glove.options import GloveOptions

SIZE = 120
OPTIONS = GloveOptions(dim=10, passes=2, x_max=10.0, batch=64, dtype="float64", seed=5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """1,000 records, so that the last batch of a pass is short; most batches name some rows twice."""
    drawn = np.random.default_rng(2)
    records = np.empty(1_000, RECORD)
    for name in ("word", "context"):
        records[name] = (SIZE ** drawn.random(len(records))).astype(np.int32)
    records["count"] = np.exp(drawn.normal(0.0, 2.0, len(records)))
    records.tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


def by_numpy(records: NDArray[np.void], options: GloveOptions) -> tuple[NDArray[np.float64], list[float]]:
    """Sums by row, then AdaGrad with torch's order; rows of words, then of contexts, the bias last."""
    start = GloveModel(SIZE, options).initialise().snapshot()
    rows = np.block([[start.word, start.word_bias[:, None]], [start.context, start.context_bias[:, None]]])
    squares, costs = np.ones_like(rows), []
    for _ in range(options.passes):
        cost = 0.0
        for begin in range(0, len(records), options.batch):
            batch = records[begin : begin + options.batch]
            i, j = batch["word"] - 1, SIZE + batch["context"] - 1
            diff = (rows[i, :-1] * rows[j, :-1]).sum(1) + rows[i, -1] + rows[j, -1] - np.log(batch["count"])
            fdiff = np.minimum(1, (batch["count"] / options.x_max) ** options.alpha) * diff
            cost += 0.5 * (fdiff * diff).sum()
            total = np.zeros_like(rows)
            for row, partner in ((i, j), (j, i)):
                slopes = np.concatenate(
                    [options.rate * fdiff[:, None] * rows[partner, :-1], fdiff[:, None]], axis=1
                )
                np.add.at(total, row, slopes)
            squares += total**2
            rows = rows - total / np.sqrt(squares)
        costs.append(cost / len(records))
    return rows, costs


def assert_equal(found: GloveSnapshot, expected: GloveSnapshot) -> None:
    for name in ("word", "context", "word_bias", "context_bias"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=0, atol=1e-9, err_msg=name
        )


def reference(path: Path) -> tuple[GloveSnapshot, list[float]]:
    result = train_glove(path, SIZE, OPTIONS)
    return result.model, result.costs


def task_of(path: Path) -> GloveTask:
    return GloveTask.of(path, SIZE, OPTIONS)


def in_threads(
    task: GloveTask, workers: int, kind: Callable[[GloveTask, SharedGroup, int], AllReduceStep | TensorStep]
) -> tuple[list[GloveSnapshot], list[float]]:
    """The models of all ranks at the end, and the costs of both passes."""
    with SharedGroupFiles.create(workers) as files:

        def run(rank: int) -> tuple[GloveSnapshot, list[float]]:
            control, arena = os.dup(files.control), os.dup(files.arena)
            with (
                SharedGroup(control=control, arena=arena, rank=rank, world=workers, timeout_s=30) as group,
                closing(kind(task, group, 0)) as step,
            ):
                step.fill()
                per_pass = task.passes.steps
                losses = [step.take(task.portion(number)).loss for number in range(2 * per_pass)]
                step.gather()
                assert isinstance(step.model, GloveModel)
                return step.model.snapshot(), [sum(losses[:per_pass]), sum(losses[per_pass:])]

        with ThreadPoolExecutor(workers) as pool:
            ended = list(pool.map(run, range(workers)))
    return [snapshot for snapshot, _ in ended], np.sum([costs for _, costs in ended], axis=0).tolist()


def test_one_thread_is_numpys_sum_by_row_and_one_step_per_row(path: Path) -> None:
    rows, costs = by_numpy(np.fromfile(path, RECORD), OPTIONS)
    found, found_costs = reference(path)
    expected = GloveSnapshot(
        word=rows[:SIZE, :-1],
        context=rows[SIZE:, :-1],
        word_bias=rows[:SIZE, -1],
        context_bias=rows[SIZE:, -1],
    )
    assert_equal(found, expected)
    np.testing.assert_allclose(found_costs, costs, rtol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_dimensions_over_workers_equal_one_process(path: Path, workers: int) -> None:
    expected, costs = reference(path)
    wholes, found_costs = in_threads(task_of(path), workers, TensorStep)
    assert_equal(wholes[0], expected)
    np.testing.assert_allclose(np.divide(found_costs, 1_000), costs, rtol=1e-11)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_records_over_workers_equal_one_process_on_every_replica(path: Path, workers: int) -> None:
    expected, costs = reference(path)
    replicas, found_costs = in_threads(task_of(path), workers, AllReduceStep)
    for replica in replicas:
        assert_equal(replica, expected)
        np.testing.assert_array_equal(replica.word, replicas[0].word)
    np.testing.assert_allclose(np.divide(found_costs, 1_000), costs, rtol=1e-11)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, about its sparse gradients
def test_the_task_of_the_servers_is_the_same_rule(path: Path) -> None:
    expected, costs = reference(path)
    run = fit(glove_tables(task_of(path), 3), "single", steps=2 * 16, seed=OPTIONS.seed)
    assert isinstance(run.model, GloveTables)
    assert_equal(run.model.snapshot(), expected)
    losses = np.array(run.history.loss).reshape(2, 16).sum(1) * OPTIONS.batch / 1_000
    np.testing.assert_allclose(losses, costs, rtol=1e-11)


@pytest.mark.parametrize(
    ("strategy", "workers", "batch", "sentence"),
    [
        ("single", 2, 1, "single is one thread"),
        ("hogwild", 2, 8, "hogwild takes one record at a time"),
        ("tensor", 2, 1, "batch=1: tensor works on batches"),
        ("tensor", 11, 8, "tensor splits dim=10;"),
        ("allreduce algorithm=ring", 2, 8, "takes no algorithm"),
        ("central", 2, 8, "central does not train glove"),
        ("hogwild", 0, 1, "workers=0"),
    ],
)
def test_what_does_not_go_together_is_refused(
    path: Path, strategy: str, workers: int, batch: int, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        train_glove(path, SIZE, GloveOptions(dim=10, batch=batch), strategy=strategy, workers=workers)
