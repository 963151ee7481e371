"""A stage's parts of the chain, and the tensors they exchange with the stages before and after, with timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.engine.exchange import MicrobatchTime
from manyhands.errors import UserError
from manyhands.strategies.pipeline.schedules import Schedule, StageWork
from manyhands.strategies.pipeline.stage_messages import Flow, StageMessages

__all__ = ["ChainPart", "Passed", "StageBorders"]


class ChainPart:
    """Consecutive modules of a chain; `number` is the part's index, `first` the place of its first module."""

    def __init__(
        self, number: int, first: int, modules: Sequence[nn.Module], own: Sequence[nn.Parameter] = ()
    ) -> None:
        self.number, self.first = number, first
        self.own = tuple(own)
        """Parameters that belong to the model and to none of its layers; any layer may use them."""
        self.modules = tuple(modules)
        self._changes_input: bool | None = None  # not known before the first forward

    def forward(self, x: Any, begin: Callable[[int], None]) -> Any:
        """Apply the modules; `begin` is called with each module's place in the chain before it is applied."""
        with self.changeable(x) as x:
            for place, module in enumerate(self.modules, self.first):
                begin(place)
                x = module(x)
        return x

    @contextmanager
    def changeable(self, x: Any) -> Iterator[Any]:
        """Yield an input that the modules may change in place; neither leaves nor another part's tensors may be.

        It is a copy, until a training pass has shown that the modules leave their input alone.
        """
        if not isinstance(x, Tensor) or self._changes_input is False:
            yield x
            return
        copy = x.clone()
        yield copy
        if self._changes_input is None and all(module.training for module in self.modules):
            self._changes_input = copy._version > 0  # some change it in training only

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(one for module in self.modules for one in module.parameters()))

    def buffers(self) -> list[Tensor]:
        return [one for module in self.modules for one in module.buffers()]

    def train(self, mode: bool = True) -> None:
        for module in self.modules:
            module.train(mode)


class Passed(NamedTuple):
    """Time spent on communication between the slices of a stage's layers."""

    spent_ns: int = 0
    waits_ns: Mapping[int, int] = {}  # of `spent_ns`: waiting for each worker


class StageBorders:
    """Inputs and outputs of one stage, for all its parts, on its device; records the times of its work items."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        parts: Sequence[ChainPart],
        post: StageMessages,
        device: torch.device | None = None,
    ) -> None:
        self.schedule, self.stage = schedule, stage
        self.parts = {part.number: part for part in parts}
        self.post = post
        self._device = device if device is not None else torch.device("cpu")
        self._times: list[MicrobatchTime] = []
        self._begin_ns: int | None = None  # start of the work item, until it was slowed down
        self.passed: Callable[[], Passed] = Passed
        """Returns the time spent on communication between slices since the last call."""
        self.slow_down: Callable[[float], None] = lambda _: None
        """Called once in each work item, before it sends anything, with the seconds that it has taken."""
        post.on_wait = self._times.append

    def is_last(self, part: ChainPart) -> bool:
        return part.number + 1 == self.schedule.parts

    def input(self, part: ChainPart, microbatch: int) -> Tensor:
        """Receive the output of the part before, as a leaf that gets a gradient; not for the first part."""
        before = part.number - 1
        x = self.post.receive(Flow.OUTPUT, before, microbatch, before % self.schedule.stages)
        x = x.to(self._device)
        return x.requires_grad_() if x.is_floating_point() and torch.is_grad_enabled() else x

    def gradient(self, part: ChainPart, microbatch: int, shape: torch.Size) -> Tensor | None:
        """Receive the gradient of the part's output, which has this shape; not for the last part.

        None where no trained parameter depends on the output.
        """
        after = (part.number + 1) % self.schedule.stages
        gradient = self.post.receive(Flow.GRADIENT, part.number, microbatch, after)
        return gradient.reshape(shape).to(self._device) if gradient.numel() else None

    def send_output(self, part: ChainPart, microbatch: int, output: Any) -> None:
        output = self.tensor(output, part, microbatch)
        self._be_slow()
        self.post.send(Flow.OUTPUT, part.number, microbatch, output, (part.number + 1) % self.schedule.stages)

    def send_gradient(self, part: ChainPart, microbatch: int, x: Any) -> None:
        """Send the gradient of a part's input to the part before, where the input is floating-point.

        An empty tensor is sent where there is no gradient: zeros would make weight decay apply to the earlier
        parameters, which does not happen in one process.
        """
        if not part.number or not x.is_floating_point():
            return
        gradient = x.grad if x.grad is not None else x.new_empty(0)
        before = part.number - 1
        self._be_slow()
        self.post.send(Flow.GRADIENT, before, microbatch, gradient, before % self.schedule.stages)

    def tensor(self, output: Any, part: ChainPart, microbatch: int) -> Tensor:
        if isinstance(output, Tensor):
            return output
        raise UserError(
            f"stage {self.stage}, micro-batch {microbatch}: {type(part.modules[-1]).__name__} gives a "
            f"{type(output).__name__}; between two stages goes one tensor: cut elsewhere (cuts=…), or give one there"
        )

    @contextmanager
    def timed(self, item: StageWork) -> Iterator[None]:
        begin_ns = self._begin_ns = time.monotonic_ns()
        yield
        self._be_slow()
        spent_ns, waits_ns = self.passed()
        at_ns = time.monotonic_ns() - spent_ns
        parts: list[tuple[int, int | None]] = [(at_ns - begin_ns, None)]
        parts += [(waited_ns, worker) for worker, waited_ns in waits_ns.items()]
        for number, (duration_ns, worker) in enumerate(parts, 1):
            # What was neither computed nor waited for is the exchange's, and counts with the last.
            exchange_ns = spent_ns - sum(waits_ns.values()) if number == len(parts) else 0
            end_ns = begin_ns + duration_ns
            self._times.append(
                MicrobatchTime(
                    begin_ns=begin_ns,
                    end_ns=end_ns,
                    microbatch=item.microbatch,
                    waited_for=worker,
                    exchange_ns=exchange_ns,
                )
            )
            begin_ns = end_ns

    def _be_slow(self) -> None:
        """Apply an artificial slowdown, once per work item and before other stages get what they wait for."""
        begin_ns, self._begin_ns = self._begin_ns, None
        if begin_ns is not None:
            self.slow_down((time.monotonic_ns() - begin_ns) / 1e9)

    def take_times(self) -> list[MicrobatchTime]:
        times = self._times.copy()
        self._times.clear()
        return times
