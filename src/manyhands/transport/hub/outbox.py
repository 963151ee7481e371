"""What one end of a connection has still to say: frames in order, in a bounded queue, never a wait.

Whatever the kernel takes leaves at once; the rest is kept as references, not copies, until `pump` finds room for it.
Two threads may use an outbox: the application's, and the one that keeps a busy application's connections alive.
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

_PARTS_PER_CALL: Final = 512  # the kernel takes 1024
Part = bytes | memoryview


class _Passed(bytes):
    """The first bytes of a frame, with which a descriptor travels; owned until then."""

    descriptor: int


class Outbox:
    """The sending side of one socket; `on_pending` is told when there begins and ceases to be something queued."""

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
        """Send or queue one frame of `num_bytes`; False, and nothing was taken, if there is no room or no peer.

        An empty queue takes a frame of any size. A `descriptor` is duplicated, and travels with the first part. With
        `later` a frame is put aside, and queued together with the next ones or by `pump`.
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
        """Send of what is queued as much as the kernel takes now."""
        with self._lock:
            self._take_in_later()
            if self._queue and not self._closed:
                self._pump()
                self._tell_pending()

    def close(self) -> None:
        """Drop what is queued and take nothing more; idempotent."""
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
        """How many bytes the kernel took; -1 if there is nobody to take them any more."""
        try:
            sent = self._end.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the receiving side is told why, after it has read what came before
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
        """Forget `sent` bytes of the queue."""
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
