"""A sweep: its grid, its order, its picture, and its processes, which are small scripts that leave a run's files."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.data.store.rundir import RunDirectory, RunLock
from manyhands.errors import DataError, UserError
from manyhands.lab.compare.comparison import Progress
from manyhands.lab.sweep.run_sweep import (
    cores_of,
    open_sweep,
    read_plan,
    run_sweep,
    sweep_rows,
)
from manyhands.lab.sweep.sweep_report import (
    ParallelAxis,
    SweepRow,
    best_first,
    parallel_coordinates,
    sentences,
    sweep_cells,
    sweep_page,
)
from manyhands.lab.sweep.trials import SweepPlan, SweepSetting, SweepTrial, parse_values
from manyhands.observe.analyse.curves import lower_is_better
from manyhands.workloads.tasks import TASKS


def plan(metric: str = "accuracy", **settings: Sequence[str]) -> SweepPlan:
    given = settings or {"rate": ("0.1", "0.2"), "width": ("4", "8", "16")}
    return SweepPlan(
        task="digits",
        settings=tuple(SweepSetting(name=name, values=tuple(values)) for name, values in given.items()),
        metric=metric,
    )


def row(number: int, values: dict[str, str], **final: float) -> SweepRow:
    return SweepRow(
        trial=SweepTrial(number=number, values=values), final=final, seconds=1.0, samples_per_s=10.0
    )


def test_a_grid_is_every_combination_once_and_the_last_setting_changes_first() -> None:
    trials = plan().trials()
    assert [tuple(trial.values.values()) for trial in trials] == [
        ("0.1", "4"),
        ("0.1", "8"),
        ("0.1", "16"),
        ("0.2", "4"),
        ("0.2", "8"),
        ("0.2", "16"),
    ]
    assert [trial.folder for trial in trials] == [f"000{n}" for n in range(1, 7)]
    assert SweepTrial(number=1, values={"learning_rate": "-1", "strategy": "ps servers=2"}).words() == [
        "--learning-rate=-1",
        "--strategy=ps servers=2",
    ]


def test_a_plan_comes_back_from_its_file_and_says_what_differs() -> None:
    kept = SweepPlan.from_dict(json.loads(json.dumps(plan().to_dict())))
    assert kept == plan()
    assert kept.conflict(plan()) is None
    assert kept.conflict(plan(metric="loss", rate=("0.1", "0.2"), width=("4", "8", "16"))) is None
    assert kept.conflict(plan(rate=("0.1",), width=("4", "8", "16"))) == "--rate was 0.1,0.2, and is 0.1 now"
    assert kept.conflict(plan(rate=("0.1", "0.2"))) == "--width was 4,8,16, and is left out now"
    for damaged in ({}, {"task": 1}, {**plan().to_dict(), "settings": {"a": [1]}}, []):
        with pytest.raises(DataError):
            SweepPlan.from_dict(damaged)


def test_bad_lists_of_values_get_a_sentence() -> None:
    assert parse_values(" 1, 2,", ",") == ("1", "2")
    with pytest.raises(UserError, match="lists no value"):
        parse_values(" ; ", ";")
    with pytest.raises(UserError, match="--learning-rate has '1' twice"):
        SweepSetting(name="learning_rate", values=("1", "1"))
    many = [SweepSetting(name=name, values=tuple(map(str, range(100)))) for name in "abc"]
    with pytest.raises(UserError, match=r"1,000,000 combinations; a sweep has at most 10,000"):
        SweepPlan(task="digits", settings=tuple(many), metric="loss")


def test_runs_are_in_the_order_of_their_metric_whichever_way_that_goes() -> None:
    rows = [
        row(1, {}, accuracy=0.5, loss=2.0),
        row(2, {}, accuracy=0.9, loss=3.0),
        row(3, {}),
        row(4, {}, accuracy=math.nan),
    ]
    assert [one.trial.number for one in best_first(rows, "accuracy")] == [2, 1, 3, 4]
    assert [one.trial.number for one in best_first(rows, "loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("metric", "lower"),
    [("accuracy", False), ("absolute_error", True), ("bits_per_byte", True), ("loss", True), ("auc", False)],
)
def test_the_best_is_the_least_of_what_should_be_small(metric: str, lower: bool) -> None:
    rows = [row(1, {}, **{metric: 1.0}), row(2, {}, **{metric: 2.0})]
    assert best_first(rows, metric)[0].trial.number == (1 if lower else 2)


def test_every_metric_of_a_built_in_task_has_a_known_direction() -> None:
    higher, seen = {"accuracy", "masked_accuracy", "return"}, set()
    for entry in TASKS.values():
        try:
            task = entry.build()
        except UserError:  # it needs a file
            continue
        for metric in task.metrics:
            assert lower_is_better(metric) == (metric not in higher), metric
            seen.add(metric)
    assert seen >= {"accuracy", "absolute_error", "bits_per_byte"}


def test_what_the_data_show_is_the_best_run_and_the_mean_by_setting() -> None:
    values = {("0.1", "4"): 0.5, ("0.1", "8"): 0.7, ("0.2", "4"): 0.8, ("0.2", "8"): 0.6}
    found = plan(rate=("0.1", "0.2"), width=("4", "8"))
    rows = [
        row(n, {"rate": rate, "width": width}, accuracy=value)
        for n, ((rate, width), value) in enumerate(values.items(), 1)
    ]
    report = " ".join(sentences(found, rows))
    assert "Best of 4 runs: rate=0.2, width=4, with accuracy 0.8" in report
    assert "The others end between 0.7 and 0.5." in report
    assert "By rate, on average: 0.6 with 0.1, 0.7 with 0.2." in report
    assert "By width, on average: 0.65 with 4, 0.65 with 8." in report


def test_a_run_that_ended_without_the_metric_is_not_said_to_go_on() -> None:
    rows = [
        row(1, {"rate": "0.1"}, accuracy=0.5),
        row(2, {"rate": "0.2"}, accuracy=math.nan),
        row(3, {"rate": "0.3"}, loss=1.0),
        SweepRow(trial=SweepTrial(number=4, values={"rate": "0.4"}), final={}),
    ]
    report = " ".join(sentences(plan(rate=("0.1", "0.2", "0.3", "0.4")), rows))
    assert "2 of 4 runs ended without a finite accuracy." in report
    assert "1 of 4 runs have not ended." in report


def test_means_are_over_the_same_combinations_of_the_other_settings() -> None:
    values = {("0.1", "4"): 0.5, ("0.1", "8"): 0.7, ("0.2", "8"): 0.6}
    found = plan(rate=("0.1", "0.2"), width=("4", "8"))
    rows = [
        row(n, {"rate": rate, "width": width}, accuracy=value)
        for n, ((rate, width), value) in enumerate(values.items(), 1)
    ]
    report = " ".join(sentences(found, rows))
    over = "over the 1 of 2 combinations that ended with each"
    assert f"By rate, on average {over}: 0.7 with 0.1, 0.6 with 0.2." in report
    assert f"By width, on average {over}: 0.5 with 4, 0.7 with 8." in report
    assert "on average" not in " ".join(sentences(found, [rows[0], rows[2]])), "they share no combination"


def test_a_failed_run_is_a_row_with_its_sentence() -> None:
    failed = SweepRow(trial=SweepTrial(number=2, values={"rate": "9"}), final={}, failure="it broke")
    found, rows = plan(rate=("0.1", "9")), [row(1, {"rate": "0.1"}, accuracy=0.5), failed]
    head, cells = sweep_cells(found, rows)
    assert head[-1] == "failed"
    assert cells[-1][-1] == "it broke"
    assert "1 of 2 runs failed; the first: it broke" in " ".join(sentences(found, rows))
    page = sweep_page(found, rows, ["<b>"], "manyhands sweep", {"cores": "2"})
    assert "it broke" in page
    assert "<b>" not in page.split("<body")[1].replace("<body", "")


# ── the picture ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(figure: str) -> list[list[tuple[float, float]]]:
    svg = figure[figure.index('<svg xmlns="http') : figure.rindex("</svg>") + 6]
    paths = [one.get("d", "") for one in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    return [[tuple(map(float, pair.split(","))) for pair in path[1:].split()] for path in paths]  # type: ignore[misc]


def test_every_run_is_a_line_that_crosses_every_axis_at_its_value() -> None:
    axes = [
        ParallelAxis(name="rate", values=["0.01", "0.1", "1"]),
        ParallelAxis(name="strategy", values=["single", "ps", "single"]),
        ParallelAxis(name="accuracy", values=[0.0, 1.0, 0.5]),
    ]
    drawn = lines_of(parallel_coordinates(axes, ["a", "b", "c"], title="t"))
    third, second, first = drawn  # the best is drawn last, above the others
    top, bottom = 34.0, 226.0
    assert [y for _, y in (first[2], third[2], second[2])] == pytest.approx([bottom, (top + bottom) / 2, top])
    assert first[0][1] - second[0][1] == pytest.approx(second[0][1] - third[0][1])  # powers of ten, evenly
    assert first[1] == third[1] != second[1]
    assert len({x for line in drawn for x, _ in line}) == 3


def test_a_line_without_a_number_is_left_out_and_names_are_escaped() -> None:
    axes = [ParallelAxis(name="<rate>", values=["1", "2"]), ParallelAxis(name="loss", values=[0.5, math.nan])]
    figure = parallel_coordinates(axes, ["<a>", "<b>"], title="t")
    assert len(lines_of(figure)) == 1
    assert "<a>" not in figure
    assert "&lt;rate&gt;" in figure
    empty = parallel_coordinates([ParallelAxis(name="loss", values=[math.nan])], ["a"], title="t")
    assert "No run has ended." in empty


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CONFIG = {"format": "manyhands run", "version": 1, "config": {"task": "digits"}}
SCRIPT = """
import json, pathlib, sys, time
CONFIG, cores, *words = sys.argv[1:]
given = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
out = pathlib.Path(given["out"]); out.mkdir(exist_ok=True)
(out / "config.json").write_text(CONFIG)
note = {"cores": cores, "begin": time.monotonic(), "resumed": "--resume" in words}
time.sleep(float(given.get("nap", 0)))
if given["rate"] == "bad":
    print("manyhands: rate is bad"); sys.exit(2)
