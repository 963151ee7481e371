"""A stage at work: takes its turns of a schedule in their order, and waits for what they need.

    forward    input (from the stage before, or the task's own) ─► the part's modules ─► output (to the stage after)
    backward   gradient of the output ─► gradients of the parameters, and of the input (to the stage before)

What a micro-batch's forward leaves is kept until its backward, or until its weight gradient where the schedule splits
that off: backward then computes the gradient of the input alone. With `recompute` only the input is kept, and forward
is run again before backward, with the same random numbers. The last part goes on into the task's loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.pipeline.post import Flow, StagePost, Waited
from manyhands.pipeline.table import Pass, Schedule, StageTurn
from manyhands.pipeline.weights import PutOff
from manyhands.training.exchange import TurnTime

__all__ = ["ChainPart", "Ends", "PipelineStage"]


class ChainPart:
    """Some modules of a chain, one after another; `number` is the part's, `first` its first module's place."""

    def __init__(self, number: int, first: int, modules: Sequence[nn.Module]) -> None:
        self.number = number
        self.first = first
        self.modules = tuple(modules)
        self._copies_input = any(
            getattr(inner, "inplace", False) is True
            for module in self.modules[:1]
            for inner in module.modules()
        )

    def forward(self, x: Any, begin: Callable[[int], None]) -> Any:
        """Apply the modules; `begin` is called with the place of each in the chain before it is."""
        if self._copies_input and isinstance(x, Tensor):
            x = x.clone()  # a leaf may not be changed in place, nor what another part still has
        for place, module in enumerate(self.modules, self.first):
            begin(place)
            x = module(x)
        return x

    def parameters(self) -> list[nn.Parameter]:
        """All of them, each once."""
        return list(dict.fromkeys(one for module in self.modules for one in module.parameters()))

    def buffers(self) -> list[Tensor]:
        """All of them."""
        return [one for module in self.modules for one in module.buffers()]

    def train(self, mode: bool = True) -> None:
        """Compute as in training, or as in evaluation."""
        for module in self.modules:
            module.train(mode)


class Ends(Protocol):
    """What the task has at both ends of the chain, of one pass of micro-batches; and its random numbers."""

    def computing(self) -> AbstractContextManager[object]:
        """In which modules are applied."""

    def prepare(self, microbatch: int) -> None:
        """Get the samples that the loss of a micro-batch needs, if they are not here."""

    def input(self, microbatch: int) -> Any:
        """What the first part is called with."""

    def loss(self, microbatch: int, output: Tensor) -> Tensor:
        """What backward begins with, from the last part's output."""

    def begin(self, microbatch: int, place: int) -> None:
        """A module of the chain is about to be applied to a micro-batch: set the random generators."""


@dataclass(slots=True)
class _Kept:
    """What forward leaves of a micro-batch."""

    input: Any
    root: Tensor | None = None
    """The part's output, or the loss; None where it is to be computed again."""

    has_gradient: bool = True
    """Whether the output is a number that one comes back for."""

    put_off: PutOff | None = None


