"""Strangers on the machine, while a run trains: it ends as it would have without them."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import manyhands as mh
from assassin import events
from equality import OPTIMIZERS, distance, make_task, train_plainly
from hostile import Strangers, listening_ports
from manyhands.cli.main import app
from manyhands.observe.draw.page import write_report

STEPS = 80
HELD = 300


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def patient(task: mh.Task) -> mh.Task:
    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.05)
        return task.loss(model, batch)

    return replace(task, loss=slow)


def until(condition: Callable[[], Any], what: str, within_s: float = 100.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def of(out: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["event"] == kind]


def process(out: Path, name: str) -> int:
    return int([event["pid"] for event in of(out, "started") if event["name"] == name][-1])


def test_strangers_cannot_end_a_run_nor_keep_its_members_apart(tmp_path: Path) -> None:
    """While they do all they can, a worker is killed and replaced.

    The same weights, a clean audit, few words about it and none of theirs.
    """
    task, out = make_task(OPTIMIZERS["momentum"]), tmp_path / "run"
    with mh.start(
        patient(task), "ps servers=2 replicas=1 link=tcp", workers=2, steps=STEPS, out=out
    ) as running:
        until(lambda: (out / "metrics.jsonl").exists(), "the first step")
        ports = listening_ports([process(out, "server 0"), process(out, "server 1")])
        assert len(ports) == 2
        with Strangers(list(ports.values()), held=HELD, seed=1) as strangers:
            time.sleep(1.0)  # let every kind of them have a turn
            os.kill(process(out, "worker 1"), signal.SIGKILL)
            until(lambda: of(out, "recovered"), "the successor is connected")
            recovered_s = of(out, "recovered")[0]["at_s"]
            done = len((out / "metrics.jsonl").read_text().splitlines())
            until(
                lambda: len((out / "metrics.jsonl").read_text().splitlines()) >= min(done + 20, STEPS),
                "training goes on beside the strangers",
            )
        run = running.result(200)
    assert len(strangers.tried) == 9, strangers.tried
    assert distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9
    result = CliRunner().invoke(app, ["audit", str(out)])
    assert result.exit_code == 0, result.output
    assert recovered_s > 0
    report = [note for note in run.summary["notes"] if "rejected" in note]
    assert 0 < len(report) < 40, report
    everything = (out / "members.jsonl").read_text() + json.dumps(run.summary, ensure_ascii=False)
    for what in ("\\u001b", "\x1b", "\\ud800", "\\u202e", "\u202e", "<script>"):
        assert what not in everything
    write_report(out, tmp_path / "report.html")
    assert "<script>alert" not in (tmp_path / "report.html").read_text()
