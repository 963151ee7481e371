"""Samples with weights: the mean by weight over the global batch, however it is split."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import manyhands as mh
from equality import distance, same_bits, train_in_threads, train_plainly
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroupFiles
from ways import connect

STEPS = 6
GENERATOR = torch.Generator().manual_seed(8)
X = torch.randn(26, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (26,), generator=GENERATOR)
WEIGHTS = torch.rand(26, generator=GENERATOR, dtype=torch.float64) * 3
WEIGHTS[:9] = 0  # a third of the batch, where it is not shuffled
MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def losses(model: nn.Module, batch: Any) -> Tensor:
    """One per sample."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def task(**changes: Any) -> mh.Task:
    settings: dict[str, Any] = {
        "model": lambda: copy.deepcopy(MODEL),
        "loss": losses,
        "data": (X, Y),
        "weights": WEIGHTS,
        "optimizer": optimizer,
        "batch_size": 26,
    }
    return mh.Task(**{**settings, **changes})


def plain_loop(weights: Tensor = WEIGHTS) -> tuple[dict[str, Tensor], list[float]]:
    """What a user writes without us: all samples in every step."""
    model, history = copy.deepcopy(MODEL), []
    stepper = optimizer(model.parameters())
    for _ in range(STEPS):
        stepper.zero_grad()
        loss = (losses(model, (X, Y)) * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.step()
        history.append(loss.item())
    return model.state_dict(), history


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("way", "world"), [("single", 1), ("mirrored", 3), ("central", 3), ("local steps=1", 1)]
)
def test_the_weights_of_the_plain_loop(way: str, world: int, microbatches: int) -> None:
    with SharedGroupFiles.create(world) as files:
        mine = task(microbatches=microbatches)
        found = train_in_threads(mine, world, lambda rank: connect(way, files, rank), STEPS)
    expected, _ = plain_loop()
    assert max(distance(one, expected) for one in found) < 1e-9
    assert all(same_bits(one, found[0]) for one in found)
    assert distance(expected, plain_loop(torch.ones(26, dtype=torch.float64))[0]) > 1e-3, "they matter"


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize(
    ("strategy", "workers", "microbatches"),
    [("single", 1, 1), ("ps servers=2", 2, 3), ("hogwild order=turns", 2, 2)],
)
def test_the_history_has_the_mean_by_weight_whoever_steps(
    strategy: str, workers: int, microbatches: int
) -> None:
    run = mh.fit(task(microbatches=microbatches), strategy, workers=workers, steps=STEPS)
    expected, history = plain_loop()
    assert distance(run.model.state_dict(), expected) < 1e-9
    assert run.history.loss == pytest.approx(history, rel=1e-9)


def test_batches_that_divide_by_nothing_have_their_own_mean_each() -> None:
    """Workers of which one has only samples without weight, in batches drawn by chance."""
    small = task(batch_size=7, weights=WEIGHTS.numpy())
    with SharedGroupFiles.create(4) as files:
        found = train_in_threads(small, 4, lambda rank: connect("mirrored", files, rank), 12)
    assert max(distance(one, train_plainly(small, 12)) for one in found) < 1e-9


def test_a_weight_of_three_is_three_samples() -> None:
    counts = torch.arange(26) % 4
    repeated = torch.repeat_interleave(torch.arange(26), counts)
    thrice = task(
        data=(X[repeated], Y[repeated]),
        weights=None,
        batch_size=len(repeated),
        loss=lambda model, batch: losses(model, batch).mean(),
    )
    assert distance(train_plainly(task(weights=counts), STEPS), train_plainly(thrice, STEPS)) < 1e-9


def test_samples_of_an_evaluation_all_weigh_the_same() -> None:
    run = mh.fit(task(evaluation=(X, Y)), "single", steps=1)
    with torch.no_grad():
        expected = float(losses(run.model, (X, Y)).mean())
    assert run.summary["final"]["evaluation_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("bad", "report"),
    [
        (
            [1.0, 2.0],
            r"weights has the shape \(2,\); weights must be one number of at least 0 for each of the 26",
        ),
        (np.full(26, -1.0), r"weights\[0\] is -1; weights must be one number"),
        ([1.0] * 25 + [float("nan")], r"weights\[25\] is nan"),
        ("heavy", r"weights is a str; weights must be one number"),
        (torch.zeros(26), "weights are all 0"),
    ],
)
def test_weights_that_are_none_are_refused(bad: Any, report: str) -> None:
    with pytest.raises(UserError, match=report):
        task(weights=bad)


def test_what_makes_no_sense_is_refused() -> None:
    mean = task(loss=lambda model, batch: losses(model, batch).mean())
    with pytest.raises(
        UserError, match=r"a tensor of shape \(\); with task\.weights return one loss for each of the 26"
    ):
        mh.fit(mean, "single", steps=1)
    alone = torch.zeros(26)
    alone[3] = 1
    with pytest.raises(UserError, match=r"weights: all samples of batch \d have weight 0"):
        mh.fit(task(weights=alone, batch_size=5), "single", steps=6)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(UserError, match="weights need data with indices"):
        task(data=Stream())
