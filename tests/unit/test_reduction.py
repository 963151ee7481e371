"""A loss that is a sum is found by comparing parts with the whole; what is neither sum nor mean is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import manyhands as mh
from equality import distance, train, train_plainly
from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import SingleExchange, WorkerPart
from manyhands.errors import UserError

Loss = Callable[[nn.Module, Any], Tensor]
GENERATOR = torch.Generator().manual_seed(4)
X, Y = (torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
LENGTHS = torch.randint(1, 6, (24,), generator=GENERATOR)


class Mixed(nn.Module):
    """Batch norm and dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 5)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.norm(self.first(x))))


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum(dim=1)


def contrast(model: nn.Module, batch: Any) -> Tensor:
    one, other = (F.normalize(model(x)) for x in (batch[0], batch[1]))
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def constant_contrast(model: nn.Module, batch: Any) -> Tensor:
    """As a contrastive loss begins: the logarithm of the batch's size."""
    return F.cross_entropy(
        model(batch[0])[:, :1] @ torch.zeros(1, len(batch[0]), dtype=X.dtype), torch.arange(len(batch[0]))
    )


def per_token(model: nn.Module, batch: Any) -> Tensor:
    mask = torch.arange(5) < batch[2][:, None]
    return ((model(batch[0]) - batch[1]).square() * mask).sum() / mask.sum()


def penalised(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch).mean() + sum(one.square().sum() for one in model.parameters())


def only_in_training(model: nn.Module, batch: Any) -> Tensor:
    assert model.training
    return squares(model, batch).mean()


def of_gradients(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y - batch[1]).square().mean() + slope.square().mean()


def task_of(loss: Loss, **fields: Any) -> mh.Task:
    return mh.Task(
        **{
            "model": Mixed,
            "loss": loss,
            "data": (X, Y, LENGTHS),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            "batch_size": 12,
            "microbatches": 2,
            **fields,
        }
    )


SUMS: dict[str, Loss] = {
    "a sum": lambda model, batch: squares(model, batch).sum(),
    "a sum, scaled": lambda model, batch: 1e-6 * squares(model, batch).sum(),
    "a sum below zero": lambda model, batch: -squares(model, batch).sum(),
}
OTHERS: dict[str, Loss] = {
    "a mean": lambda model, batch: squares(model, batch).mean(),
    "a root of a mean": lambda model, batch: squares(model, batch).mean().sqrt(),
    "contrastive": contrast,
    "contrastive, at its start": constant_contrast,
    "by tokens, of which samples have unevenly many": per_token,
    "with a penalty": penalised,
    "of no size": lambda model, batch: squares(model, batch).mean() * 0,
    "only in training": only_in_training,
    "with a gradient in it": of_gradients,
}


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 6, 12, 24])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_rejected_with_the_fix(name: str, batch_size: int) -> None:
    with pytest.raises(
        UserError,
        match=r"task\.loss is the sum .*reduction='mean' in the loss, or give Task\(reduction='sum'\)",
    ):
        train_plainly(task_of(SUMS[name], batch_size=batch_size), 1)


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 6, 12, 24])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum_is_trained(name: str, batch_size: int) -> None:
    microbatches = 2 if batch_size > 3 else 1  # batch norm wants two samples at once
    task = task_of(OTHERS[name], batch_size=batch_size, microbatches=microbatches)
    train(task, Splitting(), 1)


class Splitting(SingleExchange):
    """One worker, who says that batches are split whether they are or not."""

    part = WorkerPart(index=0, count=2)

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        return computer.compute(model, step, 0, 1, self.backward)


class Stream(IterableDataset[Any]):
    """Gives other samples in each pass."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(20):
            yield tuple(torch.randn(5, generator=self.generator, dtype=torch.float64) for _ in range(2))


def test_a_stream_is_tried_and_is_not_used_up() -> None:
    with pytest.raises(UserError, match=r"task\.loss is the sum"):
        train_plainly(task_of(SUMS["a sum"], data=Stream()), 1)
    tried, untried = (
        train(task_of(OTHERS["a mean"], data=Stream(), microbatches=1), exchange, 3)
        for exchange in (Splitting(), SingleExchange())
    )
    assert distance(tried, untried) == 0


def test_a_trial_changes_no_buffer_and_no_draw() -> None:
    class Counting(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    task = task_of(OTHERS["a mean"], model=Counting, microbatches=1)
    tried, untried = (train(task, exchange, 3) for exchange in (Splitting(), SingleExchange()))
    assert distance(tried, untried) == 0
    assert float(tried["calls"]) == 3


def test_where_nothing_is_split_nothing_is_tried() -> None:
    train_plainly(task_of(SUMS["a sum"], microbatches=1), 1)


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_a_sum_that_is_said_to_be_one_is_trained_as_without_a_split(microbatches: int) -> None:
    def linear() -> nn.Module:
        return nn.Linear(5, 5, dtype=torch.float64)

    tasks = [
        task_of(SUMS["a sum"], model=linear, reduction="sum", microbatches=count)
        for count in (1, microbatches)
    ]
    whole, split = (train_plainly(task, 5) for task in tasks)
    assert distance(split, whole) < 1e-12


def test_a_mean_that_is_said_to_be_a_sum_is_rejected() -> None:
    with pytest.raises(
        UserError, match=r"task\.reduction is 'sum', but task\.loss is the mean .*leave reduction out"
    ):
        train_plainly(task_of(OTHERS["a mean"], reduction="sum"), 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"reduction": "total"}, "reduction is 'total'; it must be 'mean' or 'sum'"),
        ({"reduction": "sum", "weights": torch.ones(24)}, "reduction is 'sum', but with weights"),
    ],
)
def test_a_reduction_that_makes_no_sense_is_rejected(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        task_of(SUMS["a sum"], **fields)
