"""Helpers as processes: a run is named and kept when one dies, goes on, and tells who sent what."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, make_task, same_bits
from manyhands.errors import WorkerFailed
from manyhands.observe.analyse.timeline import build_timeline
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.common.collectives.collective import gradient_layouts

STRATEGY, WORKERS, STEPS = "allreduce helpers=1", 2, 8


def children(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def striking_loss(task: mh.Task, pids: Path) -> Any:
    """The task's loss; in its fifth call worker 0 kills whoever was started beside the workers since now."""
    plain, calls, before = task.loss, list[None](), children(os.getpid())

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.extend([None] * torch.is_grad_enabled())
        (pids / str(os.getpid())).touch()
        workers = {path.name for path in pids.iterdir()}
        if len(calls) == 5 and os.getpid() == min(map(int, workers)):
            for pid in children(os.getppid()) - workers - before:
                os.kill(int(pid), signal.SIGKILL)
        return plain(model, batch)

    return loss


def test_a_helper_that_dies_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["momentum"])
    options = mh.Options(checkpoint_every=2)
    arguments: dict[str, Any] = {"workers": WORKERS, "steps": STEPS, "options": options}
    with pytest.warns(UserWarning, match="use helpers with three workers or more"):
        whole = mh.fit(task, STRATEGY, out=tmp_path / "whole", **arguments)
    pids = tmp_path / "pids"
    pids.mkdir()
    fatal = replace(task, loss=striking_loss(task, pids))
    with (
        pytest.warns(UserWarning, match="use helpers with three workers or more"),
        pytest.raises(WorkerFailed, match=r"helper 0 .*was killed by SIGKILL"),
    ):
        mh.fit(fatal, STRATEGY, out=tmp_path / "run", **arguments)
    with pytest.warns(UserWarning, match="use helpers with three workers or more"):
        resumed = mh.fit(task, STRATEGY, out=tmp_path / "run", resume=True, **arguments)
    assert resumed.summary["resumed_from_step"] in (2, 4)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    _tells_who_sent_what(whole, tmp_path / "whole")


def _tells_who_sent_what(run: mh.Run, path: Path) -> None:
    events = read_run_events(path / "events")
    assert [role.name for role in events.roles] == ["worker-0", "worker-1", "helper-0"]
    helper = events.roles[2]
    assert helper.of(EventKind.EXCHANGE)["step"].tolist() == list(range(STEPS))
    assert set(helper.of(EventKind.SEND)["peer"].tolist()) == {0, 1}
    assert len(run.summary["per_worker"]) == WORKERS
    gradient = sum(layout.parcel(0).num_bytes for layout in gradient_layouts(run.model, 25 << 20))
    # Of a piece of half the gradient that the helper sums, each worker gets the sum.
    sent = helper.of(EventKind.SEND)["num_bytes"].sum() / STEPS
    assert sent == pytest.approx(gradient, rel=0.05)
    rows = build_timeline(events.roles, max_slices=1000).rows
    assert [row.name for row in rows] == ["worker 0", "worker 1", "helper 0"]
    assert {one.kind for one in rows[2].slices} == {EventKind.EXCHANGE}
    assert len(rows[2].slices) >= STEPS - 1, "what it did is drawn, though it has no steps"
