"""The command line as a user meets it: exit statuses, one-line errors, files written."""

import csv
import gzip
import json
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import warm
from commands import run_command


def test_train_writes_the_summary_and_prints_table_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status = run_command(
        monkeypatch, "train", "digits", "--workers", "2", "--steps", "20", "--json", "s.json",
        "--slow", "worker=1,factor=20", "--csv", "s.csv",
    )  # fmt: skip
    printed = capfd.readouterr()
    assert status == 0, printed.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["strategy"], summary["workers"], summary["steps"]) == ("mirrored", 2, 20)
    assert set(summary["final"]) == {"loss", "evaluation_loss", "accuracy"}
    lines = list(csv.DictReader((tmp_path / "s.csv").read_text().splitlines()))
    assert [line["step"] for line in lines if line["loss"]] == [str(step) for step in range(1, 21)]
    assert float(lines[-1]["accuracy"]) == summary["final"]["accuracy"]
    slowed, other = summary["per_worker"][1], summary["per_worker"][0]
    assert slowed["compute_s"] > other["compute_s"]
    assert other["wait_s"] > slowed["wait_s"]
    assert "worker 1 is " in printed.out
    (directory,) = (tmp_path / "runs").iterdir()
    assert f"runs/{directory.name}" in printed.out
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert printed.err == "", "quiet when not on a terminal"


def test_train_takes_what_fit_logs_traces_and_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status = run_command(
        monkeypatch, "train", "digits", "--workers", "1", "--steps", "9", "--evaluate-every", "3", "--out", "run",
        "--restore-best", "--log", "lr,grad_norm", "--float16", "--profile", "traces",
    )  # fmt: skip
    assert status == 0, capfd.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 9
    assert all(row["lr"] > 0 and "grad_norm" in row for row in steps)
    losses = {row["step"]: row["metrics"]["evaluation_loss"] for row in rows if "metrics" in row}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_step"] == min(losses, key=lambda step: losses[step])
    trace = (tmp_path / "traces" / "worker-0.json").read_text()
    assert all(name in trace for name in ("Optimizer.step", "manyhands: input", "manyhands: exchange"))
    assert run_command(monkeypatch, "train", "digits", "--steps", "4", "--log", "lr,norm") == 2
    [sentence] = capfd.readouterr().err.splitlines()[-1:]
    assert (
        sentence == "manyhands: log: 'norm' is not known; allowed: lr, grad_norm; did you mean 'grad_norm'?"
    )


def wrong_idx(folder: Path) -> Path:
    """A folder of MNIST files of which the training images are cut short."""
    folder.mkdir()
    for part, count in (("train", 10), ("t10k", 4)):
        images = struct.pack(">4i", 0x803, count, 28, 28) + bytes(
            28 * 28 * count - (5 if part == "train" else 0)
        )
        labels = struct.pack(">2i", 0x801, count) + bytes(count)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return folder


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "digits", "--strategy", "alreduce"], ["'alreduce'", "did you mean 'allreduce'?"]),
        (["train", "digits", "--workers", "0"], ["workers=0"]),
        (["train", "digits", "--strategy", "allreduce algorithm=rign"], ["'rign'", "did you mean 'ring'?"]),
        (["train", "digits", "--slow", "worker=9,factor=2"], ["no worker 9"]),
        (["train", "digits", "--batch-size", "zero"], ["batch_size", "'zero'", "an integer"]),
        (["train", "digits", "--resume"], ["--resume needs --out"]),
        (["train", "digits", "--resume", "--out", "nowhere"], ["nowhere", "holds no run"]),
        (["train", "mnist"], ["mnist", "path"]),
        (["train", "mnist", "--path", "not-there"], ["not-there"]),
        (["train", "mnist", "--path", "cut"], ["train-images-idx3-ubyte.gz", "byte"]),
        (["train", "gpt", "--path", "missing.txt"], ["missing.txt"]),
        (["train", "digits", "--json", "no/such/folder/s.json", "--steps", "1"], ["no/such/folder"]),
        (["bench", "allreduce", "--workers", "1"], ["workers=1"]),
        (["bench", "allreduce", "--sizes", "5apples"], ["'5apples'", "25MiB"]),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong_idx(tmp_path / "cut")
    assert run_command(monkeypatch, *arguments) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    for part in parts:
        assert part in error
    assert not (tmp_path / "runs").exists(), "nothing was started"


