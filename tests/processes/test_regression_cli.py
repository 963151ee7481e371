"""Logistic regression as a user meets it: the commands, worker processes, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss

import warm
from commands import run_command
from manyhands.data.batches import permutation
from manyhands.data.row_files import RowFile
from manyhands.engine.fitting import fit
from manyhands.engine.options import Options
from manyhands.engine.run import Run
from manyhands.engine.training import Keeping
from manyhands.workloads.logreg.examples import Examples, Spool, SpooledRows, parse_examples
from manyhands.workloads.logreg.model import LogregModel, LogregPredictor
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.task import logreg_task, table_of
from manyhands.workloads.logreg.training import train_logreg
from watched import watched

DATA = Path(__file__).parents[2].parent / "shared" / "data"
COMMAND = (sys.executable, "-m", "manyhands", "train", "logreg", "--train")
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs the files of ../shared/data")


def small_file(folder: Path, rows: int = 600) -> Path:
    random = np.random.default_rng(7)
    truth = random.normal(size=41) * 2
    lines = []
    for _ in range(rows):
        features = np.sort(random.choice(np.arange(1, 41), 5, replace=False))
        is_yes = truth[features].sum() + random.logistic() > 0
        lines.append(" ".join(["1" if is_yes else "-1", *(f"{i}:1" for i in features)]))
    path = folder / "small"
    path.write_text("\n".join(lines) + "\n")
    return path


def in_batches(path: Path, options: LogregOptions) -> Run:
    """The batches of one process."""
    with Spool() as spool:
        rows = parse_examples(Examples(RowFile(path)), 0, spool)
        assert isinstance(rows, SpooledRows)
        return fit(logreg_task(rows, options), "single", epochs=options.passes, seed=options.seed)


@needs_data
def test_train_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, test = str(DATA / "a9a.gz"), str(DATA / "a9a.t.gz")
    arguments = [
        "--train",
        train,
        "--test",
        test,
        "--bits",
        "18",
        "--passes",
        "2",
        "--out",
        "m",
        "--json",
        "s.json",
    ]
    assert run_command(monkeypatch, "train", "logreg", *arguments) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    summary = json.loads(Path("s.json").read_text())
    assert json.loads(Path("m/summary.json").read_text()) == summary
    assert summary["accuracy"] >= 0.848
    assert summary["auc"] >= 0.901
    assert summary["log_loss"] <= 0.327
    assert (summary["examples"], summary["test_examples"], summary["passes"]) == (32561, 16281, 2)
    assert f"log loss {summary['log_loss']:.4f}" in printed.out
    assert run_command(monkeypatch, "predict", "m", test) == 0
    chances = np.array(capfd.readouterr().out.split(), float)
    model = LogregModel.load(Path("m"))
    expected = np.concatenate([model.probabilities(rows) for rows in model.file(test).blocks()])
    np.testing.assert_allclose(chances, expected, rtol=1e-5)
    assert run_command(monkeypatch, "predict", "m/model.safetensors", test, "--out", "p.txt") == 0
    np.testing.assert_array_equal(np.loadtxt("p.txt"), chances)
    page = watched(Path("m"))
    assert "logreg" in page
    assert f"{summary['steps']} of {summary['steps']}" in page


def three_labels(folder: Path, rows: int = 600) -> Path:
    """Labels 3, 5 and 9, by which of three features is largest."""
    values = np.random.default_rng(4).normal(size=(rows, 4)).round(3)
    labels = np.array([3, 5, 9])[values[:, :3].argmax(axis=1)]
    lines = [
        f"{label} " + " ".join(f"{at}:{x}" for at, x in enumerate(row, 1))
        for label, row in zip(labels, values, strict=True)
    ]
    (folder / "three").write_text("\n".join(lines) + "\n")
    return folder / "three"


def test_several_labels_are_learned_tested_predicted_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    three_labels(tmp_path)
    words = ["--train", "three", "--test", "three", "--passes", "20", "--out", "m"]
    assert run_command(monkeypatch, "train", "logreg", *words) == 0
    printed = " ".join(capfd.readouterr().out.split())
    summary = json.loads(Path("m/summary.json").read_text())
    assert "600 examples · 3 labels · 4 of 5 features" in printed
    assert f"test accuracy {summary['accuracy']:.4f} log loss {summary['log_loss']:.4f} of 600" in printed
    assert summary["accuracy"] > 0.95
    assert summary["labels"] == [3, 5, 9]
    assert "By label" in Path("m/report.html").read_text()
    assert run_command(monkeypatch, "predict", "m", "three") == 0
    printed = np.array([line.split("\t") for line in capfd.readouterr().out.splitlines()])
    found = printed[:, 1:].astype(float)
    assert printed[:, 0].tolist() == [["3", "5", "9"][at] for at in found.argmax(axis=1)]
    model = LogregModel.load(Path("m"))
    (rows,) = model.file("three").blocks()
    np.testing.assert_allclose(found, model.probabilities(rows), rtol=1e-5)
    (answer,) = LogregPredictor(model).answers(LogregPredictor(model).inputs(["0 1:-1 2:2 3:-1"]))
    assert answer["label"] == 5
    assert list(answer["probabilities"]) == ["3", "5", "9"]
    assert run_command(monkeypatch, "export", "m", "--precision", "int8", "--test", "three") == 0
    Path("new").write_text("3 1:1\n4 2:1\n")
    assert run_command(monkeypatch, "train", "logreg", "--train", "three", "--test", "new") == 2
    assert "new: row 2 has label 4, which is new; labels are 3, 5, 9" in capfd.readouterr().err


@pytest.mark.parametrize(("strategy", "learner"), [("ps servers=2", "ftrl"), ("mirrored", "sgd")])
def test_several_labels_in_batches_on_two_workers_are_those_of_one(
    tmp_path: Path, strategy: str, learner: str
) -> None:
    path = three_labels(tmp_path)
    options = LogregOptions(learner=learner, batch=64, passes=2, l2=1e-3, seed=3)
    alone = in_batches(path, options)
    together = train_logreg(path, options, strategy=strategy, workers=2)
    np.testing.assert_allclose(together.model.table, table_of(alone.model.state_dict(), 3), atol=2e-5)
    assert together.model.evaluate(together.model.file(path)).accuracy > 0.8


def test_batches_of_several_labels_are_learned_as_well_as_by_scikit_learn(tmp_path: Path) -> None:
    drawn = np.random.default_rng(2)
    values = drawn.normal(size=(16_000, 8)).astype(np.float32)
    labels = (values @ drawn.normal(size=(8, 4)) + drawn.gumbel(size=(16_000, 4))).argmax(axis=1)
    parts = {"train": slice(0, 12_000), "test": slice(12_000, None)}
    for name, part in parts.items():
        dump_svmlight_file(values[part], labels[part], str(tmp_path / name), zero_based=False)
    peer = LogisticRegression().fit(values[parts["train"]], labels[parts["train"]])
    chances, own = peer.predict_proba(values[parts["test"]]), labels[parts["test"]]
    options = LogregOptions(learner="sgd", passes=4, batch=64)
    model = train_logreg(tmp_path / "train", options, strategy="mirrored", workers=2).model
    found = model.evaluate(model.file(tmp_path / "test"))
    assert found.log_loss == pytest.approx(log_loss(own, chances), abs=0.005)
    assert found.accuracy == pytest.approx(accuracy_score(own, chances.argmax(axis=1)), abs=0.005)


def test_bad_files_end_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_file(tmp_path, 20)
    Path("bad").write_text("1 1:1\n-1 2:1 x:3\n-1 2:1\n1 3:1 3:1\n")
    Path("half").write_text("1 1:1\n-1 2:1\n0.5 2:1\n")

    def complaint(*arguments: str) -> str:
        assert run_command(monkeypatch, *arguments) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "bad, line 2, column 8: 'x:3' is not an index:value pair" in complaint(
        "train", "logreg", "--train", "bad"
    )
    assert "half has label 0.5; classes are integers" in complaint("train", "logreg", "--train", "half")
    assert "absent cannot be read" in complaint("train", "logreg", "--train", "absent")
    assert "no such file" in complaint("train", "logreg", "--train", "small", "--test", "absent")
    assert "bits=99 must be" in complaint("train", "logreg", "--train", "small", "--bits", "99")
    assert "model small is not a safetensors file" in complaint("predict", "small", "small")
    assert not Path("runs").exists()
    assert run_command(monkeypatch, "train", "logreg", "--train", "bad", "--skip-bad", "--out", "m") == 0
    assert "manyhands: 2 bad rows of bad left out" in capfd.readouterr().err
    assert json.loads(Path("m/summary.json").read_text())["bad_lines"] == 2
    assert run_command(monkeypatch, "predict", "m", "bad", "--skip-bad") == 0
    printed = capfd.readouterr()
    assert len(printed.out.split()) == 2
    assert "2 bad rows of bad left out" in printed.err


def test_processes_by_turns_give_the_bits_of_one(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    options = LogregOptions(learner="ftrl", passes=3)
    alone = train_logreg(path, options)
    losses: list[float] = []
    together = train_logreg(
        path,
        options,
        strategy="hogwild hands=processes order=turns",
        workers=2,
        after_pass=lambda _number, loss: losses.append(loss),
    )
    np.testing.assert_array_equal(together.model.table, alone.model.table)
    assert losses == together.progressive_loss == pytest.approx(alone.progressive_loss, rel=1e-9)
    assert together.examples == 600


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["hogwild hands=processes order=turns", "allreduce", "ps servers=2"])
def test_interrupted_processes_leave_what_they_kept(tmp_path: Path, strategy: str) -> None:
    def stop(_number: int, _loss: float) -> None:
        raise KeyboardInterrupt

    path = small_file(tmp_path, 9_000)
    found = train_logreg(
        path,
        LogregOptions(passes=100_000),
        strategy=strategy,
        workers=2,
        after_pass=stop,
        keep=Keeping(out=tmp_path / "run", options=Options(resume_command="", checkpoint_every=10)),
    )
    assert found.interrupted
    assert np.abs(found.model.table).max() > 0.1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "learner"), [("ps servers=2", "ftrl"), ("ps", "sgd"), ("allreduce", "adagrad")]
)
def test_batches_on_two_workers_are_those_of_one(tmp_path: Path, strategy: str, learner: str) -> None:
    path = small_file(tmp_path)
    options = LogregOptions(learner=learner, batch=64, passes=2, l2=1e-3, seed=3)
    alone = in_batches(path, options)
    losses = [row["metrics"]["pass_loss"] for row in alone.history.evaluations]
    together = train_logreg(path, options, strategy=strategy, workers=2)
    np.testing.assert_allclose(together.model.table, table_of(alone.model.state_dict()), atol=2e-5)
    assert together.progressive_loss == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("learner", ["adagrad", "ftrl"])
def test_batches_of_one_follow_the_rule_of_one_example(tmp_path: Path, learner: str, labels: int) -> None:
    """Torch's optimizers on one example at a time are what the compiled rules do, in the order that `fit` draws."""
    path = (three_labels if labels == 3 else small_file)(tmp_path, 150)
    options = LogregOptions(learner=learner, batch=1, passes=1, l2=1e-3)
    batches = table_of(in_batches(path, options).model.state_dict(), 3 if labels == 3 else 1)
    lines = path.read_text().splitlines()
    (tmp_path / "drawn").write_text("\n".join(lines[i] for i in permutation(150, 0, 0)) + "\n")
    np.testing.assert_allclose(train_logreg(tmp_path / "drawn", options).model.table, batches, atol=1e-5)


