"""y = a x + b: least squares by scipy, lone workers by numpy, and what they find together by `fit`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.serving.opening import open_predictor
from manyhands.workloads.builtin_task import TaskEnd
from manyhands.workloads.predictor import ReadAs
from manyhands.workloads.tasks import build
from manyhands.workloads.tasks.line import least_squares, line_table


def columns(task: mh.Task) -> tuple[np.ndarray, np.ndarray]:
    return task.data[0].numpy()[:, 0], task.data[1].numpy()[:, 0]


def test_least_squares_is_scipys() -> None:
    x, y = columns(build("line", noise=2.0, points=50))
    theirs = scipy.stats.linregress(x, y)
    assert least_squares(x, y) == pytest.approx((theirs.slope, theirs.intercept), rel=1e-12)


def theirs(x: np.ndarray, y: np.ndarray) -> list[float]:
    """By numpy's own solver."""
    found, *_ = np.linalg.lstsq(np.stack([x, np.ones_like(x)], axis=1), y, rcond=None)
    return [float(one) for one in found]


@pytest.mark.parametrize(("workers", "points"), [(2, 512), (3, 50), (1, 9)])
def test_each_worker_finds_the_line_of_its_own_points_which_no_other_has(workers: int, points: int) -> None:
    task = build("line", points=points, noise=2.0)
    x, y = columns(task)
    table = line_table(task, TaskEnd(model=task.model(), workers=workers))
    parts = np.array_split(np.arange(points), workers)
    lines = [theirs(x[part], y[part]) for part in parts]
    for curve, part, (a, b) in zip(table.curves, parts, lines, strict=False):
        assert sorted(curve.dots) == sorted(zip(x[part], y[part], strict=True)), "its own points alone"
        assert curve.ys == pytest.approx([a * end + b for end in curve.xs], rel=1e-10)
    rows = {row[0]: row[1:] for row in table.rows}
    for rank, (part, line) in enumerate(zip(parts, lines, strict=True)):
        a, b, _, count = rows[f"worker {rank}, alone"]
        assert [float(a), float(b)] == pytest.approx(line, abs=6e-5)
        assert int(count) == len(part)
    expected = {
        "mean of these lines": np.average(lines, axis=0, weights=[len(part) for part in parts]),
        "all points at once": theirs(x, y),
    }
    for name, line in expected.items():
        assert [float(rows[name][0]), float(rows[name][1])] == pytest.approx(list(line), abs=6e-5)


def test_the_table_names_everybody_and_the_truth() -> None:
    task = build("line", slope=-3.0, intercept=0.5, noise=0.0)
    run = mh.fit(task, "single", epochs=12)
    table = line_table(task, TaskEnd(model=run.model, workers=2))
    assert [row[0] for row in table.rows] == [
        "worker 0, alone",
        "worker 1, alone",
        "mean of these lines",
        "all points at once",
        "trained together",
        "the line itself",
    ]
    assert [curve.name for curve in table.curves] == [row[0] for row in table.rows[:-1]]
    assert all(len(row) == len(table.head) for row in table.rows)
    for row in table.rows:
        assert [float(row[1]), float(row[2])] == pytest.approx([-3.0, 0.5], abs=2e-3)


def test_a_worker_with_one_point_has_no_line() -> None:
    task = build("line", points=2)
    table = line_table(task, TaskEnd(model=task.model(), workers=2))
    assert [row[0] for row in table.rows] == ["all points at once", "trained together", "the line itself"]


def test_the_command_shows_the_table_and_draws_it(tmp_path: Path) -> None:
    words = ["train", "line", "--strategy", "single", "--epochs", "1", "--progress", "none"]
    words += ["--out", str(tmp_path / "run"), "--json", str(tmp_path / "run.json")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "lines found by each worker in its own points" in done.output
    assert f"picture  {tmp_path / 'run' / 'picture.html'}" in done.output.replace("\n", "")
    table = json.loads((tmp_path / "run.json").read_text())["table"]
    alone, mean, everything = table["rows"][:3]
    assert alone[1:] == mean[1:] == everything[1:]  # one worker has all points
    page = (tmp_path / "run" / "picture.html").read_text()
    body = ElementTree.fromstring(page[page.index("<main") : page.index("</main>") + len("</main>")])
    assert (
        len([one for one in body.iter() if one.get("opacity") == ".5"]) == 256
    )  # every second of 512 points
    paths = [one for one in body.iter() if one.tag.endswith("path") and "curve" in one.get("class", "")]
    assert len(paths) == 2 * 4, "the lines, and how far they are from that of all points"


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
