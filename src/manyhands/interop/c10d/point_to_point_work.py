"""Messages under way between two ranks: sends, pending receives, and what has come in so far.

The state without its waiting: nothing here blocks, and everything is called with the lock of `PointToPoint` held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import numpy as np
import torch

from manyhands.errors import UserError
from manyhands.interop.c10d.collective_calls import CallKind, CollectiveCall, dtype_code
from manyhands.interop.c10d.works import PendingWork
from manyhands.transport.link import byte_ring

__all__ = ["HEADER_BYTES", "Inbox", "OutgoingMessage", "PendingReceive", "PointToPointWork", "Settled"]

HEADER_WORDS: Final = 8  # tag, bytes, dtype, number of dimensions, the first four sizes
HEADER_BYTES: Final = 8 * HEADER_WORDS
_SHOWN_DIMS: Final = 4


class PointToPointWork(PendingWork):
    """A message under way; a thread that waits for it advances all messages."""

    def __init__(
        self,
        kind: CallKind,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        drive: Callable[[PointToPointWork, float | None], None],
    ) -> None:
        super().__init__([tensor])
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.deadline_ns = 0
        self.source = -1 if peer is None else peer
        self._drive = drive

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end, and raise what went wrong; TimeoutError after `timeout`, unless that is zero."""
        if not self.is_completed():
            self._drive(self, timeout.total_seconds() or None)
        return super().wait(timeout)

    def source_rank(self) -> int:
        """The rank that a message was received from, known once it is here."""
        return self.source

    _source_rank = source_rank

    def describe(self, label: Callable[[int], str] = str) -> str:
        """`recv of float32[4] from rank 2 (tag 0)`."""
        whom = "any rank" if self.peer is None else f"rank {label(self.peer)}"
        way = "to" if self.kind is CallKind.SEND else "from"
        return f"{self.kind.name.lower()} of {_load(self.result()[0])} {way} {whom} (tag {self.tag})"


Settled = list[tuple[PointToPointWork, BaseException | None]]
"""Works that have ended, and how; completed once the lock is released."""


class OutgoingMessage:
    """A message sent through one ring; `tensor` is contiguous and must not change meanwhile."""

    def __init__(self, work: PointToPointWork, tensor: torch.Tensor) -> None:
        self.work = work
        self._tensor = tensor
        sizes = [*tensor.shape[:_SHOWN_DIMS], 0, 0, 0, 0][:_SHOWN_DIMS]
        words = [work.tag, tensor.nbytes, dtype_code(tensor.dtype), tensor.dim(), *sizes]
        self._header = np.array(words, np.int64)
        self._done = 0

    def advance(self, address: int) -> tuple[bool, bool]:
        """Write what fits into the ring at `address`: whether anything moved, and whether all has left."""
        tensor, before = self._tensor, self._done
        self._done = byte_ring.write(
            address, self._header.ctypes.data, HEADER_BYTES, tensor.data_ptr(), tensor.nbytes, before, 0, 0
        )
        return self._done > before, self._done == HEADER_BYTES + tensor.nbytes


class PendingReceive:
    """A receive: where a message of one tag goes, from one rank or from any; `tensor` is contiguous."""

    def __init__(self, work: PointToPointWork, tensor: torch.Tensor) -> None:
        self.work = work
        self.tensor = tensor
        self.begun = False  # its message is being read

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message matches this receive."""
        return self.work.tag == tag and self.may_come_from(source)

    def may_come_from(self, source: int) -> bool:
        """Whether this receive may still match a message of `source`."""
        return not self.begun and self.work.peer in (None, source)

    def refusal(self, header: Sequence[int], source: str) -> UserError | None:
        """Why the announced message does not fit, or nothing."""
        tag, num_bytes, dtype = header[:3]
        if num_bytes == self.tensor.nbytes and dtype == dtype_code(self.tensor.dtype):
            return None
        shown = min(header[3], _SHOWN_DIMS)
        sent = CollectiveCall(
            0, CallKind.SEND, dtype, dims=header[3], tensors=1, shape=tuple(header[4 : 4 + shown])
        )
        return UserError(
            f"recv: rank {source} sends {sent.load} (tag {tag}), which does not fit into {_load(self.tensor)}; both "
            "sides must agree on shape and dtype"
        )


class _Aside:
    """A message that came before a receive for it."""

    def __init__(self, header: Sequence[int]) -> None:
        self.header = list(header)
        self.bytes = torch.empty(header[1], dtype=torch.uint8)


class Inbox:
    """What comes in from one rank: the message being read, and those set aside."""

    def __init__(self, source: int, address: int, label: Callable[[int], str]) -> None:
        self.source = source
        self._ring = address
        self._label = label
        self._header = np.zeros(HEADER_WORDS, np.int64)
        self._header_address = self._header.ctypes.data
        self._read = 0  # bytes of the header, and then of the payload
        self._target: PendingReceive | _Aside | None = None
        self._aside: deque[_Aside] = deque()

    def take_aside(self, request: PendingReceive, settled: Settled) -> bool:
        """Serve a new receive from what was set aside, if the first message of its tag is there."""
        for message in self._aside:
            if request.takes(self.source, message.header[0]):
                self._aside.remove(message)
                refusal = request.refusal(message.header, self._label(self.source))
                if refusal is None:
                    _as_bytes(request.tensor).copy_(message.bytes)
                request.work.source = self.source
                settled.append((request.work, refusal))
                return True
        return False

    def advance(self, requests: list[PendingReceive], settled: Settled) -> bool:
        """Read what is there, as long as it may serve a receive; whether anything moved.

        A receive that is served is removed from `requests`.
        """
        moved = False
        while self._target is not None or any(request.may_come_from(self.source) for request in requests):
            if self._target is None:
                before, self._read = self._read, self._take(self._header_address, HEADER_BYTES)
                moved |= self._read > before
                if self._read < HEADER_BYTES:
                    break
                self._read = 0
                self._target = self._receiver(requests, settled)
            target = self._target
            payload = target.tensor if isinstance(target, PendingReceive) else target.bytes
            before, self._read = self._read, self._take(payload.data_ptr(), payload.nbytes)
            moved |= self._read > before
            if self._read < payload.nbytes:
                break
            self._read = 0
            self._target = None
            if isinstance(target, PendingReceive):
                requests.remove(target)
                settled.append((target.work, None))
            elif target.header[0] >= 0:
                self._aside.append(target)
        return moved

    def _take(self, address: int, num_bytes: int) -> int:
        return int(byte_ring.read(self._ring, address, num_bytes, self._read, 0, 0)) if num_bytes else 0

    def _receiver(self, requests: list[PendingReceive], settled: Settled) -> PendingReceive | _Aside:
        """The receive that gets the message whose header is here."""
        header = self._header.tolist()
        request = next((one for one in requests if one.takes(self.source, header[0])), None)
        if request is not None:
            request.work.source = self.source
            refusal = request.refusal(header, self._label(self.source))
            if refusal is None:
                request.begun = True
                return request
            requests.remove(request)
            settled.append((request.work, refusal))
            header[0] = -1  # read to its end, and dropped
        return _Aside(header)


def _load(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
