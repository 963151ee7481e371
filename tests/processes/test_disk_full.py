"""A disk that fills up while a run trains: the run goes on, says so, and spoils nothing that is there."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from disks import fill, small_disk
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.strategies.ps.audit import Verdict, audit_run

STEPS = 120


def patient(task: mh.Task, seconds: float) -> mh.Task:
    """The same task, slow enough for a disk to fill on the way."""

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(seconds)
        return task.loss(model, batch)

    return replace(task, loss=slow)


def lines(file: Path) -> list[dict[str, Any]]:
    """Every line of a file, each of which has to be whole."""
    text = file.read_text()
    assert text.endswith("\n"), f"{file} ends in the middle of a line"
    return [json.loads(line) for line in text.splitlines()]


def await_lines(file: Path, count: int) -> None:
    deadline = time.monotonic() + 180
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{file} never had {count} lines"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        "ps servers=2 replicas=1",
        pytest.param("ps servers=2 consistency=async", marks=pytest.mark.soak),
        pytest.param("ps consistency=bounded:2 link=tcp", marks=pytest.mark.soak),
        pytest.param("mirrored", marks=pytest.mark.soak),
        pytest.param("hogwild order=locked", marks=pytest.mark.soak),
    ],
)
def test_a_run_goes_on_when_its_disk_is_full(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "manyhands")
    task = make_task(OPTIMIZERS["momentum"])
    options = mh.Options(checkpoint_every=10)
    with small_disk(tmp_path / "disk", 2 << 20) as disk:
        out = disk / "run"
        workers = 1 if strategy == "single" else 2
        started = mh.start(
            patient(task, 0.02), strategy, workers=workers, steps=STEPS, out=out, options=options
        )
        with started as running:
            await_lines(out / "metrics.jsonl", 25)
            ballast = fill(disk)
            run = running.result(200)
        assert run.summary["steps"] == STEPS
        assert len(run.history.loss) == STEPS, "what the disk did not take is still in the history"
        is_exact = strategy in ("ps servers=2 replicas=1", "mirrored", "single")
        if is_exact:
            assert distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9
        for file in [*out.glob("*.jsonl"), *out.glob("updates/*.jsonl")]:
            lines(file)
        report = " ".join([*run.summary["notes"], *caplog.messages])
        assert "metrics.jsonl" in report
        assert "checkpoint" in report or "snapshot" in report
        for store in [out / "checkpoints", *out.glob("shards/*")]:
            assert not [path for path in store.iterdir() if path.suffix], "half a checkpoint was left"

        if strategy.startswith("ps"):
            found = audit_run(out).found
            assert found.verdict is Verdict.INCOMPLETE, found.violations
        ballast.unlink()  # room again: the run is resumed from what was kept
        resumed = mh.fit(task, strategy, workers=workers, steps=STEPS, out=out, resume=True, options=options)
        assert 0 < resumed.summary["resumed_from_step"] <= STEPS
        steps = sorted(row["step"] for row in lines(out / "metrics.jsonl") if "loss" in row)
        assert len(steps) == len(set(steps)), "a step is there twice"
        assert steps == list(range(1, STEPS + 1))
        if is_exact:
            assert distance(resumed.model.state_dict(), train_plainly(task, STEPS)) < 1e-9
        if strategy.startswith("ps"):
            found = audit_run(out).found
            assert found.verdict is Verdict.RESTORED, (found.violations, found.missing)
            assert found.lost == 0 or not is_exact
