"""A run in the background: it shows how far it is, and a new slot at once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, make_task


def patient(seconds: float) -> mh.Task:
    task = make_task(OPTIMIZERS["sgd"])

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(seconds)
        return task.loss(model, batch)

    return replace(task, loss=slow)


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slots(running: mh.Running) -> dict[str, str]:
    """By slot: what its second column says."""
    rows = ElementTree.fromstring(running._repr_html_()).iter("tr")
    return {row[0].text or "": row[1].text or "" for row in rows if row[0].text != "slot"}


def test_a_new_slot_is_there_at_once_and_works_when_its_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engine.background_run.MORE_WORKERS", 1)
    with mh.start(patient(0.01), "ps consistency=async", workers=1, steps=10**6) as running:
        assert running.add_worker() == 1, "while the run is still starting"
        assert running.slots == (0, 1)
        assert slots(running)["1"] == "starting"
        await_(lambda: all(text.isdigit() for text in slots(running).values()))
        done = running.steps_done
        assert done > 0
        assert re.match(
            r"Running\(ps consistency=async · slots 0, 1 · step \d+/1000000  loss [\d.]+", repr(running)
        )
        await_(lambda: running.steps_done > done)
        with pytest.raises(mh.UserError, match="slot=7"):
            running.remove_worker(7)
        running.remove_worker(0)
        assert running.slots == (1,)
        with pytest.raises(mh.UserError, match="no more than 2 slots"):
            running.add_worker()
        running.stop()
    assert repr(running) == "Running(ended with Aborted: the run was asked to stop)"
    assert "Aborted" in running._repr_html_()


def test_a_run_that_has_ended_shows_what_came_out() -> None:
    with mh.start(patient(0.0), "single", steps=3) as running:
        run = running.result(240)
        assert running.steps_done == 3
        assert repr(running) == f"Running(ended: {run!r})"
        assert running._repr_html_() == run._repr_html_()
        with pytest.raises(mh.UserError, match="fixed number of workers"):
            running.add_worker()


def test_workers_that_make_no_sense_are_refused_by_name() -> None:
    running = mh.start(make_task(OPTIMIZERS["sgd"]), "ps", workers="two", steps=2)
    with pytest.raises(mh.UserError, match="workers='two' must be an integer"):
        running.result(240)
