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
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, unique
from typing import Final, NoReturn

import torch
from torch import Tensor

from manyhands.engine.exchange import MicrobatchTime, PeerTraffic, Traffic
from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.native.wait_sign import LONG_WAIT_S, LongWait
from manyhands.transport.link.interface import (
    Closed,
    Full,
    Link,
    Message,
    PeerDied,
    Queued,
    Received,
    TimedOut,
)
from manyhands.transport.messages import ProtocolError

__all__ = ["Flow", "StageMessages"]

_RETRY_S: Final = 0.001  # between two attempts to send over a full link
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


_Key = tuple[Flow, int, int]  # flow, part, micro-batch


class StageMessages:
    """One stage's endpoint; `workers` are the ranks of the pipeline's workers by stage, this worker's at `stage`.

    Every wait lasts at most `timeout_s` and then raises PeerTimeout; a stage that died raises WorkerFailed. Both name
    the stage, its worker and the micro-batch.
    """

    def __init__(
        self, stage: int, workers: Sequence[int], links: Mapping[int, Link], timeout_s: float
    ) -> None:
        self.stage = stage
        self._workers = tuple(workers)
        self._links, self._timeout_s = links, timeout_s
        self.on_wait: Callable[[MicrobatchTime], object] = lambda _: None
        """Called with each receive that had to wait."""
        self._pass = 0
        self._checked = True
        self._unsent: dict[int, deque[Message]] = {other: deque() for other in range(len(workers))}
        self._early: dict[_Key, Tensor] = {}
        self._sent_shapes: dict[int, tuple[int, ...]] = {}  # by part: of its outputs, without the batch
        self._received_shapes: dict[int, tuple[int, ...]] = {}
        self._first_shapes: dict[
            int, tuple[int, tuple[int, ...]]
        ] = {}  # of this pass, by part, with the micro-batch
        self._posts: defaultdict[int, PeerTraffic] = defaultdict(PeerTraffic)
        self._messages = self._bytes = 0

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
            self._check(part, microbatch, tensor)
        if to == self.stage:
            self._early[flow, part, microbatch] = tensor.detach()
            return
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
        self._push(to)

    def receive(self, flow: Flow, part: int, microbatch: int, source: int) -> Tensor:
        """Receive from stage `source`: the output of `part` in its shape, or that output's gradient, flattened."""
        key = (flow, part, microbatch)
        if key not in self._early:
            begin_ns = time.monotonic_ns()
            while key not in self._early:
                self._take_next(source, key)
            end_ns, worker = time.monotonic_ns(), self._workers[source]
            self.on_wait(
                MicrobatchTime(begin_ns=begin_ns, end_ns=end_ns, microbatch=microbatch, waited_for=worker)
            )
        return self._early.pop(key)

    def flush(self) -> None:
        """Wait until the links have taken everything that was sent; PeerTimeout where a link makes no progress."""
        left_s = self._timeout_s
        while any(self._unsent.values()):
            for other in self._unsent:
                before = len(self._unsent[other])
                self._push(other)
                if len(self._unsent[other]) < before:
                    left_s = self._timeout_s
                elif before:
                    self._links[self._workers[other]].flush(_RETRY_S)
                    left_s -= _RETRY_S
            if left_s <= 0:
                full = next(other for other, waiting in self._unsent.items() if waiting)
                why = f"{self._name(full)} took nothing within {self._timeout_s:g} s"
                raise PeerTimeout(f"stage {self.stage}: {why}", self._workers[full])

    def traffic(self) -> Traffic:
        return Traffic(messages_sent=self._messages, bytes_sent=self._bytes)

    def take_traffic(self) -> dict[int, PeerTraffic]:
        posts, self._posts = self._posts, defaultdict(PeerTraffic)
        return posts

    def _check(self, part: int, microbatch: int, output: Tensor) -> None:
        first = self._first_shapes.setdefault(part, (microbatch, tuple(output.shape)))
        if self._checked and (len(first[1]) != output.dim() or first[1][1:] != tuple(output.shape[1:])):
            raise UserError(
                f"stage {self.stage}, micro-batch {microbatch}: its output has the shape {tuple(output.shape)}, that "
                f"of micro-batch {first[0]} has {first[1]}; only the first dimension, the batch, may differ: pad the "
                "others"
            )

    def _queue(self, to: int, flow: Flow, part: int, microbatch: int, payload: Tensor) -> None:
        tag = part * _MOST_MICROBATCHES + microbatch
        self._unsent[to].append(Message(kind=flow, step=self._pass, tag=tag, payload=payload))

    def _push(self, other: int) -> None:
        waiting = self._unsent[other]
        while waiting:
            worker, message = self._workers[other], waiting[0]
            outcome = self._links[worker].send(message)
            if isinstance(outcome, Full):
                return
            if not isinstance(outcome, Queued):
                self._lost(other, outcome, message.tag % _MOST_MICROBATCHES, Flow(message.kind))
            waiting.popleft()
            self._messages += 1
            self._bytes += message.payload_bytes
            post = self._posts[worker]
            post.sent_ns = post.sent_ns or time.monotonic_ns()
            post.messages_sent += 1
            post.bytes_sent += message.payload_bytes

    def _take_next(self, source: int, awaited: _Key) -> None:
        message = self._next(source, awaited)
        part, microbatch = divmod(message.tag, _MOST_MICROBATCHES)
        if message.step != self._pass or message.payload is None or message.kind not in tuple(Flow):
            raise ManyhandsError(
                f"stage {self.stage}: {self._name(source)} sent a message of kind {message.kind}, pass {message.step}; "
                f"due was {awaited[0].words} of micro-batch {awaited[2]}, pass {self._pass}"
            )
        flow = Flow(message.kind)
        if flow is Flow.SHAPE:
            self._received_shapes[part] = tuple(message.payload.tolist())
            return
        payload = message.payload
        if flow is Flow.OUTPUT:
            dims, *tail = self._received_shapes[part]
            rest = math.prod(tail)
            payload = payload.view(*([payload.numel() // max(1, rest)] if dims else []), *tail)
        self._early[flow, part, microbatch] = payload

    def _next(self, source: int, awaited: _Key) -> Message:
        worker, left_s = self._workers[source], self._timeout_s
        with LongWait() as wait:
            while True:
                busy = any(self._unsent.values())
                slice_s = min(left_s, _RETRY_S if busy else LONG_WAIT_S)
                try:
                    outcome = self._links[worker].receive(slice_s)
                except ProtocolError as error:
                    raise ManyhandsError(f"stage {self.stage}: from {self._name(source)}: {error}") from error
                if isinstance(outcome, Received):
                    self._posts[worker].received_ns = time.monotonic_ns()
                    return outcome.message
                if not isinstance(outcome, TimedOut):
                    self._lost(source, outcome, awaited[2], awaited[0])
                left_s -= slice_s
                if left_s <= 0:
                    raise PeerTimeout(
                        f"stage {self.stage}: {self._name(source)} did not send {awaited[0].words} of micro-batch "
                        f"{awaited[2]} within {self._timeout_s:g} s",
                        worker,
                    )
                wait.goes_on(worker)
                for other in self._unsent:
                    self._push(other)

    def _lost(self, other: int, outcome: Closed | PeerDied, microbatch: int, flow: Flow) -> NoReturn:
        reason = outcome.reason if isinstance(outcome, PeerDied) else "the link was closed"
        raise WorkerFailed(
            f"stage {self.stage}, micro-batch {microbatch}, {flow.words}: lost {self._name(other)}: {reason}",
            self._workers[other],
        )

    def _name(self, other: int) -> str:
        return f"stage {other} (worker {self._workers[other]})"
