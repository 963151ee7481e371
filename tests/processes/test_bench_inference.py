"""The benchmark of trained models: workers that begin together, and tell how long each batch took."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.lab.bench.inference import _measured, _work, run_bench
from manyhands.task import Task


def test_workers_compute_for_the_time_they_were_given() -> None:
    model, inputs = nn.Linear(4, 2), torch.rand(8, 4)
    job = partial(_work, model=model, inputs=inputs, precision="fp32", batch=2, seconds=0.1)
    found = _measured(2, job, 0.1)
    assert set(found) == {"inputs_per_s", "p50_ms", "p95_ms"}
    assert 0 < found["p50_ms"] <= found["p95_ms"]
    assert found["inputs_per_s"] > 0


class Pairs(nn.Linear):
    """Gives two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x


pairs = Task(
    name="pairs",
    model=lambda: Pairs(4, 2),
    loss=lambda model, batch: model(batch)[0].square().mean(),
    data=torch.rand(8, 4),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)


def test_a_model_that_gives_several_tensors_gets_a_sentence() -> None:
    with pytest.raises(UserError, match="task 'pairs': its model gives a tuple; models of one tensor"):
        run_bench([f"{Path(__file__)}:pairs"], ["fp32"], [1], [1], seconds=0.05)
