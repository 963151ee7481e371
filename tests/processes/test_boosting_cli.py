"""Gradient boosting as a user meets it: the commands, worker processes, a run that is interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_iris

import warm
from commands import run_command
from manyhands.engine.training import Keeping
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, open_source
from manyhands.workloads.gbdt.text_format import read_model, render_model
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt
from watched import watched


def saved_table(folder: Path, rows: int = 900) -> Path:
    """An npy file: the label in column 0, some values missing."""
    drawn = np.random.default_rng(8)
    values = drawn.normal(size=(rows, 10))
    label = values[:, 0] * values[:, 1] + values[:, 2] > 0
    values[drawn.random(values.shape) < 0.05] = np.nan
    np.save(folder / "t.npy", np.column_stack([label, values]))
    return folder / "t.npy"


@pytest.mark.parametrize(
    ("strategy", "parallel", "counts"),
    [("allreduce", "data", (2, 3, 4)), ("allreduce", "voting", (3,)), ("mirrored", "data", (2,))],
)
def test_worker_processes_grow_the_trees_of_several_classes(
    strategy: str, parallel: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    values = np.load(saved_table(tmp_path))
    labels = values[:, 0] + 3 * (np.nan_to_num(values[:, 3]) > 0.3)
    table = TableChoice(train=ArraySource(values[:, 1:], labels), valid_fraction=0.2)
    options = GbdtOptions(objective="multiclass", trees=3, num_leaves=5, parallel=parallel)
    alone = train_gbdt(table, options)
    assert alone.model.labels == (0, 1, 3, 4)
    assert len(alone.model.trees) == 3 * 4
    for workers in counts:
        found = train_gbdt(table, options, strategy=strategy, workers=workers)
        assert render_model(found.model) == render_model(alone.model)
        assert found.valid_losses == alone.valid_losses


def test_three_labels_are_classes_with_a_note_figures_and_probabilities(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    values, labels = load_iris(return_X_y=True)
    np.save("iris.npy", np.column_stack([labels + 1, values]))
    words = ["train", "gbdt", "--train", "iris.npy", "--test", "iris.npy", "--trees", "20", "--out", "m"]
    assert run_command(monkeypatch, *words, "--valid-fraction", "0.2") == 0
    printed = capfd.readouterr()
    assert caplog.messages == [
        "manyhands: objective=multiclass: the label has 3 values; give --objective to choose"
    ]
    summary = json.loads(Path("m/summary.json").read_text())
    assert [f"manyhands: {note}" for note in summary["notes"]] == caplog.messages
    caplog.clear()
    assert (summary["objective"], summary["trees"], summary["labels"]) == ("multiclass", 20, [1, 2, 3])
    said = " ".join(printed.out.split())
    assert "gbdt · multiclass · single" in said
    assert "3 × 20 trees in" in said
    assert f"test accuracy {summary['accuracy']:.4f} log_loss {summary['log_loss']:.4f} of 150 rows" in said
    report = Path("m/report.html").read_text()
    assert "By label" in report
    assert "predicted 3" in report
    assert run_command(monkeypatch, "predict", "m", "iris.npy") == 0
    printed = np.array([line.split("\t") for line in capfd.readouterr().out.splitlines()])
    found = printed[:, 1:].astype(float)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert printed[:, 0].tolist() == [str(at + 1) for at in found.argmax(axis=1)]
    assert np.mean(found.argmax(axis=1) == labels) == pytest.approx(summary["accuracy"])
    assert run_command(monkeypatch, *words[:-2], "--objective", "regression", "--out", "number") == 0
    assert not caplog.messages, "nothing was guessed"
    np.save("new.npy", [[1, 5, 3, 1, 0.2], [4, 5, 3, 1, 0.2]])
    assert run_command(monkeypatch, *words[:4], "--test", "new.npy", "--out", "other") == 2
    assert "new.npy: row 2 has label 4, which is new; labels are 1, 2, 3" in capfd.readouterr().err


@pytest.mark.parametrize("parallel", ["data", "voting"])
def test_worker_processes_grow_the_trees_of_one_process(parallel: str, tmp_path: Path) -> None:
    table = TableChoice(train=open_source(saved_table(tmp_path)), valid_fraction=0.2)
    options = GbdtOptions(trees=8, early_stopping=3, parallel=parallel)
    alone = train_gbdt(table, options)
    for workers in (2, 3):
        out = tmp_path / f"run-{workers}"
        found = train_gbdt(table, options, strategy="allreduce", workers=workers, keep=Keeping(out=out))
        assert render_model(found.model) == render_model(alone.model)
        assert found.valid_losses == alone.valid_losses
        assert found.train_losses == pytest.approx(alone.train_losses)
        roles = read_run_events(out / "events").roles
        assert len(roles) == workers
        rows = [int(role.of(EventKind.STEP)["count"].sum()) for role in roles]
        assert sum(rows) == found.trees_grown * alone.rows
        assert all(len(role.of(EventKind.EXCHANGE)) for role in roles)
        assert found.summary["bytes_sent"] > 0


def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    table = TableChoice(train=open_source(saved_table(tmp_path)))
    whole = train_gbdt(table, GbdtOptions(trees=6))
    out = tmp_path / "run"
    train_gbdt(table, GbdtOptions(trees=3), strategy="mirrored", workers=2, keep=Keeping(out=out))
    resumed = train_gbdt(table, GbdtOptions(trees=6), keep=Keeping(out=out, resume=True))
    assert resumed.summary["resumed_from_step"] == 3
    assert render_model(resumed.model) == render_model(whole.model)


def test_the_defaults_run_on_embedded_data_and_end_with_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "train", "gbdt", "--out", "m", "--json", "s.json") == 0
    printed = capfd.readouterr().out
    assert "gbdt · binary · single · 1 worker" in printed
    last = "  manyhands predict m breast-cancer --out predictions.txt   # predict rows"
    assert printed.splitlines()[-2:] == ["next", last]
    summary = json.loads(Path("s.json").read_text())
    took = f"100 trees in {summary['train_seconds']:.2f} s ({summary['seconds']:.1f} s with reading and starting)"
    assert took in " ".join(printed.split())
    report = Path("m/report.html").read_text()
    assert "Nothing was evaluated" not in report
    # Measured by predicting the rows held out, where training adds up leaves.
    quality = summary["quality"]
    assert quality["scores"]["log loss"] == pytest.approx(summary["valid_loss"], rel=1e-9)
    assert sum(map(sum, quality["confusion"])) == summary["valid_rows"]
    assert f"The model on {summary['valid_rows']} rows held out" in report
    assert f"{quality['scores']['AUC']:.4g}" in report
    assert "<dt>elapsed</dt><dd>0 s</dd>" not in Path("m/report.html").read_text()
    assert summary["valid_loss"] < 0.15
    assert summary["trees"] == 100
    assert summary["importance"][0]["feature"] in ("mean_concave_points", "worst_perimeter", "worst_area")
    assert run_command(monkeypatch, "predict", "m", "breast-cancer", "--out", "p.txt") == 0
    chances = np.loadtxt("p.txt")
    assert len(chances) == 569
    assert ((chances >= 0) & (chances <= 1)).all()
    assert Path("m/report.html").exists()


def test_train_test_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved_table(tmp_path)
    options = ["--train", "t.npy", "--test", "t.npy", "--trees", "10", "--categorical", "", "--out", "m"]
    assert run_command(monkeypatch, "train", "gbdt", *options) == 0
    assert "test  accuracy" in capfd.readouterr().out
    values = np.load(path)
    np.save("features.npy", values[:, 1:])
    model = read_model(tmp_path / "m")
    for name in ("t.npy", "features.npy"):
        assert run_command(monkeypatch, "predict", "m", name) == 0
        found = np.array([float(line) for line in capfd.readouterr().out.splitlines()])
        expected = [model.predict(block) for block in ArraySource(values[:, 1:]).blocks()]
        assert np.array_equal(found, np.concatenate(expected)), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train", "none.npy"], "none.npy cannot be read: no such file"),
        (["--strategy", "hogwild", "--workers", "2"], "strategy hogwild does not train gbdt"),
        (["--early-stopping", "3", "--valid-fraction", "0"], "early_stopping needs held-out rows"),
        (["--num-leaves", "1"], "num_leaves is 1; it must be an integer of at least 2"),
        (["--categorical", "colour"], "categorical='colour': no such column"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_bad_options_get_a_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "train", "gbdt", *words) == 2
    assert message in capfd.readouterr().err


def test_an_interrupted_run_keeps_its_trees_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = saved_table(tmp_path, 5_000), tmp_path / "m"
    words = ["train", "gbdt", "--train", str(path), "--num-leaves", "4", "--out", str(out)]
    process = warm.Popen(
        [sys.executable, "-m", "manyhands", *words, "--trees", "100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 180
    try:
        while not (out / "metrics.jsonl").exists():
            assert process.poll() is None, "ended before it was interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=240)[1].decode()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, error
    kept = len(read_model(out).trees)
    assert f"ended by SIGINT; the model has {kept} of 100000 trees; continue with: " in error
    assert run_command(monkeypatch, *words, "--trees", str(kept + 2), "--resume") == 0, capfd.readouterr().err
    whole = train_gbdt(TableChoice(train=open_source(path)), GbdtOptions(trees=kept + 2, num_leaves=4))
    assert render_model(read_model(out)) == render_model(whole.model)
    page = watched(out)
    assert "gbdt" in page
    for looks in (["explain", out], ["show", out, "--as", "trace"], ["show", out, "--as", "tensorboard"]):
        capfd.readouterr()
        assert run_command(monkeypatch, *looks) == 0, capfd.readouterr().err


@pytest.mark.soak
def test_compare_ends_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--train", saved_table(tmp_path), "--trees", "5", "--repeats", "1", "--out", tmp_path / "c"]
    assert run_command(monkeypatch, "compare", "gbdt", *arguments) == 0, capfd.readouterr().err
    figures = json.loads((tmp_path / "c" / "figures.json").read_text())
    assert [row["strategy"] for row in figures["strategies"]] == ["single", "mirrored", "allreduce"]
    assert all(row["reached"] == 1 for row in figures["strategies"])
