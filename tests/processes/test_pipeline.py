"""`pipeline` in processes of its own: random numbers, going on under other strategies, a stage that is killed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from equality import distance, same_bits
from manyhands.errors import WorkerFailed
from manyhands.observe.record.events import EventKind, to_events
from manyhands.observe.record.recorded import read_run_events
from manyhands.workloads.language.gpt import GPTOptions, gpt
from pipelines import task_of

PATIENCE_S = 60.0


def make(model: Any) -> mh.Task:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        noise = 0.01 * torch.randn_like(inputs)  # drawn by the first and the last stage alike
        return ((model(inputs + noise) - targets - noise.sum(1, keepdim=True)) ** 2).mean()

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return mh.Task(
        model=model,
        loss=loss,
        data=(inputs, inputs.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch_size=12,
    )


def with_dropout() -> nn.Module:
    layers = (nn.Linear(6, 9), nn.Dropout(0.5), nn.Tanh(), nn.Linear(9, 9), nn.Dropout(0.3), nn.Linear(9, 1))
    return nn.Sequential(*layers).double()


def test_random_numbers_do_not_depend_on_cuts_stages_or_recomputing() -> None:
    task = make(with_dropout)
    one = mh.fit(task, "pipeline stages=1", workers=1, steps=4)
    cut = mh.fit(task, "pipeline cuts=2", workers=2, steps=4)
    other = mh.fit(task, "pipeline cuts=4 schedule=gpipe recompute=yes", workers=2, steps=4)
    assert distance(cut.model.state_dict(), one.model.state_dict()) < 1e-12
    assert distance(other.model.state_dict(), one.model.state_dict()) < 1e-12


def test_run_goes_on_from_mirrored_and_to_single(tmp_path: Path) -> None:
    task = task_of("transformer")
    whole = mh.fit(task, "single", steps=6)
    mh.fit(task, "mirrored", workers=2, steps=2, out=tmp_path / "run")
    mh.fit(task, "pipeline stages=2", workers=2, steps=4, out=tmp_path / "run", resume=True)
    events = [
        event
        for role in read_run_events(tmp_path / "run" / "events").roles
        for event in to_events(role.records)
    ]
    computed = {event.microbatch for event in events if event.kind is EventKind.COMPUTE and event.step >= 2}
    assert {0, 1, 2, 3} <= computed, "who computes says at which micro-batch"
    assert {event.microbatch for event in events if event.kind is EventKind.WAIT and event.step >= 2} & {
        0,
        1,
        2,
        3,
    }
    ended = mh.fit(task, "single", steps=6, out=tmp_path / "run", resume=True)
    assert ended.summary["resumed_from_step"] == 4
    assert distance(ended.model.state_dict(), whole.model.state_dict()) < 1e-9
    again = mh.fit(task, "pipeline", workers=2, steps=6)
    assert distance(again.model.state_dict(), whole.model.state_dict()) < 1e-9
    assert not same_bits(whole.model.state_dict(), task.model().state_dict()), "it learned something"


def test_replicas_of_stages_of_slices_train_gpt_as_one_process() -> None:
    plain = gpt(GPTOptions(context=8, layers=2, width=8, heads=2, batch_size=8, evaluation_bytes=64))
    task = replace(plain, model=lambda: plain.model().double())
    alone = mh.fit(task, "single", steps=3)
    run = mh.fit(task, "pipeline microbatches=2 tensor=2", workers=8, steps=3)
    losses = [row["loss"] for row in run.history.steps]
    assert losses == pytest.approx([row["loss"] for row in alone.history.steps], rel=1e-9)
    assert run.summary["final"] == pytest.approx(alone.summary["final"], rel=1e-9)
    assert distance(run.model.state_dict(), alone.model.state_dict()) < 1e-9


class Deadly(nn.Module):
    """Kills its process at its `calls`-th call, and says when."""

    def __init__(self, calls: int, mark: Path) -> None:
        super().__init__()
        self._left, self._mark = calls, mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._left -= torch.is_grad_enabled()
        if not self._left:
            self._mark.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_killed_stage_is_named_with_its_microbatch_long_before_the_time_is_over(tmp_path: Path) -> None:
    mark = tmp_path / "killed"

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), Deadly(4 + 3, mark), nn.Linear(4, 1)).double()

    named = r"worker 1 .*was killed by SIGKILL.* last seen computing step 2, micro-batch 2 on stage 1, "
    with pytest.raises(WorkerFailed, match=named) as caught:
        mh.fit(
            make(model),
            "pipeline stages=3 schedule=gpipe",
            workers=3,
            steps=4,
            options=mh.Options(timeout_s=PATIENCE_S),
        )
    assert caught.value.worker_rank == 1
    assert time.monotonic() - float(mark.read_text()) < PATIENCE_S / 2, "by its end, not by a deadline"
