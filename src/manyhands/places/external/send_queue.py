"""The send queue to one peer: any thread fills it, and the thread that polls the hub empties it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from manyhands.errors import PeerTimeout
from manyhands.places.external.control_messages import ControlPiece

__all__ = ["SendQueue", "Wakeup", "pieces"]

PIECE_BYTES: Final = 1 << 20
_MOST_WAITING: Final = 4096

LinkMessage = tuple[object, list[Any]]
"""A message and its payload."""

_Send = Callable[[object, list[Any]], bool]


class Wakeup:
    """Wakes a thread that waits for its descriptor; any thread may call, `close` is idempotent."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self.descriptor

    def ring(self) -> None:
        """Wake the thread; a no-op once closed, because the descriptor number may have been reused."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Consume the wake-ups so far; a no-op once closed."""
        with self._lock, suppress(BlockingIOError):
            if not self._closed:
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)


class SendQueue:
    """Messages in order; `wake` is called after a message was added, so that the queue gets emptied."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._batches: deque[Iterator[LinkMessage]] = deque()
        self._next: LinkMessage | None = None
        self._room = threading.Condition()
        self._closed = False

    def put(self, message: object, payload: Iterable[Any] = ()) -> None:
        self.put_all(iter([(message, list(payload))]))

    def put_all(self, messages: Iterator[LinkMessage]) -> None:
        """Add messages that are produced one by one as capacity allows, in the thread that empties the queue."""
        with self._room:
            if self._closed:
                return
            self._batches.append(messages)
        self._wake()

    def put_when_room(self, message: object, timeout_s: float, peer: str) -> None:
        """Add a message once there is capacity; PeerTimeout naming the `peer` that accepts nothing."""
        deadline = time.monotonic() + timeout_s
        with self._room:
            while len(self._batches) >= _MOST_WAITING and not self._closed:
                if not self._room.wait(deadline - time.monotonic()):
                    raise PeerTimeout(f"{peer} has read nothing for {timeout_s:g} s", peer=0)
        self.put(message)

    def empty(self, send: _Send) -> bool:
        """Pass messages to `send` until it accepts no more; return whether the queue is empty."""
        while True:
            if self._next is None:
                with self._room:
                    if not self._batches:
                        return True
                    messages = self._batches[0]
                self._next = next(messages, None)
                if self._next is None:
                    with self._room:
                        self._batches.popleft()
                        self._room.notify_all()
                    continue
            message, payload = self._next
            if not send(message, payload):
                return False
            self._next = None

    def close(self) -> None:
        with self._room:
            self._closed = True
            self._batches.clear()
            self._next = None
            self._room.notify_all()


def pieces(name: str, chunks: Iterable[Any]) -> Iterator[LinkMessage]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            yield ControlPiece(name=name, last=False), [view[begin : begin + PIECE_BYTES]]
    yield ControlPiece(name=name, last=True), []
