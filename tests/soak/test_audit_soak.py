"""Live runs at every consistency, audited: complete when they come to their end, incomplete when they are killed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import manyhands as mh
from equality import OPTIMIZERS, make_task
from manyhands.strategies.ps.audit import Verdict, audit_run

CONSISTENCIES = ("sync", "sync:1", "bounded:2", "async", "softsync:2", "aware:async")

KILLED = """
import sys, time
from dataclasses import replace
import manyhands as mh
from equality import OPTIMIZERS, make_task
task = make_task(OPTIMIZERS["momentum"])
def slow(model, batch):
    time.sleep(0.02)
    return task.loss(model, batch)
mh.fit(replace(task, loss=slow), sys.argv[1], workers=3, steps=400, out=sys.argv[2])
"""


def require(out: Path, verdict: Verdict) -> None:
    found = audit_run(out).found
    assert found.verdict is verdict, [*(one.sentence for one in found.violations), *found.missing][:5]


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_the_verdict_on_a_live_run(consistency: str, replicas: int, tmp_path: Path) -> None:
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    strategy = f"ps servers=2 consistency={consistency} replicas={replicas}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    mh.fit(make_task(OPTIMIZERS["momentum"]), strategy, workers=3, steps=60, out=whole)
    require(whole, Verdict.COMPLETE)
    for log in sorted(whole.glob("updates/*.jsonl")):
        cut = shutil.copytree(whole, tmp_path / "cut")
        file = cut / "updates" / log.name
        file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
        require(cut, Verdict.INCOMPLETE)
        shutil.rmtree(cut)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, strategy, str(killed)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as launcher:
        metrics, deadline = killed / "metrics.jsonl", time.monotonic() + 200
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 71:
            assert time.monotonic() < deadline, "it never came to step 71"
            assert launcher.poll() is None, "it ended by itself"
            time.sleep(0.05)
        launcher.send_signal(signal.SIGKILL)
    time.sleep(2.0)  # its children notice within a second, and write no more
    require(killed, Verdict.INCOMPLETE)
