"""The sending side of a connection: frames in order, in a bounded queue, without ever waiting.

What the kernel accepts is sent at once; the rest is kept as references, not copies, until `pump` can send it. Two
threads may use an outbox: the application's, and the one that sends heartbeats while the application is busy.
"""

from __future__ import annotations

import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from manyhands.transport.link.tls import End

__all__ = ["Outbox"]

_PARTS_PER_CALL: Final = 512  # the kernel's limit is 1024
Part = bytes | memoryview


class _Passed(bytes):
    """The first bytes of a frame that passes a descriptor; owns the descriptor until it is sent."""

    descriptor: int


class Outbox:
    """The sending side of one socket; `on_pending` is called when its queue becomes non-empty or empty."""

    def __init__(self, end: End, capacity_bytes: int, on_pending: Callable[[bool], None]) -> None:
        self._end = end
        self._capacity_bytes = capacity_bytes
        self._on_pending = on_pending
        self._lock = threading.Lock()
        self._queue: deque[Part] = deque()
        self._later: list[Part] = []
        self._later_bytes = 0
        self._closed = False
        self._told_pending = False
        self.pending_bytes = 0
        self.writes = 0
        """How often bytes have left: a beat that sees no change since the last one knows that the line is idle."""

    def offer(self, parts: list[Part], num_bytes: int, descriptor: int = -1, *, later: bool = False) -> bool:
        """Send or queue one frame of `num_bytes`; False, with nothing taken, if there is no capacity or no peer.

        An empty queue takes a frame of any size. A `descriptor` is duplicated and sent with the first part. With
        `later` a frame is held back, and queued together with the next ones or by `pump`.
        """
        with self._lock:
            waiting_bytes = self.pending_bytes + self._later_bytes
            if self._closed or (waiting_bytes and waiting_bytes + num_bytes > self._capacity_bytes):
                return False
            if later and descriptor < 0:
                self._later += parts
                self._later_bytes += num_bytes
                return True
            self._take_in_later()
            at_once = not self._queue and descriptor < 0 and len(parts) <= _PARTS_PER_CALL
            sent = self._write(parts) if at_once else 0
            if sent == num_bytes:
                return True
            if sent < 0:
                return False
            if descriptor >= 0:
                first = _Passed(parts[0])
                first.descriptor = os.dup(descriptor)
                parts = [first, *parts[1:]]
            self._queue.extend(parts)
            self.pending_bytes += num_bytes
            self._drop(sent)
            if not at_once and not self._told_pending:
                self._pump()
            self._tell_pending()
            return True

    def pump(self) -> None:
        """Send as much of the queue as the kernel accepts now."""
        with self._lock:
            self._take_in_later()
            if self._queue and not self._closed:
                self._pump()
                self._tell_pending()

    def close(self) -> None:
        """Drop the queue and accept nothing more; idempotent."""
        with self._lock:
            self._close()

    def _take_in_later(self) -> None:
        if self._later:
            self._queue.extend(self._later)
            self.pending_bytes += self._later_bytes
            self._later, self._later_bytes = [], 0

    def _tell_pending(self) -> None:
        if bool(self._queue) is not self._told_pending:
            self._told_pending = not self._told_pending
            self._on_pending(self._told_pending)

    def _pump(self) -> None:
        while self._queue and not self._closed:
            first = self._queue[0]
            sent = self._pass(first) if isinstance(first, _Passed) else self._write(self._gathered())
            if sent <= 0:
                return
            self._drop(sent)

    def _gathered(self) -> list[Part]:
        parts: list[Part] = []
        for part in islice(self._queue, _PARTS_PER_CALL):
            if isinstance(part, _Passed):
                break
            parts.append(part)
        return parts

    def _write(self, parts: Sequence[Part]) -> int:
        """How many bytes the kernel accepted; -1 if the peer is gone."""
        try:
            sent = self._end.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the receiving side reports the reason, after it has read what arrived before
            self._close()
            return -1
        self.writes += 1
        return sent

    def _pass(self, first: _Passed) -> int:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [first.descriptor]))]
        try:
            assert isinstance(self._end, socket.socket), "descriptors travel over Unix sockets"
            sent = self._end.sendmsg([first], passed)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._close()
            return -1
        os.close(first.descriptor)
        first.descriptor = -1
        self._queue[0] = bytes(first)
        self.writes += 1
        return sent

    def _drop(self, sent: int) -> None:
        """Remove `sent` bytes from the queue."""
        self.pending_bytes -= sent
        queue = self._queue
        while sent:
            first = queue[0]
            if len(first) > sent:
                queue[0] = memoryview(first)[sent:]
                return
            sent -= len(first)
            queue.popleft()

    def _close(self) -> None:
        self._closed = True
        for part in self._queue:
            if isinstance(part, _Passed):
                os.close(part.descriptor)
        self._queue.clear()
        self._later.clear()
        self.pending_bytes = self._later_bytes = 0
