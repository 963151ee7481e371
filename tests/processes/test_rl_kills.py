"""Learners of reinforcement learning that are killed: nothing they learned from is lost, and the run is replayed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import severed_task
from acted import ActorKiller, Bold, Walk, in_sight
from assassin import events
from manyhands.errors import WorkerFailed
from manyhands.strategies.ps.audit import audit_run
from manyhands.workloads.rl.run_tickets import audit_run_tickets, starts_of

pytestmark = pytest.mark.timeout(120)

ENVIRONMENTS = 8


class Deaths:
    """A loss that kills processes on the way: the worker that is the first to come to its `at`th loss, or another."""

    def __init__(self, loss: Callable[..., Any], marks: Path, at: dict[int, Callable[[], None]]) -> None:
        self._loss, self._marks, self._at, self._calls = loss, marks, at, 0

    def __call__(self, model: Any, batch: Any) -> Any:
        self._calls += 1
        death = self._at.get(self._calls)
        if death is not None:
            try:
                (self._marks / str(self._calls)).touch(exist_ok=False)
            except FileExistsError:
                death = None
        if death is not None:
            death()
        return self._loss(model, batch)


def this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def the_server_with(log: Path) -> None:
    """Whoever has a log of this shard open."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(file.readlink()).startswith(str(log)):
                os.kill(int(file.parts[2]), signal.SIGKILL)
                return
        except OSError:  # another's, or gone
            continue


def walk(environment: Callable[[], Any] = Walk, **given: Any) -> mh.Task:
    return mh.rl.task(
        policy=Bold,
        algorithm=mh.rl.PPO(epochs=1, minibatches=2),
        environment=environment,
        environments=ENVIRONMENTS,
        length=4,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        episodes=4,
        **given,
    )


def acted(environment: Callable[[], Any] = Walk) -> mh.Task:
    return walk(environment, actors=4, lag=2)


def deadly(task: mh.Task, marks: Path, at: dict[int, Callable[[], None]]) -> mh.Task:
    marks.mkdir()
    return replace(task, loss=Deaths(task.loss, marks, at))


def check_tickets(run: Path) -> None:
    found = audit_run_tickets(run)
    assert found is not None
    assert (found.verdict, found.broken, found.missing) == ("complete", (), ())


def test_a_run_whose_learner_was_killed_is_resumed_and_replayed(tmp_path: Path) -> None:
    """Actors are killed as well, before and after; the steps after the last checkpoint are acted and done again."""
    out, killer = tmp_path / "run", ActorKiller(tmp_path / "actors", every=5, kills=3)
    task = deadly(acted(partial(in_sight, killer.folder, Walk)), tmp_path / "marks", {17: this_process})
    options = mh.Options(progress="none", allow_overload=True, checkpoint_every=6, callbacks=[killer])
    train = partial(mh.fit, strategy="mirrored", workers=2, steps=30, out=out, options=options)
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        train(task)
    run = train(task, resume=True)
    assert killer.killed == 3
    check_tickets(out)
    starts = [starts_of(out, range(4 * worker, 4 * worker + 4)) for worker in range(2)]
    assert [sorted(one) for one in starts] == [[0, 12]] * 2
    again = mh.replay(out, acted())
    assert again.same_bytes
    for one, other in zip(again.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("consistency", "make"),
    [("async", walk), ("async", acted), ("bounded:2", acted)],
    ids=["workers act", "actors act", "actors act, bounded"],
)
def test_servers_outlive_workers_and_servers_that_are_killed(
    consistency: str, make: Callable[..., mh.Task], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    server = partial(the_server_with, out / "updates" / "shard-1.member-2")
    at = {9: this_process, 15: server, 21: this_process}
    task = deadly(make(), tmp_path / "marks", at)
    strategy = f"ps servers=2 replicas=1 consistency={consistency}"
    options = mh.Options(progress="none", allow_overload=True)
    run = mh.fit(task, strategy, workers=3, steps=90, out=out, options=options)
    assert {path.name for path in (tmp_path / "marks").iterdir()} == {"9", "15", "21"}
    assert sum(event["event"] == "died" for event in events(out)) == 3
    found = audit_run(out).found
    assert not found.violations
    assert not found.missing
    if make is acted:
        check_tickets(out)
    again = mh.replay(out, make())
    assert again.first_difference is None
    assert again.same_bytes
    for one, other in zip(again.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("after", [1, 2])
def test_what_a_worker_had_sent_when_it_was_killed_is_replayed_with_its_own_rollouts(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor begins with the batch that it had computed last, with other actors and newer weights."""
    out, left = tmp_path / "run", tmp_path / "left"
    left.mkdir()
    monkeypatch.setenv("SEVERED", f"{left}:{after}")
    options = mh.Options(progress="none", allow_overload=True)
    task, strategy = severed_task.acted(acted()), "ps servers=2 consistency=bounded:2"
    mh.fit(task, strategy, workers=2, steps=40, out=out, options=options)
    assert sum(event["event"] == "died" for event in events(out)) == 1
    check_tickets(out)
    again = mh.replay(out, acted())
    assert again.first_difference is None
    assert again.same_bytes
