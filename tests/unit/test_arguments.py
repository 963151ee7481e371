"""Arguments that do not exist, and functions that cannot be called as they will be: one sentence with the fix."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import UserError


def task(**changes: Any) -> mh.Task:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": lambda model, batch: model(batch).mean(),
        "data": torch.zeros(4, 2),
        "optimizer": torch.optim.SGD,
    }
    return mh.Task(**fields | changes)


@pytest.mark.parametrize(
    ("call", "report"),
    [
        (
            lambda: mh.Options(evaluate_evry=3),  # type: ignore[call-arg]
            "Options has no argument 'evaluate_evry'; did you mean 'evaluate_every'?",
        ),
        (
            lambda: mh.EarlyStopping(xyzzy=1),  # type: ignore[call-arg]
            "EarlyStopping has no argument 'xyzzy'; allowed: metric, patience, min_delta, mode",
        ),
        (
            lambda: mh.EarlyStopping("acc"),  # type: ignore[call-arg]
            "EarlyStopping takes its arguments by name; write EarlyStopping(metric='acc')",
        ),
        (lambda: task(metric={}), "Task has no argument 'metric'; did you mean 'metrics'?"),
        (
            lambda: mh.fit(task(), "single", step=3),  # type: ignore[call-arg]
            "fit has no argument 'step'; did you mean 'steps'?",
        ),
        (
            lambda: mh.fit(task(), "single", 2),  # type: ignore[call-arg]
            "fit takes its arguments by name; write fit(workers=2)",
        ),
        (
            lambda: task(loss=lambda m, x, y: nn.functional.mse_loss(m(x), y)),
            "loss takes (m, x, y), but it is called with (model, batch); unpack the batch inside it, "
            "as in: x, y = batch",
        ),
        (
            lambda: task(evaluation=torch.zeros(4, 2), metrics={"acc": lambda output, x, y: 1.0}),
            "metrics['acc'] takes (output, x, y), but it is called with (model, batch); unpack the "
            "batch inside it, as in: x, y = batch",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_to_write(call: Callable[[], object], report: str) -> None:
    with pytest.raises(UserError) as raised:
        call()
    assert str(raised.value) == report


def test_a_call_with_a_wrong_argument_is_a_type_error_as_anywhere_in_python() -> None:
    with pytest.raises(TypeError):
        mh.Options(evaluate_evry=3)  # type: ignore[call-arg]
    assert list(inspect.signature(mh.EarlyStopping).parameters) == ["metric", "patience", "min_delta", "mode"]


def test_any_function_that_can_be_called_is_a_loss() -> None:
    @functools.wraps(lambda model, x, y: None)
    def takes_apart(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).mean()

    class Scaled:
        def __call__(self, model: nn.Module, batch: Any, scale: float = 2.0) -> torch.Tensor:
            return scale * model(batch).mean()

    for loss in (
        takes_apart,
        Scaled(),
        functools.partial(Scaled(), scale=1.0),
        lambda *both: both[0](both[1]),
    ):
        assert task(loss=loss).loss is loss