def await_or_fail(process: subprocess.Popen[bytes], condition: Any) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, "ended before it was interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = small_file(tmp_path, 9_000), tmp_path / "m"
    process = warm.Popen(
        [*COMMAND, str(path), "--passes", "100000000", "--out", str(out), "--json", str(tmp_path / "s.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        await_or_fail(process, lambda: (out / "metrics.jsonl").exists())
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, error
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["interrupted"]
    report = (
        f"ended by SIGINT; the model was trained for {summary['passes']} of 100000000 passes; continue with: "
    )
    assert report in error.decode()
    assert LogregModel.load(out).weight.size == 41
    passes = str(summary["passes"] + 2)
    again = ["train", "logreg", "--train", path, "--passes", passes, "--out", out]
    assert run_command(monkeypatch, *again) == 2
    refused = "already holds a run of 'logreg'; add --resume to continue it, or choose another --out"
    assert refused in capfd.readouterr().err
    assert run_command(monkeypatch, *again, "--resume") == 0, capfd.readouterr().err
    whole = train_logreg(path, LogregOptions(passes=int(passes)))
    np.testing.assert_array_equal(LogregModel.load(out).table, whole.model.table)
    for looks in (["explain", out], ["show", out, "--as", "trace"], ["show", out, "--as", "tensorboard"]):
        capfd.readouterr()
        assert run_command(monkeypatch, *looks) == 0, capfd.readouterr().err


@pytest.mark.soak
def test_compare_ends_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = small_file(tmp_path), tmp_path / "compared"
    arguments = ["--train", path, "--passes", "2", "--repeats", "1", "--out", out]
    assert run_command(monkeypatch, "compare", "logreg", *arguments) == 0, capfd.readouterr().err
    figures = json.loads((out / "figures.json").read_text())
    assert [row["strategy"] for row in figures["strategies"]] == [
        "single",
        "hogwild",
        "allreduce",
        "ps consistency=async",
    ]
    # The target is what the better half ends with, so that one of the others may miss it.
    assert sum(row["reached"] for row in figures["strategies"]) >= 2
    assert (out / "report.html").exists()


@needs_data
@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy",
    [
        "hogwild hands=processes", "hogwild hands=processes order=locked", "allreduce", "mirrored", "central",
        "allreduce algorithm=ring", "ps", "ps servers=2", "ps consistency=bounded:3", "ps consistency=async",
    ],
)  # fmt: skip
def test_a9a_is_learned_with_every_strategy(strategy: str) -> None:
    result = train_logreg(DATA / "a9a.gz", strategy=strategy, workers=2)
    found = result.model.evaluate(RowFile(DATA / "a9a.t.gz"))
    assert found.accuracy >= 0.848
    assert found.auc is not None
    assert found.auc >= 0.901
    assert found.log_loss <= 0.327
