"""`train svd` as a run: the same values with any number of workers, after an interruption, and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import manyhands as mh
import warm
from manyhands.data.stored_matrix import MatrixStore
from manyhands.data.table_files import open_matrix
from manyhands.errors import UserError
from manyhands.observe.record.recorded import read_run_events
from manyhands.workloads.svd.model import SvdModel
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.svd.task import SvdTask
from manyhands.workloads.svd.training import train_svd

ROWS, COLUMNS = 700, 1100  # more than are decomposed in one pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows as npy and as LIBSVM text."""
    folder = tmp_path_factory.mktemp("matrix")
    draw = np.random.default_rng(1)
    table = np.where(draw.random((ROWS, COLUMNS)) < 0.04, draw.integers(1, 9, (ROWS, COLUMNS)) / 4, 0.0)
    np.save(folder / "table.npy", table)
    lines = [
        " ".join(["1", *(f"{place}:{row[place]:g}" for place in np.flatnonzero(row))]) + "\n" for row in table
    ]
    (folder / "rows.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def store() -> Iterator[MatrixStore]:
    with MatrixStore() as opened:
        yield opened


@pytest.mark.parametrize(("name", "center"), [("table.npy", True), ("rows.txt", True), ("rows.txt", False)])
def test_any_number_of_workers_finds_what_lapack_finds(files: Path, name: str, center: bool) -> None:
    table = np.load(files / "table.npy")
    expected = np.linalg.svd(table - table.mean(axis=0) * center, compute_uv=False)[:6]
    found = {}
    for workers in (1, 2, 3):
        result = train_svd(files / name, SvdOptions(rank=6, center=center), workers=workers)
        np.testing.assert_allclose(result.model.singular_values, expected, rtol=1e-6)
        assert result.model.converged
        assert result.summary["steps"] == result.model.passes < 100
        assert result.summary["samples"] == ROWS * result.model.passes
        found[workers] = result.model
    for workers in (2, 3):
        np.testing.assert_allclose(found[workers].singular_values, found[1].singular_values, rtol=1e-11)
        along = np.sum(found[workers].components * found[1].components, axis=1)
        np.testing.assert_allclose(along, 1.0, atol=1e-8)


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("allreduce", 2)])
def test_a_run_that_was_ended_within_a_pass_goes_on_to_the_same_values(
    strategy: str, workers: int, files: Path, store: MatrixStore, tmp_path: Path
) -> None:
    matrix = store.keep(open_matrix(files / "table.npy"))
    step_bytes = matrix.num_bytes // 5 // workers
    task = SvdTask(matrix=matrix, svd=SvdOptions(rank=5), workers=workers, step_bytes=step_bytes)
    assert task.passes.steps in (5, 6)
    out = tmp_path / "run"
    whole = mh.fit(task, strategy, workers=workers)
    half = mh.fit(task, strategy, workers=workers, out=out, steps=task.passes.steps + 2)
    assert half.summary["steps"] == task.passes.steps + 2, "within a pass"
    resumed = mh.fit(task, strategy, workers=workers, out=out, resume=True)
    assert resumed.summary["resumed_from_step"] == half.summary["steps"]
    assert resumed.summary["steps"] == whole.summary["steps"]
    ours, theirs = (SvdModel.of(run.model.space, task.sizes, task.svd) for run in (resumed, whole))  # type: ignore[arg-type]
    if workers == 1:
        np.testing.assert_array_equal(ours.components, theirs.components)
    np.testing.assert_allclose(ours.singular_values, theirs.singular_values, rtol=1e-12)
    np.testing.assert_allclose(ours.components, theirs.components, atol=1e-9)
    again = mh.fit(task, strategy, workers=workers, out=out, resume=True)
    assert again.summary["steps"] == whole.summary["steps"], "nothing was left to do"
    assert len(read_run_events(out / "events").roles) == workers
    other = replace(task, svd=SvdOptions(rank=5, center=True))
    with pytest.raises(UserError, match="center is True, but the run was started with False"):
        mh.fit(other, strategy, workers=workers, out=out, resume=True)


