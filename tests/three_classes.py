"""A small task of three classes, for tests of what `fit` does around its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def task(**fields: Any) -> mh.Task:
    defaults: dict[str, Any] = {
        "model": network,
        "loss": loss,
        "data": samples(60, 1),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        "evaluation": samples(37, 9),  # of 4 batches, the last is short; not divisible by the workers
        "batch_size": 12,
    }
    return mh.Task(**{**defaults, **fields})
