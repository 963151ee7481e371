"""`local` through the commands: trained in two parts with `--resume`, and watched as it ended."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from commands import run_command
from equality import same_bits
from manyhands.data.batches import BatchPlan
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import WorkerFailed
from manyhands.workloads.tasks import build
from watched import watched


def test_a_run_resumed_by_command_ends_like_an_uninterrupted_one_and_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, strategy = tmp_path / "run", "local steps=3"
    command = ["train", "digits", "--strategy", strategy, "--workers", "2", "--out", str(run)]
    for part in (["--steps", "6"], ["--steps", "13", "--resume", "--json", str(tmp_path / "s.json")]):
        assert run_command(monkeypatch, *command, *part) == 0, capfd.readouterr().err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["strategy"], summary["resumed_from_step"], summary["steps"]) == (strategy, 6, 13)
    kept = RunDirectory.open(run, lock=False).checkpoints().load(13)
    whole = mh.fit(build("digits"), strategy, workers=2, steps=13)
    assert same_bits(kept.model, whole.model.state_dict())

    page = watched(run)
    assert strategy in page
    assert "13 of 13" in page


def squares() -> mh.Task:
    x = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x.sum(1, keepdim=True)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch_size=12,
    )


@pytest.mark.parametrize("link", ["shared", "tcp codec=int4"])
def test_a_worker_killed_while_a_fragment_is_under_way_changes_no_bit_of_the_resumed_run(
    link: str, tmp_path: Path
) -> None:
    """Fragment 0 is sent after step 9 and merged after step 10, in which worker 1 dies; the checkpoint is of step 8."""
    strategy = f"local steps=4 outer=nesterov fragments=2 overlap=1 link={link}"
    task, died = squares(), tmp_path / "died"
    marked = task.data[0][int(BatchPlan(240, 12, 0).share(9, 1, 2)[0])]

    def deadly(model: nn.Module, batch: Any) -> torch.Tensor:
        if bool((batch[0] == marked).all(1).any()) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task.loss(model, batch)

    asked: dict[str, Any] = {"workers": 2, "steps": 18, "out": tmp_path / "run"}
    options = mh.Options(checkpoint_every=4)
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        mh.fit(replace(task, loss=deadly), strategy, options=options, **asked)
    resumed = mh.fit(task, strategy, options=options, resume=True, **asked)
    assert resumed.summary["resumed_from_step"] == 8
    whole = mh.fit(task, strategy, workers=2, steps=18)
    assert same_bits(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
