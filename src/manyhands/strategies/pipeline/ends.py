"""Both ends of a chain as the task defines them: the first layer's input, and the loss of the last one's output.

A worker has only some of the model's layers, and the task's `loss` and metrics see a stand-in for it. The first stage
calls `loss(model, batch)` with a stand-in that captures the input and ends the call there, and so does any other stage
whose modules take inputs by name. The last stage calls it with a stand-in that returns the output, whatever its input,
so that the loss continues from it. What the loss does before it calls the model is done on all these stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NoReturn, Protocol

from torch import Tensor, nn

from manyhands.data.batches import Microbatch, Share
from manyhands.data.randomness import mix, seed_all
from manyhands.engine.chain import ChainCall, names_taken
from manyhands.engine.computing import Computer
from manyhands.errors import UserError

_NOT_HERE: Final = (
    *("parameters", "buffers", "modules", "children", "state_dict", "load_state_dict", "get_parameter"),
    *("named_parameters", "named_buffers", "named_modules", "named_children", "get_submodule"),
    *("train", "eval", "to", "apply", "zero_grad", "requires_grad_"),
)


class _Left(BaseException):
    """Ends the call of a loss; a BaseException, so that no `except Exception` in user code stops it."""

    def __init__(self, call: ChainCall) -> None:
        self.call = call


class StandIn(nn.Module):
    """Stands in for the model: can be called with one input and others by name, and refuses every other use of a model.

    On the last stage it returns `output`, once. With `leaves` it is that of the first stage, and ends the call.
    """

    def __init__(self, what: str = "task.loss", output: Any = None, *, leaves: bool = False) -> None:
        super().__init__()
        self._what, self._output, self._leaves = what, output, leaves
        self._called = False
        for name in _NOT_HERE:  # `_refuse` is not a method: a cycle would keep the output
            object.__setattr__(self, name, partial(_refuse, what, name))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Stand in for the model's forward; UserError unless there is exactly one positional input."""
        if len(inputs) != 1:
            raise UserError(
                f"{self._what} calls the model with {len(inputs)} inputs without a name; a model that is cut into "
                "stages takes one, and others by name: model(input, mask=mask)"
            )
        if self._leaves:
            raise _Left(ChainCall(inputs[0], named))
        if self._called:
            raise UserError(
                f"{self._what} calls the model twice; a model that is cut into stages must be called once per "
                "batch, on all inputs together"
            )
        self._called = True
        return self._output

    def __getitem__(self, place: Any) -> NoReturn:
        _refuse(self._what, f"[{place!r}]")

    def __iter__(self) -> NoReturn:
        _refuse(self._what, "its layers")

    def __len__(self) -> NoReturn:
        _refuse(self._what, "len()")

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self._what, name)

    def require_call(self) -> None:
        if not self._called:
            raise UserError(
                f"{self._what} did not call the model for this batch; call it once for every batch: model(input)"
            )


def _refuse(what: str, name: str, *_: Any, **__: Any) -> NoReturn:
    raise UserError(
        f"{what} reads {name!r} of the model; under `pipeline` no worker has the complete model, so it can only be "
        "called: model(input)"
    )


class NamesGiven:
    """What losses and metrics give the model by name: the same in every batch, so that not all stages need to ask."""

    def __init__(self, chain: Sequence[nn.Module]) -> None:
        self._taken = frozenset(name for module in chain for name in names_taken(module))
        self._given: dict[str, frozenset[str]] = {}

    def check(self, what: str, given: frozenset[str]) -> None:
        """UserError for a name that no module takes, and where other names were given before."""
        ignored = sorted(given - self._taken)
        if ignored:
            raise UserError(
                f"{what} gives the model {ignored[0]!r}, which no module of its chain takes; name it in the forward of "
                "those that need it"
            )
        before = self._given.setdefault(what, given)
        if before != given:
            name = min(before ^ given)
            raise UserError(f"{what} gives the model {name!r} for some batches only; give it for all of them")

    def has_none(self, what: str) -> bool:
        """Whether it is known to give none."""
        return self._given.get(what) == frozenset()


def call_of(
    function: Callable[[nn.Module, Any], Any],
    batch: Any,
    what: str = "task.loss",
    names: NamesGiven | None = None,
) -> ChainCall:
    """What `function(model, batch)` calls the model with; UserError where it does not, or gives other `names`."""
    try:
        function(StandIn(what, leaves=True), batch)
    except _Left as left:
        if names is not None:
            names.check(what, frozenset(left.call.named))
        return left.call
    raise UserError(
        f"{what} never calls the model; a model that is cut into stages must be called once per batch: model(input)"
    )


