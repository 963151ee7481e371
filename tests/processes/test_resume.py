"""A run on parameter servers that was killed and resumed: its records tell one story, each step once."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.strategies.ps.audit import Verdict, audit_run

STEPS = 60


def patient(task: mh.Task, seconds: float = 0.03) -> mh.Task:
    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(seconds)
        return task.loss(model, batch)

    return replace(task, loss=slow, evaluation=task.data)


def interrupted(out: Path, strategy: str, until: Any, every: int = 10) -> mh.Task:
    """Stop a run as soon as `until` says so."""
    task = make_task(OPTIMIZERS["momentum"])
    options = mh.Options(checkpoint_every=every, evaluate_every=10)
    deadline = time.monotonic() + 180
    with mh.start(patient(task), strategy, workers=3, steps=STEPS, out=out, options=options) as running:
        while not until():
            assert time.monotonic() < deadline, "it never came so far"
            assert not running.done, running.result()
            time.sleep(0.005)
        running.stop()
    return replace(task, evaluation=task.data)


def rows(out: Path, kind: str) -> list[int]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return sorted(row["step"] for row in found if kind in row)


@pytest.mark.parametrize(
    "consistency",
    ["async", *(pytest.param(one, marks=pytest.mark.soak) for one in ("bounded:2", "softsync:1", "sync"))],
)
def test_the_history_of_a_resumed_run_has_every_step_once(consistency: str, tmp_path: Path) -> None:
    out, strategy = tmp_path / "run", f"ps servers=2 consistency={consistency}"
    task = interrupted(out, strategy, lambda: (out / "shards/1/step-00000010").exists())
    options = mh.Options(checkpoint_every=10, evaluate_every=10)
    if consistency != "sync":
        with pytest.raises(mh.UserError, match=f"in the middle of consistency={consistency}.*workers=3"):
            mh.fit(task, "mirrored", workers=2, steps=STEPS, out=out, resume=True)
    run = mh.fit(task, strategy, workers=3, steps=STEPS, out=out, resume=True, options=options)
    assert run.summary["resumed_from_step"] is not None
    assert rows(out, "loss") == list(range(1, STEPS + 1))
    assert rows(out, "metrics") == list(range(10, STEPS + 1, 10))
    assert len(run.history.loss) == STEPS
    found = audit_run(out).found
    assert found.verdict is Verdict.RESTORED, (found.violations, found.missing)


@pytest.mark.soak
@pytest.mark.parametrize("other", ["mirrored", "ps servers=3"])
def test_a_run_in_step_goes_on_under_another_strategy_from_its_middle(other: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    task = interrupted(out, "ps servers=2", lambda: (out / "shards/1/step-00000010").exists())
    run = mh.fit(task, other, workers=2, steps=STEPS, out=out, resume=True)
    assert run.summary["resumed_from_step"] % 10 == 0
    assert rows(out, "loss") == list(range(1, STEPS + 1))
    assert distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9


def test_a_run_that_had_no_snapshot_begins_again_with_clean_records(tmp_path: Path) -> None:
    out, strategy = tmp_path / "run", "ps servers=2 consistency=async replicas=1"
    metrics = out / "metrics.jsonl"
    task = interrupted(
        out, strategy, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 8, every=10**6
    )
    left = out / "shards/0/step-00000030"  # as of a life in which not every shard came to save
    left.mkdir(parents=True)
    run = mh.fit(task, strategy, workers=3, steps=STEPS, out=out, resume=True)
    assert not left.exists()
    assert run.summary["resumed_from_step"] is None
    assert rows(out, "loss") == list(range(1, STEPS + 1))
    done = mh.replay(out, task)
    assert done.first_difference is None
    assert done.same_bytes is True
    found = audit_run(out).found
    assert found.verdict is Verdict.COMPLETE, (found.violations, found.missing)
