"""Both ends of a chain as the task defines them: the first layer's input, and the loss of the last one's output."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor

from manyhands.data.randomness import mix, seed_all
from manyhands.data.shares import Microbatch, Share
from manyhands.engine.computing import Computer
from manyhands.errors import UserError
from manyhands.strategies.pipeline.standin import GivesOutput, input_of
from manyhands.task import Metric

__all__ = ["MeasureEnds", "TrainingEnds"]

_TASK: Final = 0  # takes the place of a module: seeds what the task's functions draw
_EVALUATION: Final = 0x45


class TrainingEnds:
    """The ends for one data part's share of one global batch: a micro-batch is a piece of the share.

    Random numbers follow from (seed, step, data part, micro-batch, place in the chain). So they are the same wherever
    the chain is cut, and when forward is run again.
    """

    def __init__(self, computer: Computer, share: Share, step: int, part: int) -> None:
        self._computer = computer
        self._share = share
        self._seed = mix(computer.plan.seed, step, part)
        self._batches: dict[int, Any] = {}
        self._pending: tuple[Callable[[], float], float] | None = None
        self._loss = 0.0
        self.input_ns = 0
        """Nanoseconds spent fetching samples."""

    def computing(self) -> AbstractContextManager[object]:
        """The context (mixed precision) in which modules are applied."""
        return self._computer.precision()

    def begin(self, microbatch: int, place: int) -> None:
        """Seed the random generators for the module at this place in the chain."""
        seed_all(mix(self._seed, microbatch, place + 1))

    def prepare(self, microbatch: int) -> None:
        """Fetch the samples of a micro-batch, unless they were fetched already."""
        if microbatch not in self._batches:
            begin_ns = time.monotonic_ns()
            self._seed_task(microbatch)
            self._batches[microbatch] = self._computer.fetch(self._share.pieces[microbatch])
            self.input_ns += time.monotonic_ns() - begin_ns

    def input(self, microbatch: int) -> Any:
        """The input that the task's loss calls the model with."""
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
        require_call(model, "task.loss")
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
        """The context (mixed precision) in which modules are applied."""
        return self._computer.precision()

    def begin(self, microbatch: int, place: int) -> None:
        """Seed the random generators for the module at this place in the chain."""
        del microbatch
        seed_all(mix(self._seed, place + 1))

    def prepare(self, microbatch: int) -> None:
        """Nothing to do: a batch is fetched where it is used."""

    def input(self, microbatch: int) -> Any:
        """The input that the measure calls the model with."""
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
        require_call(model, self._what)
        return value * self._piece.samples


def require_call(model: GivesOutput, what: str) -> None:
    """Raise UserError where a function returned without calling the model."""
    if not model.called:
        raise UserError(
            f"{what} did not call the model this time; call it once for every batch: model(input)"
        )
