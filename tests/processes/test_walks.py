"""What one step passes: the files that docs/architecture.md names, and not more of them than a reader can follow."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.glove_task import GloveTask
from manyhands.workloads.glove.learning import GloveOptions, train_glove
from walks import Tracer, passed

MOST = {"mirrored": 14, "ps link=tcp": 20, "glove": 10}
"""Files with a call in every one of six steps, in the thread of a worker."""

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"

FIRST, LAST = 8, 13


def check(way: str, steps: list[list[str]]) -> None:
    files = passed(steps)
    (line,) = (
        line for line in PAGE.read_text().splitlines() if line.startswith("- **") and f"`{way}`" in line
    )
    assert set(re.findall(r"`([\w/]+\.py)`", line)) == set(files), " → ".join(f"`{name}`" for name in files)
    assert len(files) <= MOST[way]


@pytest.mark.parametrize("way", ["mirrored", "ps link=tcp"])
def test_a_step_passes_few_files(way: str, tmp_path: Path) -> None:
    tracers: dict[int, Tracer] = {}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if torch.is_grad_enabled():  # the trial before the first step is without
            process = os.getpid()
            if process not in tracers:
                tracers[process] = Tracer(tmp_path / f"{process}.json", FIRST, LAST)
            tracers[process].mark()
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
        loss=loss,
        data=(torch.randn(220, 5), torch.randn(220, 3)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=8,
    )
    mh.fit(task, strategy=way, workers=2, steps=20, options=mh.Options(progress="none"))
    traces = list(tmp_path.glob("*.json"))
    assert len(traces) == 2, "both workers"
    for trace in traces:
        check(way, json.loads(trace.read_text()))


def test_a_portion_of_glove_passes_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(2)
    records = np.empty(64_000, RECORD)
    for name in ("word", "context"):
        records[name] = drawn.integers(1, 100, len(records))
    records["count"] = 1 + drawn.random(len(records))
    records.tofile(tmp_path / "records.bin")
    tracer, portion = Tracer(tmp_path / "glove.json", FIRST, LAST), GloveTask.portion

    def marked(task: GloveTask, step: int) -> object:
        tracer.mark()
        return portion(task, step)

    monkeypatch.setattr(GloveTask, "portion", marked)
    train_glove(tmp_path / "records.bin", 100, GloveOptions(dim=4, passes=2))
    check("glove", json.loads((tmp_path / "glove.json").read_text()))
