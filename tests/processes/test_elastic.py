"""Elastic all-reduce, live: workers are killed, stopped, added and removed in one run; it ends as one process does."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from elastic_kills import Members, Striker
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.errors import Desync, UserError, WorkerFailed

STRIKES = ((signal.SIGKILL, "died"), (signal.SIGKILL, "died"), (signal.SIGSTOP, "silent"))


def slow_while(task: mh.Task, mark: Path, seconds: float) -> mh.Task:
    """The task, whose loss takes longer as long as `mark` is there."""
    plain = task.loss

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if mark.exists():
            time.sleep(seconds)
        return plain(model, batch)

    return replace(task, loss=loss)


def await_that(condition: Any, what: str) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < 180, what
        time.sleep(0.02)
    return time.monotonic() - begin


def test_workers_come_and_go_and_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Two kills, one that is stopped, one added, one removed; parameters are compared after every step."""
    steps, mark = 400, tmp_path / "slow"
    mark.touch()
    task = make_task(OPTIMIZERS["momentum"])
    options = mh.Options(check_every=1, checkpoint_every=100, watchdog_s=20)
    members = Members(tmp_path / "run")
    striker = Striker(members, seed=3, keep=1)
    noticed_s: dict[str, float] = {}
    with mh.start(
        slow_while(task, mark, 0.1),
        "allreduce elastic=yes",
        workers=3,
        steps=steps,
        out=tmp_path / "run",
        options=options,
    ) as running:
        await_that(lambda: len(members.at_work()) == 3, "all three are at work")
        for number, (how, report) in enumerate(STRIKES, 1):
            assert striker.strike(how)
            noticed_s[report] = await_that(lambda report=report: members.count(report), f"{report} is told")
            await_that(lambda number=number: members.count("died") == number, "it is gone")
            await_that(lambda: len(members.at_work()) == 3, "another has taken its place")
        assert running.add_worker() == 3
        await_that(lambda: len(members.at_work()) == 4, "one more is at work")
        running.remove_worker(0)
        await_that(lambda: len(members.at_work()) == 3, "one less is at work")
        mark.unlink()
        run = running.result(240)
    assert noticed_s["silent"] < 15
    assert distance(run.model.state_dict(), train_plainly(task, steps)) < 1e-9
    assert [row["step"] for row in run.history.steps] == list(range(1, steps + 1))
    counted = run.summary["membership"]
    assert counted["lost"] == 3
    assert counted["joined"] == 4
    assert counted["changes"] == 8
    assert counted["steps_computed_twice"] <= 3
    assert len(run.summary["recoveries"]) == 3
    sentences = [event["sentence"] for event in members.events() if event["event"] == "recovered"]
    assert all("continue after step" in sentence for sentence in sentences)
    assert run.summary["samples"] == sum(min(13, 45 - 13 * (k % 4)) for k in range(steps))


class Fatal(torch.nn.Linear):
    """Kills the process that asks for its state, as a checkpoint does, where `mark` is not there yet."""

    def __init__(self, mark: Path) -> None:
        super().__init__(4, 1, dtype=torch.float64)
        self.mark = mark

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _kill_once(self.mark)
        return super().state_dict(*args, **kwargs)


def _kill_once(mark: Path) -> None:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def test_worker_0_is_killed_in_an_evaluation_and_while_it_saves_and_another_does_it(tmp_path: Path) -> None:
    """Who follows it evaluates again, writes the checkpoint that was due, and leaves the weights."""
    x = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def metric(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        _kill_once(tmp_path / "evaluating")
        return model(batch).mean()

    task = mh.Task(
        model=lambda: Fatal(tmp_path / "saving"),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        data=x,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
        evaluation=x,
        metrics={"mean": metric},
    )
    options = mh.Options(evaluate_every=3, checkpoint_every=6)
    run = mh.fit(task, "allreduce elastic=yes", workers=3, steps=6, out=tmp_path / "run", options=options)
    plain = mh.fit(task, "single", steps=6, options=options)
    assert distance(run.model.state_dict(), plain.model.state_dict()) < 1e-9
    assert run.summary["membership"]["lost"] == 2
    assert [row["step"] for row in run.history.steps] == list(range(1, 7))
    assert [row["step"] for row in run.history.evaluations] == [3, 6]
    assert run.path is not None
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000006"]
    assert run.summary["final"]["mean"] == pytest.approx(plain.summary["final"]["mean"], abs=1e-12)


def test_too_few_workers_end_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["momentum"])
    mark = tmp_path / "killed"
    calls = []
    plain = task.loss

    def fatal(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():  # in a step, and not in the trial of the loss before the first
            calls.append(1)
        if len(calls) == 6 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(model, batch)

    strategy, out = "allreduce elastic=yes", tmp_path / "run"
    options = mh.Options(min_workers=2, checkpoint_every=2)
    with pytest.raises(
        WorkerFailed, match=r"1 worker is left, but min_workers=2: worker \d .*step 4 of 12 is kept"
    ) as raised:
        mh.fit(replace(task, loss=fatal), strategy, workers=2, steps=12, out=out, options=options)
    assert f"min_workers=2: worker {raised.value.worker_rank} " in str(raised.value)
    run = mh.fit(task, strategy, workers=2, steps=12, out=out, resume=True, options=options)
    assert run.summary["resumed_from_step"] == 4
    assert distance(run.model.state_dict(), train_plainly(task, 12)) < 1e-9


def test_a_worker_that_goes_its_own_way_is_found() -> None:
    """What the runs above rely on when they compare parameters after every step."""
    task = make_task(OPTIMIZERS["momentum"])
    plain = task.loss

    def astray(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            model.mix.bias += os.getpid() * 1e-9
        return plain(model, batch)

    with pytest.raises(Desync, match="after step 1 the workers no longer hold the same parameters"):
        mh.fit(
            replace(task, loss=astray),
            "allreduce elastic=yes",
            workers=2,
            steps=3,
            options=mh.Options(check_every=1),
        )


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    task = make_task(OPTIMIZERS["momentum"])
    with pytest.raises(UserError, match="min_workers=3: the run starts with 2 workers"):
        mh.fit(task, "allreduce elastic=yes", workers=2, steps=2, options=mh.Options(min_workers=3))
    with pytest.raises(UserError, match="min_workers=2: strategy mirrored needs all its workers"):
        mh.fit(task, "mirrored", workers=2, steps=2, options=mh.Options(min_workers=2))
    with pytest.raises(UserError, match="elastic=maybe: unknown value 'maybe'; allowed: yes, no"):
        mh.fit(task, "allreduce elastic=maybe", workers=2, steps=2)
