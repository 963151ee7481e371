"""Both ends of a chain as the task defines them: the first layer's input, and the loss of the last one's output.

A worker has only some of the model's layers, and the task's `loss` and metrics see a stand-in for it. The first stage
calls `loss(model, batch)` with a stand-in that captures the input and ends the call there. The last stage calls it with
a stand-in that returns the output, whatever its input, so that the loss continues from it. What the loss does before it
calls the model is done on both stages.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NoReturn

from torch import Tensor, nn

from manyhands.data.batches import Microbatch, Share
from manyhands.data.randomness import mix, seed_all
from manyhands.engine.computing import Computer
from manyhands.errors import UserError
from manyhands.task import Metric

__all__ = ["MeasureEnds", "TrainingEnds", "input_of"]

_NOT_HERE: Final = (
    *("parameters", "buffers", "modules", "children", "state_dict", "load_state_dict", "get_parameter"),
    *("named_parameters", "named_buffers", "named_modules", "named_children", "get_submodule"),
    *("train", "eval", "to", "apply", "zero_grad", "requires_grad_"),
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
            object.__setattr__(self, name, partial(_refuse, what, name))

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

    def require_call(self) -> None:
        if not self._called:
            raise UserError(
                f"{self._what} did not call the model this time; call it once for every batch: model(input)"
            )


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


def _refuse(what: str, name: str, *_: Any, **__: Any) -> NoReturn:
    raise UserError(
        f"{what} asks the model for {name!r}; under `pipeline` no worker has the whole model, so it can only be "
        "called: model(input)"
    )


_TASK: Final = 0  # takes the place of a module: seeds what the task's functions draw
_EVALUATION: Final = 0x45


class TrainingEnds:
    """The ends for one data part's share of one global batch: a micro-batch is a piece of the share.

    Random numbers follow from (seed, step, data part, micro-batch, place in the chain). So they are the same wherever
    the chain is cut, and when forward is run again.
    """

    def __init__(self, computer: Computer, share: Share, step: int, part: int) -> None:
        self._computer, self._share = computer, share
        self._seed = mix(computer.plan.seed, step, part)
        self._batches: dict[int, Any] = {}
        self._pending: tuple[Callable[[], float], float] | None = None
        self._loss = 0.0
        self.input_ns = 0
        """Nanoseconds spent fetching samples."""

    def computing(self) -> AbstractContextManager[object]:
        return self._computer.precision()

    def begin(self, microbatch: int, place: int) -> None:
        seed_all(mix(self._seed, microbatch, place + 1))

    def prepare(self, microbatch: int) -> None:
        if microbatch not in self._batches:
            begin_ns = time.monotonic_ns()
            self._seed_task(microbatch)
            self._batches[microbatch] = self._computer.fetch(self._share.pieces[microbatch])
            self.input_ns += time.monotonic_ns() - begin_ns

    def input(self, microbatch: int) -> Any:
        self.prepare(microbatch)
        self._seed_task(microbatch)
        with self._computer.precision():
            return input_of(self._computer.task.loss, self._batches[microbatch])

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """The task's loss for this output, times the micro-batch's weight in the global batch."""
        self.prepare(microbatch)
        piece = self._share.pieces[microbatch]
        model = GivesOutput(output)
        self._seed_task(microbatch)
        loss = self._computer.loss(model, self._batches.pop(microbatch), piece, self._share)
        model.require_call()
        self._collect()
        self._pending = self._computer.reader.ask(loss), piece.weight
        return loss * (piece.weight * self._share.weight)

    def mean_loss(self) -> float:
        """Mean loss over the share, from the micro-batches whose loss was computed here; 0 where none was."""
        self._collect()
        return self._loss

    def _collect(self) -> None:
        if self._pending is not None:
            answer, weight = self._pending
            self._loss += answer() * weight
            self._pending = None

    def _seed_task(self, microbatch: int) -> None:
        seed_all(mix(self._seed, microbatch, _TASK))


class MeasureEnds:
    """The ends for one batch of evaluation data and one measure."""

    def __init__(
        self, computer: Computer, number: int, piece: Microbatch, measure: tuple[str, Metric]
    ) -> None:
        self._computer = computer
        self._seed = mix(computer.plan.seed, _EVALUATION, number)
        self._piece = piece
        self._name, self._function = measure
        self._what = "task.loss" if self._name == "evaluation_loss" else f"task.metrics[{self._name!r}]"

    def computing(self) -> AbstractContextManager[object]:
        return self._computer.precision()

    def begin(self, microbatch: int, place: int) -> None:
        del microbatch
        seed_all(mix(self._seed, place + 1))

    def prepare(self, microbatch: int) -> None:
        """Nothing to do: a batch is fetched where it is used."""

    def input(self, microbatch: int) -> Any:
        del microbatch
        seed_all(self._seed)
        batch = self._computer.fetch(self._piece)
        with self._computer.precision():
            return input_of(self._function, batch, self._what)

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """Never called: an evaluation has no backward pass."""
        del microbatch, output
        raise AssertionError("an evaluation has no backward")

    def measured(self, output: Any) -> float:
        """The measure of the last part's output, times the number of samples."""
        seed_all(self._seed)
        batch = self._computer.fetch(self._piece)
        model = GivesOutput(output, self._what)
        with self._computer.precision():
            value = float(self._function(model, batch))
        model.require_call()
        return value * self._piece.samples
