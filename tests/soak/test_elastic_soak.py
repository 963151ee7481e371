"""Fifty kills and joins in one elastic run: the survivors are alike after every step, and the run ends as without."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import manyhands as mh
from elastic_kills import Members, Striker
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.workloads.tasks.digits import digits

KILLS = 50


def struck(task: mh.Task, out: Path, steps: int, seed: int, strategy: str) -> mh.Run:
    """The task on 4 workers, of which fifty are killed while it goes on, and each is followed by another."""
    members = Members(out)
    options = mh.Options(check_every=1, checkpoint_every=100)
    with mh.start(task, strategy, workers=4, steps=steps, out=out, options=options) as running:
        deadline = time.monotonic() + 120
        while len(members.at_work()) < 4:
            assert time.monotonic() < deadline, "all four are at work"
            time.sleep(0.05)
        striker = Striker(members, seed)
        while striker.hits < KILLS and not running.done:
            striker.strike(pause_s=1.5)
        run = running.result(1200)
    counted = run.summary["membership"]
    assert counted["lost"] == KILLS, "all were hit before the run ended"
    assert counted["steps_computed_twice"] <= counted["changes"]
    assert [row["step"] for row in run.history.steps] == list(range(1, steps + 1))
    return run


def slowed(task: mh.Task) -> mh.Task:
    """The task, whose steps take long enough to be struck at."""
    plain = task.loss

    def slow(model: torch.nn.Module, batch: object) -> torch.Tensor:
        time.sleep(0.02)
        return plain(model, batch)

    return replace(task, loss=slow)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", ["allreduce elastic=yes", "allreduce algorithm=ring elastic=yes"])
def test_fifty_kills_end_with_the_weights_of_one_process(strategy: str, tmp_path: Path) -> None:
    task, steps = make_task(OPTIMIZERS["momentum"]), 4000
    run = struck(slowed(task), tmp_path / "run", steps, int(time.time()), strategy)
    assert distance(run.model.state_dict(), train_plainly(task, steps)) < 1e-9


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_fifty_kills_cost_no_accuracy(tmp_path: Path) -> None:
    task, steps = digits(), 4000
    without = mh.fit(task, "allreduce", workers=4, steps=steps)
    run = struck(slowed(task), tmp_path / "run", steps, int(time.time()), "allreduce elastic=yes")
    assert without.summary["final"]["accuracy"] > 0.97
    assert abs(run.summary["final"]["accuracy"] - without.summary["final"]["accuracy"]) < 0.01