class PipelineStage:
    """One worker's parts of a pipeline, by their number, and what it keeps of micro-batches under way."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        parts: Sequence[ChainPart],
        post: StagePost,
        *,
        recompute: bool = False,
    ) -> None:
        self._schedule = schedule
        self._stage = stage
        self._parts = {part.number: part for part in parts}
        self._post = post
        self._recompute = recompute
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._turns = schedule.of_stage(stage)
        self._works = {
            Pass.FORWARD: self._forward,
            Pass.BACKWARD: self._backward,
            Pass.WEIGHTS: self._weights,
        }
        self.times: list[TurnTime] = []
        self.most_kept = 0
        """Of how many micro-batches (and parts) something was kept at once, at most, in the last pass."""

    @property
    def parts(self) -> Sequence[ChainPart]:
        """This worker's."""
        return tuple(self._parts.values())

    def run(self, ends: Ends, count: int, mark: Callable[[int], None] = lambda _: None) -> None:
        """Forward and backward of the first `count` micro-batches; gradients add up in the parameters.

        `mark` is called with the number of each micro-batch that a turn is about to be for.
        """
        self._post.begin()
        self._kept, self.most_kept = {}, 0
        for turn in self._turns:
            if turn.microbatch < count:
                mark(turn.microbatch)
                self._works[turn.work](turn, ends)
                self.most_kept = max(self.most_kept, len(self._kept))
        self._post.settle()
        assert not self._kept, "every forward has its backward"

    def forward_only(self, part: ChainPart, microbatch: int, ends: Ends) -> Tensor | None:
        """The output of one part for one micro-batch, without a graph: sent on, or returned where it is the last."""
        x = self._input(part.number, microbatch, ends)
        with ends.computing():
            output = part.forward(x, lambda place: ends.begin(microbatch, place))
        if part.number + 1 == self._schedule.parts:
            return _tensor(output, part, self._stage, microbatch)
        self._send_output(part, microbatch, output)
        return None

    def waited(self, waited: Waited) -> None:
        """The post had to wait."""
        self.times.append(
            TurnTime(
                begin_ns=waited.begin_ns,
                end_ns=waited.end_ns,
                microbatch=waited.microbatch,
                waited_for=waited.worker,
            )
        )

    def take_times(self) -> list[TurnTime]:
        """What took how long since the last call, in order."""
        times, self.times = self.times, []
        return times

    def _forward(self, turn: StageTurn, ends: Ends) -> None:
        part, microbatch = self._parts[self._schedule.part(turn)], turn.microbatch
        x = self._input(part.number, microbatch, ends)
        kept = self._kept[part.number, microbatch] = _Kept(x)
        is_last = part.number + 1 == self._schedule.parts
        if is_last:
            ends.prepare(microbatch)
        with self._timed(turn):
            if is_last and self._recompute:
                return  # backward follows, and computes all of it
            with torch.no_grad() if self._recompute else nullcontext():
                output = self._compute(part, kept, microbatch, ends)
            if not is_last:
                self._send_output(part, microbatch, output)
            kept.has_gradient = output.is_floating_point()
            if not self._recompute:
                kept.root = output

    def _backward(self, turn: StageTurn, ends: Ends) -> None:
        part, microbatch = self._parts[self._schedule.part(turn)], turn.microbatch
        is_last = part.number + 1 == self._schedule.parts
        arrived = None if is_last else self._gradient(part.number, microbatch)
        kept = self._kept[part.number, microbatch]
        with self._timed(turn):
            root = kept.root
            if root is None:
                # the last part was not run at all so far, the others were, and have moved their buffers
                with nullcontext() if is_last else _unmoved(part.buffers()):
                    root = self._compute(part, kept, microbatch, ends)
            gradient = None
            if root.requires_grad:
                if arrived is not None:
                    gradient = arrived.reshape(root.shape).to(root.device)
                if self._schedule.splits_backward:
                    kept.put_off = PutOff(root, gradient, _leaf(kept.input), part.parameters())
                    kept.put_off.input_gradient()
                else:
                    torch.autograd.backward(root, gradient)
            self._send_gradient(part, microbatch, kept.input)
            kept.root = None
        if not self._schedule.splits_backward:
            del self._kept[part.number, microbatch]

    def _weights(self, turn: StageTurn, ends: Ends) -> None:
        del ends
        with self._timed(turn):
            kept = self._kept.pop((self._schedule.part(turn), turn.microbatch))
            if kept.put_off is not None:
                kept.put_off.weight_gradients()

    def _compute(self, part: ChainPart, kept: _Kept, microbatch: int, ends: Ends) -> Tensor:
        """The part's output, or the loss where it is the last."""
        with ends.computing():
            output = part.forward(kept.input, lambda place: ends.begin(microbatch, place))
        output = _tensor(output, part, self._stage, microbatch)
        return output if part.number + 1 < self._schedule.parts else ends.loss(microbatch, output)

    def _input(self, number: int, microbatch: int, ends: Ends) -> Any:
        if not number:
            return ends.input(microbatch)
        device = _device_of(self._parts[number])
        x = self._post.receive(Flow.OUTPUT, number - 1, microbatch, (number - 1) % self._schedule.stages)
        x = x.to(device) if device is not None else x
        return x.requires_grad_() if x.is_floating_point() and torch.is_grad_enabled() else x

    def _gradient(self, number: int, microbatch: int) -> Tensor | None:
        """Of a part's output; None where it is no number that has one, and none is sent."""
        if not self._kept[number, microbatch].has_gradient:
            return None
        return self._post.receive(Flow.GRADIENT, number, microbatch, (number + 1) % self._schedule.stages)

    def _send_output(self, part: ChainPart, microbatch: int, output: Any) -> None:
        output = _tensor(output, part, self._stage, microbatch)
        self._post.send(
            Flow.OUTPUT, part.number, microbatch, output, (part.number + 1) % self._schedule.stages
        )

    def _send_gradient(self, part: ChainPart, microbatch: int, x: Any) -> None:
        if not part.number or not x.is_floating_point():
            return
        gradient = x.grad if x.grad is not None else torch.zeros_like(x)
        before = part.number - 1
        self._post.send(Flow.GRADIENT, before, microbatch, gradient, before % self._schedule.stages)

    @contextmanager
    def _timed(self, turn: StageTurn) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        yield
        self.times.append(TurnTime(begin_ns=begin_ns, end_ns=time.monotonic_ns(), microbatch=turn.microbatch))


def _leaf(x: Any) -> Tensor | None:
    """An input that has a gradient."""
    return x if isinstance(x, Tensor) and x.requires_grad else None


def _device_of(part: ChainPart) -> torch.device | None:
    """Where a part computes; None where it has nothing that lies anywhere."""
    for module in part.modules:
        for one in (*module.parameters(), *module.buffers()):
            return one.device
    return None


def _tensor(output: Any, part: ChainPart, stage: int, microbatch: int) -> Tensor:
    if isinstance(output, Tensor):
        return output
    last = type(part.modules[-1]).__name__ if part.modules else "part"
    raise UserError(
        f"stage {stage}, micro-batch {microbatch}: {last} gives a {type(output).__name__}; between two stages goes one "
        "tensor: cut elsewhere (cuts=…), or give one tensor there"
    )


@contextmanager
def _unmoved(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Running statistics are counted once, though forward runs twice."""
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
