"""Whom a loss that is not finite is blamed on: the weights, the rate, or the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.engine.worker import Course, diagnose
from manyhands.errors import NonFinite


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    nn.init.constant_(model[1].weight, value)
    return model


GREW = Course(first=2.3, last=4e28)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_broke_are_reported_with_the_update_that_broke_them(value: float) -> None:
    said = diagnose(model_of(value), GREW, since="the update of step 6", clip=True)
    assert said == (
        "the weights are not finite since the update of step 6, the first in '1.weight', and the loss had grown from "
        "2.3 to 4e+28; lower the learning rate or clip the gradient (Task(clip_norm=1.0))"
    )
    assert "initial weights" in diagnose(model_of(value), Course())


@pytest.mark.parametrize(("weight", "course"), [(1e20, Course(first=2.3, last=2.4)), (0.5, GREW)])
def test_a_run_that_diverges_is_told_to_lower_the_rate(weight: float, course: Course) -> None:
    said = diagnose(model_of(weight), course, since="the update of step 6")
    assert "the loss is the first value that is not finite: training diverges" in said
    assert said.endswith("; lower the learning rate")


def test_the_batch_and_the_loss_are_looked_at_last() -> None:
    said = diagnose(model_of(0.9), Course(first=2.3, last=2.1), what="gradient", since="the update of step 6")
    assert said.startswith(
        "the gradient is the first value that is not finite: the weights are finite, up to 0.9 ('1.weight'); check"
    )


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_a_huge_rate_is_not_blamed_on_the_loss_function(rate: float) -> None:
    """Float32 overflows in the loss (squares of 1e20) before any weight does, or in the weights at once."""
    generator = torch.Generator().manual_seed(0)
    task = mh.Task(
        model=lambda: nn.Linear(4, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        batch_size=16,
    )
    with pytest.raises(
        NonFinite, match=r"lower the learning rate or clip the gradient \(Task\(clip_norm=1.0\)\)"
    ) as report:
        mh.fit(task, "single", steps=40)
    assert "divisions" not in str(report.value)
    with pytest.raises(NonFinite, match="lower the learning rate;"):
        mh.fit(replace(task, clip_value=1e30), "single", steps=40)