class ChainEnds(Protocol):
    """The ends of a chain for one batch that flows through it in micro-batches."""

    @property
    def computing(self) -> Callable[[], AbstractContextManager[object]]:
        """The context in which modules are applied."""

    def begin(self, microbatch: int, place: int) -> None:
        """Seed the random generators before a module of the chain is applied to a micro-batch."""

    def prepare(self, microbatch: int) -> None:
        """Have the samples of the micro-batch at hand."""

    def input(self, microbatch: int) -> Any:
        """What the first module is applied to."""

    def named(self, microbatch: int) -> Mapping[str, Any]:
        """The inputs of the model that are given by name."""

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """The loss for the last module's output, weighted."""


_TASK: Final = 0  # takes the place of a module: seeds what the task's functions draw
_EVALUATION: Final = 0x45


class TrainingEnds:
    """The ends for one data part's share of one global batch: a micro-batch is a piece of the share.

    Random numbers follow from (seed, step, data part, micro-batch, place in the chain). So they are the same wherever
    the chain is cut, and when forward is run again.
    """

    def __init__(
        self, computer: Computer, share: Share, step: int, part: int, names: NamesGiven | None = None
    ) -> None:
        self._computer, self._share, self._names = computer, share, names
        self.computing = computer.precision  # the context in which modules are applied
        self._seed = mix(computer.plan.seed, step, part)
        self._batches: dict[int, Any] = {}
        self._calls: dict[int, ChainCall] = {}
        self._pending: tuple[Callable[[], float], float] | None = None
        self._loss = 0.0
        self.input_ns = 0  # nanoseconds spent fetching samples

    def begin(self, microbatch: int, place: int) -> None:
        """Seed the random generators before a module of the chain is applied to a micro-batch."""
        seed_all(mix(self._seed, microbatch, place + 1))

    def prepare(self, microbatch: int) -> None:
        if microbatch not in self._batches:
            begin_ns = time.monotonic_ns()
            self._seed_task(microbatch)
            self._batches[microbatch] = self._computer.fetch(self._share.pieces[microbatch])
            self.input_ns += time.monotonic_ns() - begin_ns

    def input(self, microbatch: int) -> Any:
        return self._call(microbatch).x

    def named(self, microbatch: int) -> Mapping[str, Any]:
        if self._names is not None and self._names.has_none("task.loss"):
            return {}
        return self._call(microbatch).named

    def _call(self, microbatch: int) -> ChainCall:
        if microbatch not in self._calls:
            self.prepare(microbatch)
            self._seed_task(microbatch)
            with self.computing():
                batch = self._batches[microbatch]
                self._calls[microbatch] = call_of(self._computer.task.loss, batch, names=self._names)
        return self._calls[microbatch]

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """The task's loss for this output, times the micro-batch's weight in the global batch."""
        self.prepare(microbatch)
        piece = self._share.pieces[microbatch]
        model = StandIn(output=output)
        self._calls.pop(microbatch, None)
        self._seed_task(microbatch)
        loss = self._computer.loss(model, self._batches.pop(microbatch), piece, self._share)
        model.require_call()
        self._collect()
        self._pending = self._computer.reader.ask(loss), piece.weight
        return loss * (piece.weight * self._share.weight * self._computer.loss_scale)

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
        self,
        computer: Computer,
        number: int,
        piece: Microbatch,
        named: tuple[str, Callable[[nn.Module, Any], Any]],
        names: NamesGiven,
    ) -> None:
        self._computer, self._piece = computer, piece
        self._seed = mix(computer.plan.seed, _EVALUATION, number)
        (self._name, self._function), self._names = named, names
        self._what = "task.loss" if self._name == "evaluation_loss" else f"task.metrics[{self._name!r}]"

    def begin(self, place: int) -> None:
        seed_all(mix(self._seed, place + 1))

    def call(self) -> ChainCall:
        seed_all(self._seed)
        batch = self._computer.fetch(self._piece)
        with self._computer.precision():
            return call_of(self._function, batch, self._what, self._names)

    def named(self) -> Mapping[str, Any]:
        return {} if self._names.has_none(self._what) else self.call().named

    def measured(self, output: Any) -> Any:
        """What the function makes of the last part's output."""
        seed_all(self._seed)
        batch = self._computer.fetch(self._piece)
        model = StandIn(self._what, output)
        with self._computer.precision():
            value = self._function(model, batch)
        model.require_call()
        return value
