"""`ps push=parameters`: workers that step by themselves and servers that average, against replicas made by hand."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, same_bits, train_plainly
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.errors import UserError
from manyhands.strategies.ps.audit import audit_run
from manyhands.strategies.ps.replay import replay

STEPS = 8


def replicas(task: mh.Task, workers: int) -> dict[str, torch.Tensor]:
    """Each worker's own optimizer on its own copy; after every step all copies become their weighted mean."""
    plan = TrainingPlan(task=task, steps=STEPS, seed=0, evaluate_every=0, checkpoint_every=0)
    computers = [Computer(plan, rank) for rank in range(workers)]
    built = [computer.build() for computer in computers]
    for step in range(STEPS):
        shares = [
            computer.compute(one.model, step, rank, workers, lambda loss, _: loss.backward()).share
            for rank, (computer, one) in enumerate(zip(computers, built, strict=True))
        ]
        for one in built:
            one.optimizer.step()
            one.optimizer.zero_grad()
            if one.scheduler is not None:
                one.scheduler.step()
        with torch.no_grad():
            for same in zip(*(one.model.parameters() for one in built), strict=True):
                mean = sum(share * value for share, value in zip(shares, same, strict=True))
                for value in same:
                    value.copy_(mean)
    return copy.deepcopy(built[0].model.state_dict())


def decaying(task: mh.Task) -> mh.Task:
    return replace(task, scheduler=lambda one: torch.optim.lr_scheduler.ExponentialLR(one, gamma=0.8))


def test_workers_are_the_replicas_of_a_hand_made_loop(tmp_path: Path) -> None:
    task = decaying(make_task(OPTIMIZERS["momentum"]))
    run = mh.fit(task, "ps servers=2 push=parameters", workers=3, steps=STEPS, out=tmp_path / "run")
    assert distance(run.model.state_dict(), replicas(task, 3)) < 1e-9
    assert audit_run(tmp_path / "run").found.clean
    with pytest.raises(UserError, match="its own optimizer"):
        replay(tmp_path / "run", task)


def test_one_worker_alone_is_the_plain_loop_whenever_servers_take_its_parameters() -> None:
    task = make_task(OPTIMIZERS["adamw"])
    run = mh.fit(task, "ps consistency=async link=tcp push=parameters", workers=1, steps=STEPS)
    assert distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer: str, tmp_path: Path) -> None:
    """Each worker goes on with the state of its own optimizer, at the learning rate of the batch."""
    task = decaying(make_task(OPTIMIZERS[optimizer]))
    arguments: dict[str, Any] = {"workers": 2, "options": mh.Options(checkpoint_every=2)}
    strategy = "ps push=parameters servers=2"
    whole = mh.fit(task, strategy, steps=STEPS, **arguments)
    mh.fit(task, strategy, steps=4, out=tmp_path / "run", **arguments)
    resumed = mh.fit(task, strategy, steps=STEPS, out=tmp_path / "run", resume=True, **arguments)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    assert not any("optimizers start without state" in note for note in resumed.summary["notes"])


def test_optimizers_begin_anew_where_their_state_is_lost(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["momentum"])
    arguments: dict[str, Any] = {"workers": 2, "out": tmp_path / "run"}
    mh.fit(task, "ps push=parameters", steps=4, **arguments)
    shutil.rmtree(tmp_path / "run" / "owed" / "1")
    resumed = mh.fit(task, "ps push=parameters", steps=STEPS, resume=True, **arguments)
    [note] = [note for note in resumed.summary["notes"] if "optimizers start without state" in note]
    assert "no process has the state" in note


def test_the_run_says_that_the_optimizer_of_a_successor_begins_anew(tmp_path: Path) -> None:
    task, calls, mark = make_task(OPTIMIZERS["momentum"]), [0], tmp_path / "killed"

    def loss(model: Any, batch: Any) -> torch.Tensor:
        calls[0] += torch.is_grad_enabled()  # in a step, and not in the trial of the loss
        if calls[0] == 3:  # in each process of its own
            with suppress(FileExistsError):
                mark.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)

    run = mh.fit(replace(task, loss=loss), "ps push=parameters", workers=2, steps=STEPS, out=tmp_path / "run")
    assert mark.exists()
    assert audit_run(tmp_path / "run").found.clean
    [note] = [note for note in run.summary["notes"] if "starts without state" in note]
    assert re.search(
        r"the optimizer of worker [01] starts without state at batch 3: a successor does not receive", note
    )


def test_rows_of_tables_are_refused() -> None:
    task = make_task(OPTIMIZERS["sgd"])
    sparse = replace(task, sparse={"embed.weight": lambda batch: batch[0]})
    with pytest.raises(UserError, match="cannot step a table"):
        mh.fit(sparse, "ps push=parameters", workers=2, steps=2)
