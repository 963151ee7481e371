"""200 kills of workers and servers, each after the recovery from the last: nothing lost, and it still learns."""

from __future__ import annotations

import json
import logging
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from assassin import Assassin, events
from manyhands.strategies.ps.audit import Verdict, audit_run
from manyhands.workloads.tasks import TASKS

RUNS, KILLS = 8, 25

CONSISTENCIES = ("sync", "bounded:3", "async", "softsync:1")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(RUNS))
def test_kills_lose_nothing(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("manyhands").setLevel(logging.CRITICAL)
    out, consistency = tmp_path / "run", CONSISTENCIES[seed % len(CONSISTENCIES)]
    task = TASKS["digits"].build()

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.02)
        return task.loss(model, batch)

    strategy = f"ps servers=2 replicas=1 consistency={consistency}"
    with (
        Assassin(out, kills=KILLS, seed=seed) as assassin,
        mh.start(replace(task, loss=slow), strategy, workers=2, epochs=600, out=out) as running,
    ):
        while len(_recoveries(out)) < KILLS:
            assert not running.done, f"training was over after {len(assassin.struck)} kills"
            time.sleep(0.1)
        accuracy = [row["metrics"]["accuracy"] for row in _metrics(out) if "metrics" in row][-1]
        running.stop()
    seconds = [event["seconds"] for event in _recoveries(out)]
    with capsys.disabled():
        print(
            f"\n{strategy}: {KILLS} kills, recovered in {statistics.median(seconds):.2f} s (median), "
            f"{max(seconds):.2f} s (worst); accuracy {accuracy:.4f}"
        )
    assert accuracy > 0.975
    found = audit_run(out).found
    assert found.verdict is Verdict.INCOMPLETE, found.violations  # it was stopped


def _recoveries(out: Path) -> list[dict[str, Any]]:
    return [event for event in events(out) if event["event"] == "recovered"]


def _metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().split("\n")[:-1]]
