"""y = a x + b: least squares by scipy, lone workers by torch, and what they find together by `fit`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.data.plan import BatchPlan
from manyhands.inference.opening import open_predictor
from manyhands.inference.predictor import ReadAs
from manyhands.tasks import build
from manyhands.tasks.builtin import TaskEnd
from manyhands.tasks.line import alone, least_squares, line_table, own_parts


def columns(task: mh.Task) -> tuple[np.ndarray, np.ndarray]:
    return task.data[0].numpy()[:, 0], task.data[1].numpy()[:, 0]


def end(model: torch.nn.Module, *, workers: int, steps: int, splits: bool = True) -> TaskEnd:
    return TaskEnd(model=model, workers=workers, steps=steps, seed=0, splits_batches=splits)


def test_least_squares_is_scipys() -> None:
    x, y = columns(build("line", noise=2.0, points=50))
    theirs = scipy.stats.linregress(x, y)
    assert least_squares(x, y) == pytest.approx((theirs.slope, theirs.intercept), rel=1e-12)


@pytest.mark.parametrize("splits", [True, False])
def test_a_lone_worker_finds_what_torch_finds_on_its_parts(splits: bool) -> None:
    task = build("line", points=40, batch_size=7)
    ended = end(task.model(), workers=3, steps=12, splits=splits)
    for rank in range(3):
        parts = own_parts(BatchPlan(40, 7, 0), ended, rank)
        torch.manual_seed(0)
        model = task.model()
        start = (model.weight.item(), model.bias.item())
        optimizer = task.optimizer(model.parameters())
        for part in parts:
            optimizer.zero_grad()
            task.loss(model, [column[part.tolist()] for column in task.data]).backward()
            optimizer.step()
        assert alone(*columns(task), parts, 0.1, start) == pytest.approx(
            (model.weight.item(), model.bias.item()), rel=1e-10
        )


def test_parts_of_all_workers_are_every_batch_once() -> None:
    plan = BatchPlan(40, 7, 0)
    for splits in (True, False):
        ended = end(torch.nn.Linear(1, 1), workers=3, steps=6, splits=splits)
        given = np.concatenate([part for rank in range(3) for part in own_parts(plan, ended, rank)])
        assert sorted(given) == sorted(np.concatenate([plan.indices(step) for step in range(6)]))


def test_the_first_step_together_is_the_mean_of_the_first_steps_alone() -> None:
    """A gradient is linear in the points: from one start, equal parts average to the whole."""
    task = build("line", points=40, batch_size=8)
    run = mh.fit(task, "single", steps=1)
    ended = end(run.model, workers=2, steps=1)
    torch.manual_seed(0)
    first = task.model()
    start = (first.weight.item(), first.bias.item())
    parts = [own_parts(BatchPlan(40, 8, 0), ended, rank) for rank in range(2)]
    found = [alone(*columns(task), one, 0.1, start) for one in parts]
    assert np.mean(found, axis=0) == pytest.approx(
        [run.model.weight.item(), run.model.bias.item()], rel=1e-12
    )


def test_the_table_names_everybody_and_the_truth() -> None:
    task = build("line", slope=-3.0, intercept=0.5, noise=0.0)
    run = mh.fit(task, "single", epochs=12)
    table = line_table(task, end(run.model, workers=2, steps=run.summary["steps"]))
    assert [row[0] for row in table.rows] == [
        "worker 0, alone",
        "worker 1, alone",
        "together",
        "least squares",
        "the line itself",
    ]
    assert all(len(row) == len(table.head) for row in table.rows)
    for row in table.rows[2:]:
        assert [float(row[1]), float(row[2])] == pytest.approx([-3.0, 0.5], abs=2e-3)


def test_the_command_shows_the_table(tmp_path: Path) -> None:
    words = ["train", "line", "--strategy", "single", "--workers", "1", "--epochs", "1", "--progress", "none"]
    words += ["--out", str(tmp_path / "run"), "--json", str(tmp_path / "run.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "what each worker found, and what they found together" in done.output
    table = json.loads((tmp_path / "run.json").read_text())["table"]
    alone_row, together = table["rows"][:2]
    assert alone_row[1:] == together[1:]  # one worker is all of them


def test_a_line_that_was_found_is_asked_for_more_points(tmp_path: Path) -> None:
    run = mh.fit(build("line"), "single", steps=20, out=tmp_path / "run")
    predictor = open_predictor(tmp_path / "run")
    a, b = (float(one.detach()) for one in run.model.parameters())
    (tmp_path / "points").write_text("0.5\n-2\n")
    [points] = predictor.blocks(str(tmp_path / "points"), ReadAs())
    assert predictor.answers(points) == pytest.approx([a * 0.5 + b, a * -2 + b])
    for bad, sentence in (
        (["x"], "input 0 is 'x'; it must be a finite number"),
        ([1, math.inf], "input 1 is 'inf'"),
    ):
        with pytest.raises(mh.UserError, match=sentence):
            predictor.inputs(bad)
    (tmp_path / "points").write_text("once")
    with pytest.raises(mh.UserError, match="with a number on each line"):
        list(predictor.blocks(str(tmp_path / "points"), ReadAs()))
