"""A loss that is a sum, where batches are split: rejected in the first step, or said to be one and trained as in one
process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from equality import distance
from manyhands.errors import UserError

WAYS = {
    "mirrored": 2,
    "allreduce algorithm=ring": 3,
    "allreduce elastic=yes": 2,
    "central": 2,
    "sharded": 2,
    "ps servers=2": 2,
    "pipeline stages=2 microbatches=3": 2,
    "tensor data=2": 4,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def summed(made: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(made(batch[0]), batch[1], reduction="sum") / 20


def train(way: str, workers: int, reduction: str) -> mh.Run:
    generator = torch.Generator().manual_seed(2)
    task = mh.Task(
        model=model,
        loss=summed,
        reduction=reduction,
        data=tuple(torch.randn(22, n, generator=generator, dtype=torch.float64) for n in (5, 3)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        batch_size=7,
    )
    return mh.fit(task, strategy=way, workers=workers, steps=5, options=mh.Options(progress="none"))


@pytest.mark.parametrize(("way", "workers"), WAYS.items())
def test_a_sum_is_rejected_unless_it_is_said_to_be_one(way: str, workers: int) -> None:
    with pytest.raises(
        UserError, match=r"task\.loss is the sum over a batch.* or give Task\(reduction='sum'\)"
    ):
        train(way, workers, "mean")
    alone, together = train("single", 1, "sum"), train(way, workers, "sum")
    assert distance(dict(together.model.state_dict()), dict(alone.model.state_dict())) < 1e-12
    assert together.history.loss == pytest.approx(alone.history.loss, rel=1e-12)
