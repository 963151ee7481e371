"""Messages between stages: outputs forward, gradients back, over the links that all workers have.

Sending never waits: what a link does not take at once is retried while this stage receives. Several parts and
micro-batches may be in flight between two stages, in the order of the sender's work items and not of the receiver's;
so a message that arrives early is stored until it is needed. A payload has one dimension: the first output over a
border is preceded by its shape, and again where that changes from one pass to the next. Within a pass only the first
dimension, the batch, may differ between micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, unique
from typing import Final

import torch
from torch import Tensor

from manyhands.engine.exchange import MicrobatchTime, PeerTraffic, Traffic
from manyhands.errors import UserError
from manyhands.strategies.common.collectives.mailbox import LinkMessage, Mailbox
from manyhands.transport.link.interface import Link, Message

__all__ = ["Flow", "StageMessages"]

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

    def __init__(
        self, stage: int, workers: Sequence[int], links: Mapping[int, Link], timeout_s: float
    ) -> None:
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

    def __init__(
        self, stage: int, workers: Sequence[int], links: Mapping[int, Link], timeout_s: float
    ) -> None:
        self.stage = stage
        self.on_wait: Callable[[MicrobatchTime], object] = lambda _: None
        """Called with each receive that had to wait."""
        self._workers = tuple(workers)
        self._mailbox = _StageMailbox(stage, self._workers, links, timeout_s)
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
        """Send the output of `part`, or the gradient of that output, to stage `to`; never waits.

        The tensor must not be changed afterwards.
        """
        if flow is Flow.OUTPUT:
            first = self._first_shapes.setdefault(part, (microbatch, tuple(tensor.shape)))
            if self._checked and (len(first[1]) != tensor.dim() or first[1][1:] != tuple(tensor.shape[1:])):
                raise UserError(
                    f"stage {self.stage}, micro-batch {microbatch}: its output has the shape {tuple(tensor.shape)}, "
                    f"that of micro-batch {first[0]} has {first[1]}; only the first dimension, the batch, may differ: "
                    "pad the others"
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
            end_ns = time.monotonic_ns()
            self.on_wait(
                MicrobatchTime(begin_ns=begin_ns, end_ns=end_ns, microbatch=microbatch, waited_for=worker)
            )
        return self._early.pop(key)

    def _take_next(self, worker: int) -> None:
        message, self._unsent = self._mailbox.next(worker, None, self._unsent)
        part, microbatch = divmod(message.tag, _MOST_MICROBATCHES)
        payload = message.payload
        if message.step != self._pass or payload is None or message.kind not in tuple(Flow):
            self._mailbox.refuse(
                worker,
                f"a message of kind {message.kind}, pass {message.step}; due was one of pass {self._pass}",
            )
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

    def traffic(self) -> Traffic:
        return self._mailbox.traffic()

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        return self._mailbox.take_traffic()