final = {"accuracy": float(given["rate"])}
(out / "summary.json").write_text(json.dumps({"final": final, "seconds": 1, "samples_per_s": 2}))
(out / "note.json").write_text(json.dumps({**note, "end": time.monotonic()}))
"""


def launch(cores: Sequence[int], words: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", SCRIPT, json.dumps(CONFIG), ",".join(map(str, cores)), *words]


def notes(out: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("runs/*/note.json"))]


def test_runs_go_on_at_once_on_cores_of_their_own_and_never_more_than_there_are(tmp_path: Path) -> None:
    found = plan(rate=("0.1", "0.2", "0.3", "0.4"), nap=("0.2",))
    open_sweep(tmp_path / "s", found, resume=False)
    seen: list[Progress] = []
    rows = run_sweep(found, tmp_path / "s", launch, cores=[3, 5], on_progress=seen.append)
    assert [one.final["accuracy"] for one in rows] == [0.1, 0.2, 0.3, 0.4]
    assert max(one.current for one in seen) == "2 under way"
    assert seen[-1].done == seen[-1].runs == 4
    written = notes(tmp_path / "s")
    assert {one["cores"] for one in written} == {"3", "5"}
    for core in ("3", "5"):
        spans = sorted((one["begin"], one["end"]) for one in written if one["cores"] == core)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))  # type: ignore[operator]


def test_one_job_at_a_time_where_that_is_asked_for(tmp_path: Path) -> None:
    found = plan(rate=("0.1", "0.2"))
    open_sweep(tmp_path / "s", found, resume=False)
    seen: list[Progress] = []
    run_sweep(found, tmp_path / "s", launch, cores=[0, 1, 2], jobs=1, on_progress=seen.append)
    assert max(one.current for one in seen) == "1 under way"


def test_a_trial_takes_a_core_for_each_of_its_processes() -> None:
    values = {"strategy": "ps servers=2", "workers": "3"}
    assert cores_of(SweepTrial(number=1, values=values)) == 5
    assert cores_of(SweepTrial(number=1, values={})) == 1


def test_a_cut_sweep_leaves_no_process_and_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    out, found = tmp_path / "s", plan(rate=("0.1", "0.2", "0.3"), nap=("0.3",))
    open_sweep(out, found, resume=False)

    def cut(progress: Progress) -> None:
        if progress.done == 1 and progress.current != "0 under way":
            raise KeyboardInterrupt

    before = set(_children())
    with pytest.raises(KeyboardInterrupt):
        run_sweep(found, out, launch, cores=[0], on_progress=cut)
    assert set(_children()) <= before
    kept = (out / "runs" / "0001" / "note.json").read_bytes()
    assert [one.done for one in sweep_rows(found, out)] == [True, False, False]
    open_sweep(out, found, resume=True)
    rows = run_sweep(found, out, launch, cores=[0])
    assert all(one.done for one in rows)
    assert (out / "runs" / "0001" / "note.json").read_bytes() == kept
    assert (out / "runs" / "0003").is_dir()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", [[], [".sweep.json.writing"]])
def test_a_sweep_killed_before_its_plan_was_written_begins(
    left: list[str], resume: bool, tmp_path: Path
) -> None:
    for name in left:
        (tmp_path / name).write_text("{")
    open_sweep(tmp_path, plan(), resume=resume)
    assert read_plan(tmp_path / "sweep.json") == plan()


def test_a_sweep_killed_before_its_first_run_goes_on(tmp_path: Path) -> None:
    found = plan(rate=("0.1",))
    open_sweep(tmp_path / "s", found, resume=False)
    assert not (tmp_path / "s" / "runs").exists()
    open_sweep(tmp_path / "s", found, resume=True)
    (done,) = run_sweep(found, tmp_path / "s", launch, cores=[0])
    assert done.final == {"accuracy": 0.1}


def test_a_run_of_a_killed_sweep_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, folder = plan(rate=("0.1",)), tmp_path / "s" / "runs" / "0001"
    open_sweep(tmp_path / "s", found, resume=False)
    folder.mkdir(parents=True)
    held = RunLock(folder / "run.lock")
    looks, let_go, is_live = 0, math.inf, RunDirectory.is_live

    def look(path: Path) -> bool | None:
        """The run ends when it is found at work for the second time."""
        nonlocal looks, let_go
        live = is_live(path)
        looks += bool(live)
        if looks == 2 and live:
            let_go = time.monotonic()
            held.close()
        return live

    monkeypatch.setattr(RunDirectory, "is_live", look)
    run_sweep(found, tmp_path / "s", launch, cores=[0])
    (begun,) = notes(tmp_path / "s")
    assert begun["begin"] >= let_go  # type: ignore[operator]


def _children() -> list[str]:
    return (Path("/proc") / str(os.getpid()) / "task" / str(os.getpid()) / "children").read_text().split()


def test_a_run_that_fails_says_why_and_is_tried_again(tmp_path: Path) -> None:
    out, found = tmp_path / "s", plan(rate=("0.1", "bad"))
    open_sweep(out, found, resume=False)
    for _ in range(2):
        good, bad = run_sweep(found, out, launch, cores=[0, 1])
        assert good.done
        assert bad.failure == "run 0002 ended with status 2: rate is bad"
    (begun,) = notes(out)
    assert not begun["resumed"]


def test_directories_that_are_in_the_way_get_a_sentence(tmp_path: Path) -> None:
    found = plan()
    with pytest.raises(UserError, match=r"holds no sweep \(sweep.json is missing\)"):
        open_sweep(tmp_path / "nowhere", found, resume=True)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match=r"holds no sweep \(sweep.json is missing\)"):
        open_sweep(tmp_path, found, resume=True)
    with pytest.raises(UserError, match=r"it contains 'mine\.txt'"):
        open_sweep(tmp_path, found, resume=False)
    open_sweep(tmp_path / "s", found, resume=False)
    with pytest.raises(UserError, match="add --resume to continue it, or choose another"):
        open_sweep(tmp_path / "s", found, resume=False)
    with pytest.raises(
        UserError, match="--width was 4,8,16, and is left out now; give the settings it was started with"
    ):
        open_sweep(tmp_path / "s", plan(rate=("0.1", "0.2")), resume=True)
    (tmp_path / "s" / "sweep.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        open_sweep(tmp_path / "s", found, resume=True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--learning-rate", "0.1,x"], "learning_rate is 'x'; it must be a number above 0"),
        (["--metric", "acuracy"], "did you mean 'accuracy'?"),
        (["--workers", "0"], "--workers 0 must be an integer of at least 1"),
        (["--strategy", "singel"], "did you mean 'single'?"),
        (["--resume"], "--resume needs --out"),
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["sweep", "digits", *words])
    assert isinstance(done.exception, UserError)
    assert sentence in str(done.exception)
    assert not list(tmp_path.iterdir())
