"""A live server and one worker take the steps of the plain loop, whatever link, policy and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from threaded_ps import ThreadedRun, job_for

STEPS, SAMPLES, BATCH = 12, 24, 4
DATA = torch.linspace(-1, 1, SAMPLES * 5).view(SAMPLES, 5)
WEIGHTS = torch.linspace(-0.5, 0.5, 15).view(3, 5)


class Scores(nn.Module):
    """A layer whose weights nobody draws: threads share the generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHTS.clone())
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.weight.T + self.bias


def task(optimizer: Any) -> mh.Task:
    return mh.Task(
        model=Scores,
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        data=DATA,
        optimizer=optimizer,
        batch_size=BATCH,
    )


@pytest.mark.parametrize(
    "strategy", ["ps consistency=async", "ps link=tcp", "ps consistency=bounded:2 link=tcp"]
)
@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)],
    ids=["sgd", "adam"],
)
def test_one_worker_trains_as_the_plain_loop(strategy: str, optimizer: Any) -> None:
    with ThreadedRun(job_for(task(optimizer), strategy, steps=STEPS, workers=1)) as run:
        run.start_workers()
        run.await_joined(2)
        run.publish(1, (1,))
        model = run.finish()
    expected = mh.fit(task(optimizer), "single", steps=STEPS).model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
