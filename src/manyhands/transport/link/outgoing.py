"""The sending half of a link: writes directly to the medium, and queues, within a bound, what does not fit.

The queue holds references, never copies. A thread, started by the first message that does not fit, drains it
outside the GIL; while the queue is empty, the caller of `send` writes by itself.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from manyhands.transport.link.interface import (
    Closed,
    Flushed,
    FlushOutcome,
    Full,
    PeerDied,
    Queued,
    SendOutcome,
    TimedOut,
)
from manyhands.transport.link.message import HEADER_BYTES

__all__ = ["SLICE_NS", "Outgoing", "Write"]

Write = Callable[[int, int, int, int, int, int, int], int]
"""(address and bytes of the header, address and bytes of the payload, done, until, spins): go on after the first `done`
bytes of both until that moment in nanoseconds, 0 for no wait, looking so often before it sleeps; how many are done now.
"""

SLICE_NS: Final = 50_000_000
"""The longest sleep between two looks at the peer's lifeline."""

_AT_ONCE: Final = Queued(0)
_FLUSHED: Final = Flushed()


@dataclass(slots=True)
class _Waiting:
    """A message of which `done` bytes, header included, have left."""

    header: ctypes.Array[ctypes.c_char]
    payload: torch.Tensor | None
    payload_bytes: int
    done: int

    @property
    def left(self) -> int:
        return HEADER_BYTES + self.payload_bytes - self.done


class Outgoing:
    """One direction of a link at its producer, which sends the bytes with `write`.

    `peer_end` says how the peer left, or None while it is there; it is called at every send and at least every 50
    ms of waiting.
    """

    def __init__(
        self,
        write: Write,
        queue_bytes: int,
        peer_end: Callable[[], Closed | PeerDied | None],
        name: str,
        spins: int = 0,
    ) -> None:
        self._write_bytes = write
        self._queue_bytes = queue_bytes
        self._peer_end = peer_end
        self._name = name
        self._spins = spins
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Waiting] = deque()
        self._pending_bytes = 0
        self._end: Closed | PeerDied | None = None
        self._pump: threading.Thread | None = None
        self._header = (ctypes.c_char * HEADER_BYTES)()
        self._header_address = ctypes.addressof(self._header)

    def send(self, header: bytes, payload: torch.Tensor | None, payload_bytes: int) -> SendOutcome:
        """Write what fits, queue the rest; Full if earlier messages wait and this one exceeds the bound."""
        total = HEADER_BYTES + payload_bytes
        with self._lock:
            if self._end is None:
                self._end = self._peer_end()
            if self._end is not None:
                return self._end
            if self._queue:
                if self._pending_bytes + total > self._queue_bytes:
                    return Full(self._pending_bytes, self._queue_bytes)
                done = 0
            else:
                self._header.raw = header
                done = self._write(self._header_address, payload, payload_bytes, 0, 0)
                if done == total:
                    return _AT_ONCE
            kept = (ctypes.c_char * HEADER_BYTES).from_buffer_copy(header)
            self._queue.append(_Waiting(kept, payload, payload_bytes, done))
            self._pending_bytes += total - done
            if self._pump is None:
                self._pump = threading.Thread(target=self._drain, name=self._name, daemon=True)
                self._pump.start()
            self._changed.notify_all()
            return Queued(self._pending_bytes)

    def flush(self, timeout_s: float) -> FlushOutcome:
        """Wait until the queue is empty."""
        if not self._queue:  # nobody else puts anything there, and what has not left is not taken out
            return _FLUSHED
        start = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._end is not None, timeout_s)
            if not self._queue:
                return _FLUSHED
            return self._end or TimedOut(time.monotonic() - start)

    def close(self) -> bool:
        """Stop, and say whether everything that was taken has left; nothing is written afterwards."""
        with self._changed:
            if self._end is None:
                self._end = Closed()
            complete = not self._queue
            self._changed.notify_all()
        if self._pump is not None:
            self._pump.join()  # it looks up at least every slice
            complete = not self._queue
        return complete

    def _write(
        self, header_address: int, payload: torch.Tensor | None, payload_bytes: int, done: int, until_ns: int
    ) -> int:
        payload_address = payload.data_ptr() if payload_bytes and payload is not None else 0
        return self._write_bytes(
            header_address, HEADER_BYTES, payload_address, payload_bytes, done, until_ns, self._spins
        )

    def _drain(self) -> None:
        """The thread: write the first message of the queue, slice by slice, until there is none."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._end is not None)
                if self._end is not None:
                    return
                first = self._queue[0]
            until_ns = time.monotonic_ns() + SLICE_NS
            done = self._write(
                ctypes.addressof(first.header), first.payload, first.payload_bytes, first.done, until_ns
            )
            with self._changed:
                self._pending_bytes -= done - first.done
                first.done = done
                if first.left == 0:
                    self._queue.popleft()
                elif self._end is None:
                    self._end = self._peer_end()
                self._changed.notify_all()