def test_a_memory_smaller_than_the_matrix_gives_the_same_values(files: Path) -> None:
    table = np.load(files / "table.npy")
    result = train_svd(files / "table.npy", SvdOptions(rank=5, memory_bytes=table.nbytes // 2))
    expected = np.linalg.svd(table, compute_uv=False)[:5]
    np.testing.assert_allclose(result.model.singular_values, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "strategy", ["hogwild", "ps", "tensor", "central", "local", "allreduce algorithm=ring"]
)
def test_strategies_that_do_not_fit_are_refused(strategy: str) -> None:
    with pytest.raises(UserError, match=f"strategy {strategy}"):
        train_svd(None, SvdOptions(), workers=2, strategy=strategy)


def test_workers_refuse_a_matrix_with_holes(tmp_path: Path) -> None:
    table = np.ones((900, 3))
    table[800, 2] = np.inf
    np.save(tmp_path / "holed.npy", table)
    with pytest.raises(mh.ManyhandsError, match="row 800, column 2 is inf, not a number"):
        train_svd(tmp_path / "holed.npy", SvdOptions(rank=2), workers=2)


def command(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "manyhands", *map(str, words)]
    return warm.run(line, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_the_command_decomposes_digits_by_itself_and_says_what_comes_next(tmp_path: Path) -> None:
    done = command("train", "svd", "--out", "run", "--json", "summary.json", "--center", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PCA · rank 10 · " in done.stdout
    assert "manyhands predict run FILE" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["converged"]
    took = f"in {summary['train_seconds']:.2f} s ({summary['seconds']:.1f} s with reading and starting)"
    assert took in " ".join(done.stdout.split()), "a pass is not what came before it"
    *_, last = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert last["at_s"] <= summary["train_seconds"] < summary["seconds"]
    assert len(summary["explained_variance"]) == 10
    model = SvdModel.load(tmp_path / "run")
    np.save(tmp_path / "rows.npy", np.ones((5, 64)))
    done = command("predict", "run", "rows.npy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert model.mean is not None
    expected = (np.ones((5, 64)) - model.mean) @ model.components.T
    np.testing.assert_allclose(np.loadtxt(done.stdout.splitlines()), expected, rtol=1e-7, atol=1e-7)


BAD = {
    "a file that is not there": (("--path", "none.npy"), "none.npy cannot be read: No such file"),
    "prose": (("--path", "prose.txt"), "line 1, column 1: label 'once' is not a number"),
    "not a number": (("--path", "holed.npy"), "row 1, column 0 is nan, not a number"),
    "a rank beyond the matrix": (
        ("--rank", "65"),
        "rank=65: a matrix of 1,797 rows and 64 columns has at most rank 64",
    ),
    "too little memory": (("--memory", "100KiB"), r"memory=100.0 KiB is too little"),
    "no size": (("--memory", "much"), "much"),
    "no tolerance": (("--tolerance", "0"), "tolerance is 0.0; it must be"),
    "a strategy": (("--strategy", "hogwild"), "does not train svd; allowed: single, allreduce, mirrored"),
    "nothing to resume": (("--resume",), "--resume needs --out"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_status_2(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyhands.cli.main import main

    words, sentence = BAD[case]
    (tmp_path / "prose.txt").write_text("once upon a time\n")
    np.save(tmp_path / "holed.npy", np.array([[1.0, 2.0], [np.nan, 3.0]]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["manyhands", "train", "svd", "--workers", "1", *words])
    if "--rank" not in words:
        sys.argv += ["--rank", "2"]
    with pytest.raises(SystemExit) as ended:
        main()
    report = capfd.readouterr().err
    assert ended.value.code == 2, report
    assert sentence in report
    assert len(report.strip().splitlines()) == 1
