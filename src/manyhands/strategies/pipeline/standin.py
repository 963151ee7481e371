"""The model as a task's `loss` and metrics see it on a worker that has only some of its layers.

The first stage calls `loss(model, batch)` with a stand-in that captures the input and ends the call there. The last
stage calls it with a stand-in that returns the output, whatever its input, so that the loss continues from it. What
the loss does before it calls the model is done on both stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, NoReturn

from torch import nn

from manyhands.errors import UserError

__all__ = ["GivesOutput", "TakesInput", "input_of"]

_NOT_HERE: Final = (
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "modules",
    "named_modules",
    "children",
    "named_children",
    "state_dict",
    "load_state_dict",
    "get_parameter",
    "get_submodule",
    "train",
    "eval",
    "to",
    "apply",
    "zero_grad",
    "requires_grad_",
)


class _Left(BaseException):
    """Ends the call of a loss; a BaseException, so that no `except Exception` in user code stops it."""


class _StandIn(nn.Module, ABC):
    """Base of the stand-ins: they can be called with one input, and refuse every other use of a model."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._called = False
        for name in _NOT_HERE:
            object.__setattr__(self, name, _Refusing(what, name))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Stand in for the model's forward; UserError unless there is exactly one positional input."""
        if len(inputs) != 1 or named:
            raise UserError(
                f"{self._what} calls the model with several inputs, or with named ones; a model that is cut into "
                "stages takes one, its first layer's: model(input)"
            )
        return self._take(inputs[0])

    def __getitem__(self, place: Any) -> NoReturn:
        _refuse(self._what, f"[{place!r}]")

    def __iter__(self) -> NoReturn:
        _refuse(self._what, "its layers")

    def __len__(self) -> NoReturn:
        _refuse(self._what, "len()")

    def __bool__(self) -> bool:
        return True

    @abstractmethod
    def _take(self, given: Any) -> Any:
        """Handle the one input that the model is called with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self._what, name)


class TakesInput(_StandIn):
    """Stand-in on the first stage: keeps the input that the model is called with, and ends the call."""

    def __init__(self, what: str = "task.loss") -> None:
        super().__init__(what)
        self.input: Any = None

    def _take(self, given: Any) -> NoReturn:
        self.input, self._called = given, True
        raise _Left


class GivesOutput(_StandIn):
    """Stand-in on the last stage: returns the output; UserError where it is called twice."""

    def __init__(self, output: Any, what: str = "task.loss") -> None:
        super().__init__(what)
        self.output = output

    def _take(self, given: Any) -> Any:
        del given
        if self._called:
            raise UserError(
                f"{self._what} calls the model twice; a model that is cut into stages is gone through once for a "
                "batch: call it once, on all inputs together"
            )
        self._called = True
        return self.output

    @property
    def called(self) -> bool:
        """Whether the loss called the model."""
        return self._called


def input_of(function: Callable[[nn.Module, Any], Any], batch: Any, what: str = "task.loss") -> Any:
    """What `function(model, batch)` calls the model with; UserError where it does not call it."""
    taker = TakesInput(what)
    try:
        function(taker, batch)
    except _Left:
        return taker.input
    raise UserError(
        f"{what} never calls the model; a model that is cut into stages has to be called once for a batch: model(input)"
    )


class _Refusing:
    """A method that a model has and its stand-in refuses."""

    def __init__(self, what: str, name: str) -> None:
        self._what, self._name = what, name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._what, self._name)


def _refuse(what: str, name: str) -> NoReturn:
    raise UserError(
        f"{what} asks the model for {name!r}; under `pipeline` no worker has the whole model, so it can only be "
        "called: model(input)"
    )
