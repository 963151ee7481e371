"""Logistic regression as a user meets it: the commands, worker processes, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import run_command
from manyhands.data.plan import permutation
from manyhands.data.row_files import RowFile
from manyhands.draw.bars import Bars
from manyhands.regression.batches import learn_in_batches
from manyhands.regression.crew import learn_in_processes
from manyhands.regression.examples import Examples
from manyhands.regression.model import LogregModel
from manyhands.regression.options import LogregOptions
from manyhands.regression.spool import Spool, SpooledRows
from manyhands.regression.training import train_logreg
from manyhands.strategy import Strategy

pytestmark = pytest.mark.timeout(300)
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


def spooled(spool: Spool, path: Path) -> SpooledRows:
    for stretch in Examples(RowFile(path), 0, 1).stretches():
        for block in stretch:
            spool.add(block)
    return spool.finish()


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


def test_bad_files_end_with_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_file(tmp_path, 20)
    Path("bad").write_text("1 1:1\n-1 2:1 x:3\n-1 2:1\n1 3:1 3:1\n")
    Path("three").write_text("1 1:1\n-1 2:1\n7 2:1\n")

    def complaint(*arguments: str) -> str:
        assert run_command(monkeypatch, *arguments) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "bad, line 2, column 8: 'x:3' is no index:value pair" in complaint(
        "train", "logreg", "--train", "bad"
    )
    assert "three has labels -1, 1, 7" in complaint("train", "logreg", "--train", "three")
    assert "absent cannot be read" in complaint("train", "logreg", "--train", "absent")
    assert "there is no such file" in complaint("train", "logreg", "--train", "small", "--test", "absent")
    assert "bits=99 must be" in complaint("train", "logreg", "--train", "small", "--bits", "99")
    assert "model small is no safetensors file" in complaint("predict", "small", "small")
    assert not Path("runs").exists()
    assert run_command(monkeypatch, "train", "logreg", "--train", "bad", "--skip-bad", "--out", "m") == 0
    assert "2 bad lines were left out" in capfd.readouterr().err
    assert json.loads(Path("m/summary.json").read_text())["bad_lines"] == 2
    assert run_command(monkeypatch, "predict", "m", "bad", "--skip-bad") == 0
    printed = capfd.readouterr()
    assert len(printed.out.split()) == 2
    assert "2 bad lines" in printed.err


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
    assert losses == together.progressive == pytest.approx(alone.progressive, rel=1e-9)
    assert together.examples == 600


@pytest.mark.soak
def test_interrupted_processes_leave_the_last_whole_pass(tmp_path: Path) -> None:
    def stop(_loss: float) -> None:
        raise KeyboardInterrupt

    path = small_file(tmp_path)
    with Spool() as spool:
        rows = spooled(spool, path)
        options = LogregOptions(passes=100_000)
        found = learn_in_processes(rows, options, "turns", 2, bars=Bars(), on_pass=stop)
    assert found.interrupted
    assert np.abs(found.table).max() > 0.1
    assert not spool.folder.exists()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("strategy", "learner"), [("ps servers=2", "ftrl"), ("ps", "sgd"), ("allreduce", "adagrad")]
)
def test_batches_on_two_workers_are_those_of_one(tmp_path: Path, strategy: str, learner: str) -> None:
    path = small_file(tmp_path)
    options = LogregOptions(learner=learner, batch=64, passes=2, l2=1e-3, seed=3)
    losses: list[float] = []
    with Spool() as spool:
        rows = spooled(spool, path)
        single = Strategy.parse("single")
        alone = learn_in_batches(rows, options, single, 1, bars=Bars(), on_pass=losses.append)
    together = train_logreg(path, options, strategy=strategy, workers=2)
    np.testing.assert_allclose(together.model.table, alone.table, atol=2e-5)
    assert together.progressive == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("learner", ["adagrad", "ftrl"])
def test_batches_of_one_follow_the_rule_of_one_example(tmp_path: Path, learner: str) -> None:
    """Torch's optimizers on one example at a time are what the compiled rules do, in the order that `fit` draws."""
    path = small_file(tmp_path, 150)
    options = LogregOptions(learner=learner, batch=1, passes=1, l2=1e-3)
    with Spool() as spool:
        rows = spooled(spool, path)
        batches = learn_in_batches(
            rows, options, Strategy.parse("single"), 1, bars=Bars(), on_pass=lambda _loss: None
        )
    lines = path.read_text().splitlines()
    (tmp_path / "drawn").write_text("\n".join(lines[i] for i in permutation(150, 0, 0)) + "\n")
    np.testing.assert_allclose(
        train_logreg(tmp_path / "drawn", options).model.table, batches.table, atol=1e-5
    )


def await_or_fail(process: subprocess.Popen[bytes], condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "ended before it was interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_keeps_the_last_pass(tmp_path: Path) -> None:
    path = small_file(tmp_path, 2000)
    main_end, child_end = pty.openpty()
    process = subprocess.Popen(
        [
            *COMMAND,
            str(path),
            "--passes",
            "100000000",
            "--out",
            str(tmp_path / "m"),
            "--json",
            str(tmp_path / "s.json"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=child_end,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(child_end)
    seen = b""

    def third_pass() -> bool:
        nonlocal seen
        seen += os.read(main_end, 65536)
        counts = [int(count.replace(b",", b"")) for count in re.findall(rb"([\d,]+) examples", seen)]
        return max(counts, default=0) > 4000

    try:
        await_or_fail(process, third_pass)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                seen += os.read(main_end, 65536)
            except OSError:  # the other end is closed
                break
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["interrupted"]
    assert summary["passes"] >= 2
    assert f"the model is that after pass {summary['passes']} of 100000000".encode() in seen.replace(
        b"\r\n", b""
    )
    assert LogregModel.load(tmp_path / "m").weight.size == 41


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["allreduce", "ps servers=2"])
def test_ctrl_c_keeps_the_last_pass_of_batches(tmp_path: Path, strategy: str) -> None:
    path = small_file(tmp_path)
    spools = tmp_path / "spools"
    spools.mkdir()
    process = subprocess.Popen(
        [
            *COMMAND,
            str(path),
            "--passes",
            "100000",
            "--strategy",
            strategy,
            "--workers",
            "2",
            "--out",
            str(tmp_path / "m"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(spools)},
    )
    try:
        await_or_fail(process, lambda: any(spools.glob("**/step-*/**/*.json")))
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, error
    assert b"ended by SIGINT; the model is that after pass" in error
    assert LogregModel.load(tmp_path / "m").weight.any()
    assert not list(spools.glob("manyhands-*")), "nothing is left behind"


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