@pytest.mark.parametrize("strategy", ["single", "mirrored"])
def test_a_run_that_diverges_is_one_sentence_and_status_1(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "line", "--learning-rate", "1e20", "--steps", "40", "--strategy", strategy]
    workers = "1" if strategy == "single" else "2"
    assert run_command(monkeypatch, *words, "--workers", workers, "--out", tmp_path / "run") == 1
    output, error = capfd.readouterr()
    assert error.count("\n") == 1, error
    assert "the loss is not finite" in error
    assert "lower the learning rate" in error
    assert (tmp_path / "run/report.html").exists(), "it shows what went wrong"
    assert "report.html" in output


def test_doctor_and_help_and_version(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "doctor") == 0
    assert "cores" in capfd.readouterr().out
    assert run_command(monkeypatch, "train", "gpt", "--help") == 0
    printed = capfd.readouterr().out
    assert "--context" in printed or "--layers" in printed
    assert run_command(monkeypatch, "version") == 0


def test_doctor_proves_every_equal_strategy_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "doctor", "--prove", tmp_path / "proof.json") == 0
    proofs = json.loads((tmp_path / "proof.json").read_text())["proofs"]
    verdicts = {(proof["device"], proof["strategy"]): proof["verdict"] for proof in proofs}
    for word in ("mirrored", "allreduce", "central", "sharded", "ps", "pipeline", "tensor"):
        assert verdicts["cpu", word] == "proved", proofs
        assert verdicts["cuda", word] == ("proved" if torch.cuda.device_count() > 1 else "skipped")
    assert "proved  mirrored" in capfd.readouterr().out


def test_doctor_needs_a_folder_for_its_proofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "doctor", "--prove", tmp_path / "none/proof.json") == 2
    assert "there is no folder" in capfd.readouterr().err


def kept_steps(out: Path) -> list[int]:
    """The steps of whole checkpoints, of a run by parameter servers those of its shards."""
    return sorted(
        int(path.parent.name.removeprefix("step-")) for path in out.glob("**/step-*[0-9]/manifest.json")
    )


def interrupted(
    command: list[str], out: Path, number: signal.Signals, is_time: Callable[[], bool]
) -> tuple[int, str]:
    """Run `command`, send it the signal when it is time, and give its status and what it wrote to stderr."""
    process = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent)
    try:
        deadline = time.monotonic() + 200  # a busy machine takes its time to start five processes
        while not is_time():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("mirrored", signal.SIGINT),
        ("ps", signal.SIGTERM),
        ("single", signal.SIGHUP),
        *(
            pytest.param(strategy, number, marks=pytest.mark.soak)
            for strategy, number in (
                ("mirrored", signal.SIGTERM),
                ("allreduce algorithm=ring", signal.SIGTERM),
                ("central", signal.SIGHUP),
                ("hogwild", signal.SIGTERM),
                ("ps servers=2 consistency=async replicas=1", signal.SIGHUP),
            )
        ),
    ],
)
def test_a_signal_stops_all_workers_and_says_what_is_kept_and_the_command_to_go_on(
    strategy: str, number: signal.Signals, tmp_path: Path
) -> None:
    out = tmp_path / "a run"
    workers = "1" if strategy == "single" else "2"
    command = [sys.executable, "-m", "manyhands", "train", "digits", "--steps", "1000000", "--out", str(out)]
    command += [
        "--strategy",
        strategy,
        "--workers",
        workers,
        "--checkpoint-every",
        "20",
        "--evaluate-every",
        "100000",
    ]
    status, errors = interrupted(command, out, number, lambda: max(kept_steps(out), default=0) >= 40)
    assert status == 128 + number, errors
    report = [line for line in errors.splitlines() if line.startswith("manyhands: ended by ")]
    assert len(report) == 1, errors
    found = re.fullmatch(
        rf"manyhands: ended by {number.name}; step (\d+) of 1000000 is kept in {out}; continue with: (.*)",
        report[0],
    )
    assert found is not None, report
    assert int(found[1]) >= 20
    again = shlex.split(found[2])
    assert again == [*command, "--resume"]
    *_, last = (out / "members.jsonl").read_text().splitlines()
    assert f"ended by {number.name}; step {found[1]} of 1000000 is kept" in json.loads(last)["sentence"]
    if (strategy, number) == ("mirrored", signal.SIGTERM):  # and the command does what it promises
        status, errors = interrupted(again, out, signal.SIGTERM, lambda: kept_steps(out)[-1] > int(found[1]))
        assert status == 143, errors
        assert f"ended by SIGTERM; step {kept_steps(out)[-1]} of 1000000 is kept" in errors
