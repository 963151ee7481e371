"""What a task's functions return is checked where it is used, and told in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh


def task(loss: Callable[[nn.Module, Tensor], Any]) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Linear(2, 1),
        loss=loss,
        data=torch.ones(8, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


@pytest.mark.parametrize(
    ("loss", "report"),
    [
        (lambda model, batch: 0.5, "returned a float; return a tensor with one number"),
        (lambda model, batch: None, "returned a NoneType; return a tensor with one number"),
        (lambda model, batch: model(batch), r"returned a tensor of shape \(4, 1\); return one number"),
        (lambda model, batch: model(batch).mean().detach(), "that depends on no parameter"),
        (lambda model, batch: torch.tensor(0.5), "that depends on no parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_told_in_a_sentence(loss: Any, report: str) -> None:
    with pytest.raises(mh.UserError, match=report) as caught:
        mh.fit(task(loss), "single", steps=1)
    assert "\n" not in str(caught.value)


def test_one_number_may_have_a_dimension() -> None:
    plain = mh.fit(task(lambda model, batch: model(batch).square().mean()), "single", steps=3)
    shaped = mh.fit(task(lambda model, batch: model(batch).square().mean().reshape(1)), "single", steps=3)
    assert shaped.history.loss == plain.history.loss
