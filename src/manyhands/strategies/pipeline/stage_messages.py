"""Messages between stages, outputs forward and gradients back, and a stage's parts of the chain, which exchange them.

Sending never waits: what a link does not take at once is retried while this stage receives. Several parts and
micro-batches may be in flight between two stages, in the order of the sender's work items and not of the receiver's;
so a message that arrives early is stored until it is needed. A payload has one dimension: the first output over a
border is preceded by its shape, and again where that changes from one pass to the next. Within a pass only the first
dimension, the batch, may differ between micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum, unique
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.engine.chain import applied, names_taken
from manyhands.engine.exchange import MicrobatchTime
from manyhands.errors import UserError
from manyhands.strategies.common.collectives.mailbox import LinkMessage, Mailbox
from manyhands.strategies.pipeline.schedules import Schedule, StageWork
from manyhands.transport.link.interface import Link, Message

Links = Mapping[int, Link]
_MOST_MICROBATCHES: Final = 1 << 16


@unique
class Flow(IntEnum):
    """The kind of a message; the numbers are distinct from the message kinds of groups, which share the links."""

    OUTPUT = 0x70
    GRADIENT = 0x71
    SHAPE = 0x72

    @property
    def words(self) -> str:
        return "the gradient" if self is Flow.GRADIENT else "the output"


class _StageMailbox(Mailbox):
    """The mailbox of a worker, whose errors name stages and micro-batches."""

    def __init__(self, stage: int, workers: Sequence[int], links: Links, timeout_s: float) -> None:
        super().__init__(workers[stage], links, timeout_s)
        self._stages = {worker: stage for stage, worker in enumerate(workers)}
        self.doing = ""

    def _where(self) -> str:
        return f"stage {self._stages[self._rank]}, {self.doing}"

    def _peer(self, rank: int) -> str:
        return f"stage {self._stages[rank]} (worker {rank})"


class StageMessages:
    """One stage's endpoint; `workers` are the ranks of the pipeline's workers by stage, this worker's at `stage`.

    Every wait lasts at most `timeout_s` and then raises PeerTimeout; a stage that died raises WorkerFailed. Both name
    the stage, its worker and the micro-batch.
    """

    def __init__(self, stage: int, workers: Sequence[int], links: Links, timeout_s: float) -> None:
        self.stage = stage
        self.on_wait: Callable[[MicrobatchTime], object] = lambda _: None
        """Called with each receive that had to wait."""
        self._workers = tuple(workers)
        self._mailbox = _StageMailbox(stage, self._workers, links, timeout_s)
        self.traffic, self.take_traffic = self._mailbox.traffic, self._mailbox.take_traffic
        self._pass = 0
        self._checked = True
        self._unsent: list[LinkMessage] = []
        self._early: dict[tuple[Flow, int, int], Tensor] = {}  # by flow, part and micro-batch
        self._sent_shapes: dict[int, tuple[int, ...]] = {}  # by part: of its outputs, without the batch
        self._received_shapes: dict[int, tuple[int, ...]] = {}
        self._first_shapes: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By part, in this pass: the first micro-batch and the shape of its output."""

    def begin(self, *, checked: bool = True) -> None:
        """Start a new pass, on all stages; where it is `checked`, outputs of micro-batches must match in shape."""
        self._pass += 1
        self._checked = checked
        self._first_shapes = {}

    def send(self, flow: Flow, part: int, microbatch: int, tensor: Tensor, to: int) -> None:
        """Send `part`'s output, or its gradient, to stage `to`; never waits. The tensor must not change afterwards."""
        if flow is Flow.OUTPUT:
            first = self._first_shapes.setdefault(part, (microbatch, tuple(tensor.shape)))
            if self._checked and (len(first[1]) != tensor.dim() or first[1][1:] != tuple(tensor.shape[1:])):
                raise UserError(
                    f"stage {self.stage}, micro-batch {microbatch}: its output has shape {tuple(tensor.shape)}, "
                    f"but that of micro-batch {first[0]} has {first[1]}; only the first dimension (the batch) may "
                    "differ; pad the others"
                )
        if to == self.stage:
            self._early[flow, part, microbatch] = tensor.detach()
            return
        self._mailbox.doing = f"micro-batch {microbatch}, {flow.words}"
        shape = (tensor.dim(), *tensor.shape[1:])
        if flow is Flow.OUTPUT and self._sent_shapes.get(part) != shape:  # the receiver does not know it yet
            self._sent_shapes[part] = shape
            self._queue(to, Flow.SHAPE, part, microbatch, torch.tensor(shape))
        host = tensor.detach().contiguous()  # where a link can read it: in host memory
        if host.device.type == "cuda":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        self._queue(to, flow, part, microbatch, host.cpu().view(-1))
        self._unsent = self._mailbox.post(self._unsent)

    def _queue(self, to: int, flow: Flow, part: int, microbatch: int, payload: Tensor) -> None:
        tag = part * _MOST_MICROBATCHES + microbatch
        message = Message(kind=flow, step=self._pass, tag=tag, payload=payload)
        self._unsent.append((self._workers[to], message))

    def receive(self, flow: Flow, part: int, microbatch: int, source: int) -> Tensor:
        """Receive from stage `source`: the output of `part` in its shape, or that output's gradient, flattened."""
        key = (flow, part, microbatch)
        if key not in self._early:
            begin_ns, worker = time.monotonic_ns(), self._workers[source]
            self._mailbox.doing = f"micro-batch {microbatch}, {flow.words}"
            while key not in self._early:
                self._take_next(worker)
            times = {"begin_ns": begin_ns, "end_ns": time.monotonic_ns()}
            self.on_wait(MicrobatchTime(**times, microbatch=microbatch, waited_for=worker))
        return self._early.pop(key)

    def _take_next(self, worker: int) -> None:
        message, self._unsent = self._mailbox.next(worker, None, self._unsent)
        part, microbatch = divmod(message.tag, _MOST_MICROBATCHES)
        payload = message.payload
        if message.step != self._pass or payload is None or message.kind not in tuple(Flow):
            found = f"a message of kind {message.kind}, pass {message.step}"
            self._mailbox.refuse(worker, f"{found}; expected one of pass {self._pass}")
        flow = Flow(message.kind)
        if flow is Flow.SHAPE:
            self._received_shapes[part] = tuple(payload.tolist())
            return
        if flow is Flow.OUTPUT:
            dims, *tail = self._received_shapes[part]
            rest = math.prod(tail)
            payload = payload.view(*([payload.numel() // max(1, rest)] if dims else []), *tail)
        self._early[flow, part, microbatch] = payload

    def flush(self) -> None:
        """Wait until the links have taken everything that was sent; PeerTimeout where a link makes no progress."""
        self._mailbox.flush(self._unsent, ())
        self._unsent = []


class ChainPart:
    """Consecutive modules of a chain; `number` is the part's index, `first` the place of its first module."""

    def __init__(
        self, number: int, first: int, modules: Sequence[nn.Module], own: Sequence[nn.Parameter] = ()
    ) -> None:
        self.number, self.first = number, first
        self.own = tuple(own)
        """Parameters that belong to the model and to none of its layers; any layer may use them."""
        self.modules = tuple(modules)
        self.takes_names = any(names_taken(module) for module in modules)
        """Whether a module of it may take an input by name."""
        self._changes_input: bool | None = None  # not known before the first forward

    def forward(self, x: Any, begin: Callable[[int], None], named: Mapping[str, Any]) -> Any:
        """Apply the modules; `begin` is called with each module's place in the chain before it is applied."""
        with self.changeable(x) as x:
            for place, module in enumerate(self.modules, self.first):
                begin(place)
                x = applied(module, x, named)
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
        device: str = "cpu",
    ) -> None:
        self.schedule, self.stage, self.post = schedule, stage, post
        self.parts = {part.number: part for part in parts}
        self._device = torch.device(device)
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
        """Receive the gradient of the part's output of this shape; None where no trained parameter depends on it."""
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
            f"stage {self.stage}, micro-batch {microbatch}: {type(part.modules[-1]).__name__} returns a "
            f"{type(output).__name__}; stages exchange one tensor; cut elsewhere (cuts=…), or return a tensor"
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
            end_ns, number = begin_ns + duration_ns, item.microbatch
            time_of = partial(MicrobatchTime, begin_ns=begin_ns, end_ns=end_ns, microbatch=number)
            self._times.append(time_of(waited_for=worker, exchange_ns=exchange_ns))
            begin_ns = end_ns

    def _be_slow(self) -> None:
        """Apply an artificial slowdown, once per work item and before other stages get what they wait for."""
        begin_ns, self._begin_ns = self._begin_ns, None
        if begin_ns is not None:
            self.slow_down((time.monotonic_ns() - begin_ns) / 1e9)

    def take_times(self) -> list[MicrobatchTime]:
        times, self._times[:] = self._times.copy(), []
        return times
