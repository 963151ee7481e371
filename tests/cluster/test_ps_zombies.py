"""A worker that was paused and wakes up, with servers and workers as threads: fenced, told, and of use again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from equality import OPTIMIZERS, distance, make_task, train_plainly
from equality import loss as plain_loss
from manyhands.strategies.ps.live.reports import PlaceGiven, PlaceLost, StepComputed
from manyhands.strategies.ps.ps_messages import Push, Read
from manyhands.transport.hub.hub import Hub
from threaded_ps import ThreadedRun, job_for

STEPS = 24


@cache
def by_plain_loop() -> dict[str, torch.Tensor]:
    return train_plainly(make_task(OPTIMIZERS["sgd"]), STEPS)


class Gate:
    """The loss, which one worker's thread does not get past before it is let through."""

    def __init__(self, thread: str, after: int) -> None:
        self.stands, self.opened = threading.Event(), threading.Event()
        self._thread, self._left = thread, after

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        if threading.current_thread().name == self._thread and not self.opened.is_set():
            self._left -= 1
            if self._left < 0:
                self.stands.set()
                assert self.opened.wait(240)
        return plain_loss(model, batch)


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("link", ["shared", "tcp"])
@pytest.mark.parametrize("consistency", ["sync", "bounded:2", "async", "softsync:2"])
def test_a_zombie_is_fenced_and_the_run_goes_on(
    consistency: str, link: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("member 4", after=3)
    task = make_task(OPTIMIZERS["sgd"])
    strategy = f"ps servers=2 consistency={consistency} link={link} replicas={replicas}"
    job = job_for(replace(task, loss=_loss), strategy, steps=STEPS, workers=2)
    monkeypatch.setitem(_GATES, "now", gate)
    backups = (2, 1) if replicas else ()
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(4)
        run.publish(1, (1, 2), backups)
        assert gate.stands.wait(240)
        run.start_worker(1, 5)
        run.await_joined(5)
        run.publish(2, (1, 2), backups, deaf=(4,))
        run.await_said(12 if consistency != "sync" else 8, StepComputed)  # its successor is at work
        gate.opened.set()
        run.await_said(1, PlaceLost)
        ours = run.finish().state_dict()
    if consistency == "sync":
        assert distance(ours, by_plain_loop()) < 1e-9


def test_who_was_fenced_takes_the_next_place_and_harms_nothing_that_it_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update that a zombie left at a shard may wait there long after the zombie computes for another slot."""
    gate = Gate("member 3", after=3)
    task = make_task(OPTIMIZERS["sgd"])
    job = job_for(replace(task, loss=_loss), "ps servers=2", steps=STEPS, workers=2)
    monkeypatch.setitem(_GATES, "now", gate)
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(4)
        run.publish(1, (1, 2))
        assert gate.stands.wait(240)  # slot 0 stands; what slot 1 pushed for this step is held by both shards
        run.start_worker(1, 5)
        run.publish(2, (1, 2))  # member 4 is fenced by this
        run.await_said(1, PlaceLost)
        run.hold(0, 6)
        run.tell(4, PlaceGiven(slot=0, member=6))
        run.publish(3, (1, 2), deaf=(3,))
        run.await_joined(6)
        run.await_said(12, StepComputed)
        gate.opened.set()
        ours = run.finish().state_dict()
    assert distance(ours, by_plain_loop()) < 1e-9


@pytest.mark.parametrize("link", ["shared", "tcp"])
def test_what_a_primary_took_before_it_heard_of_a_successor_reaches_its_backup(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup knows better by then, and has to find the gradient all the same."""
    gate = Gate("member 4", after=3)
    task = make_task(OPTIMIZERS["sgd"])
    job = job_for(replace(task, loss=_loss), f"ps servers=2 replicas=1 link={link}", steps=STEPS, workers=2)
    monkeypatch.setitem(_GATES, "now", gate)
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(4)
        run.publish(1, (1, 2), (2, 1))
        assert gate.stands.wait(240)
        run.hold(1, 5)
        run.publish(2, (1, 2), (2, 1), deaf=(1, 4))  # server 1 leads shard 0, and server 2 is its backup
        time.sleep(0.5)  # server 2 hears it
        gate.opened.set()
        run.await_said(1, PlaceLost)
        run.start_worker(1, 5)
        run.publish(3, (1, 2), (2, 1))
        ours = run.finish().state_dict()
    assert distance(ours, by_plain_loop()) < 1e-9


class Stop:
    """One worker's thread stands still when so many messages of its update have left, the next not begun."""

    def __init__(self, thread: str, update: int, after: int) -> None:
        self.stands, self.opened = threading.Event(), threading.Event()
        self._thread, self._update, self._left = thread, update, after

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> Stop:
        """Let every hub of this process come by here."""
        send = Hub.send

        def stopping(hub: Hub, member: int, message: Any, payload: Sequence[Any] = ()) -> bool:
            taken = send(hub, member, message, payload)
            if threading.current_thread().name == self._thread and self._is_of_update(message):
                hub.send_off()  # as if it had been stopped on its way: nothing waits for the next one
                self._left -= 1
                if self._left == 0:
                    self.stands.set()
                    assert self.opened.wait(240)
            return taken

        monkeypatch.setattr(Hub, "send", stopping)
        return self

    def _is_of_update(self, message: Any) -> bool:
        pushed = isinstance(message, Push) and message.clock == self._update
        return pushed or (isinstance(message, Read) and message.clock == self._update + 1)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("link", ["shared", "tcp"])
def test_an_update_that_some_shards_lack_counts_at_none(
    link: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is stopped between two of its messages to two shards: pushes, and the reads behind them."""
    stop = Stop("member 4", update=3, after=after).patch(monkeypatch)
    task = make_task(OPTIMIZERS["sgd"])
    job = job_for(task, f"ps servers=2 link={link}", steps=STEPS, workers=2)
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(4)
        run.publish(1, (1, 2))
        assert stop.stands.wait(240)
        run.start_worker(1, 5)
        run.await_joined(5)
        run.publish(2, (1, 2), deaf=(4,))
        run.await_said(12, StepComputed)  # its successor is at work
        stop.opened.set()
        run.await_said(1, PlaceLost)
        ours = run.finish().state_dict()
    assert distance(ours, by_plain_loop()) < 1e-9


_GATES: dict[str, Gate] = {}


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return _GATES["now"](model, batch)
