"""What the links have in common that queue what their medium does not accept at once.

    send ──Outgoing──► the medium (a ring, a connection) ──Incoming──► receive

A medium is two functions, one that writes and one that reads; see `Write` and `Read`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from manyhands.transport.link.interface import (
    HEADER_BYTES,
    Closed,
    Flushed,
    FlushOutcome,
    FrameKind,
    Full,
    Header,
    Link,
    LinkCounters,
    Message,
    PeerDied,
    Queued,
    Received,
    ReceiveOutcome,
    SendOutcome,
    TimedOut,
    check_size,
    hand_out,
    room_for,
)
from manyhands.transport.liveness import forget_in_children

Write = Callable[[int, int, int, int, int, int, int], int]
"""(address and bytes of the header, address and bytes of the payload, done, until, spins): continue after the first
`done` bytes of both until that moment in nanoseconds, 0 for no wait, looking so often before it sleeps; how many are
done now.
"""

SLICE_NS: Final = 50_000_000  # the longest sleep between two looks at the peer's lifeline

_AT_ONCE: Final = Queued(0)
_FLUSHED: Final = Flushed()


@dataclass(slots=True)
class _Waiting:
    """A message of which `done` bytes, header included, have left."""

    header: ctypes.Array[ctypes.c_char]
    payload: torch.Tensor | None
    payload_bytes: int
    done: int


class Outgoing:
    """One direction of a link at its producer, which sends the bytes with `write`.

    `peer_end`, called at every send and every 50 ms of waiting, says how the peer left; None while it is there.
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
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._by_caller = False
        self._queue: deque[_Waiting] = deque()
        self._pending_bytes = 0
        self._end: Closed | PeerDied | None = None
        self._pump: threading.Thread | None = None
        self._header = (ctypes.c_char * HEADER_BYTES)()
        self._header_address = ctypes.addressof(self._header)

    def send(self, header: bytes, payload: torch.Tensor | None, payload_bytes: int) -> SendOutcome:
        """Write what fits, queue the rest; Full if earlier messages wait and this one exceeds the bound."""
        total = HEADER_BYTES + payload_bytes
        with self.lock:
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
            self._leave_to_pump(header, payload, payload_bytes, done)
            return Queued(self._pending_bytes)

    @property
    def is_free(self) -> bool:
        return not self._queue and self._end is None

    def begin(self, header: bytes) -> int:
        """Have the caller write the next message by itself, where nothing is queued: the address of its header."""
        self._header.raw, self._by_caller = header, True
        return self._header_address

    def end(self, payload: torch.Tensor | None, payload_bytes: int, done: int) -> None:
        """Of the message that the caller began to write, queue what is not done."""
        with self.lock:
            self._by_caller = False
            if done < HEADER_BYTES + payload_bytes:
                self._leave_to_pump(self._header.raw, payload, payload_bytes, done)

    def _leave_to_pump(
        self, header: bytes, payload: torch.Tensor | None, payload_bytes: int, done: int
    ) -> None:
        kept = (ctypes.c_char * HEADER_BYTES).from_buffer_copy(header)
        self._queue.append(_Waiting(kept, payload, payload_bytes, done))
        self._pending_bytes += HEADER_BYTES + payload_bytes - done
        if self._pump is None and self._end is None:
            self._pump = threading.Thread(target=self._drain, name=self._name, daemon=True)
            self._pump.start()
        self._changed.notify_all()

    def flush(self, timeout_s: float) -> FlushOutcome:
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
            complete = not self._queue and not self._by_caller
            self._changed.notify_all()
        if self._pump is not None:
            self._pump.join()  # it looks up at least every slice
            complete = not self._queue and not self._by_caller
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
                if done == HEADER_BYTES + first.payload_bytes:
                    self._queue.popleft()
                elif self._end is None:
                    self._end = self._peer_end()
                self._changed.notify_all()


Read = Callable[[int, int, int, int, int], int]
"""(address, bytes, done, until, spins): fill memory after its first `done` bytes until that moment in nanoseconds, 0
for no wait, looking so often before it sleeps; how many bytes are there now."""

_LOOK_EVERY_NS: Final = 500_000
_PART_EVERY_NS: Final = 10_000_000
_NEVER_NS: Final = 1 << 63
_GOODBYE: Final = FrameKind.GOODBYE  # looked at with every message, and enumerations are slow


class Incoming:
    """One direction of a link at its consumer, which takes the bytes with `read`.

    The part of an unfinished message that was read is kept here, so a deadline in the middle of one loses nothing.
    With `part`, a consumer that runs on the same core as its producer moves to another core.
    """

    def __init__(
        self,
        read: Read,
        max_payload_bytes: int,
        peer_end: Callable[[], Closed | PeerDied | None],
        peer: str,
        spins: int = 0,
        part: Callable[[], bool] | None = None,
    ) -> None:
        self._read = read
        self._max_payload_bytes = max_payload_bytes
        self._peer_end = peer_end
        self._peer = peer
        self._bytes = bytearray(HEADER_BYTES)
        self._bytes_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._header: Header | None = None
        self._target: torch.Tensor | None = None
        self._done = 0  # bytes read of the header, and then of the payload
        self._sequence = 0
        self._spins = spins
        self._part = part
        self._part_ns = 0 if part is not None else _NEVER_NS

    def receive(self, timeout_s: float, into: torch.Tensor | None) -> ReceiveOutcome:
        start_ns = time.monotonic_ns()
        deadline_ns = start_ns + int(timeout_s * 1e9)
        if start_ns >= self._part_ns:
            # Leave this core if the peer runs on it too, unless that was tried just now.
            assert self._part is not None, "else it is never tried"
            self._part_ns = start_ns + (_PART_EVERY_NS if self._part() else _LOOK_EVERY_NS)
        if self._header is None:
            outcome = self._fill(self._bytes_address, HEADER_BYTES, start_ns, deadline_ns)
            if outcome is not None:
                return outcome
        header = self.announced(into)
        if header is None:
            return Closed()
        if self._target is not None and header.payload_bytes:
            outcome = self._fill(self._target.data_ptr(), header.payload_bytes, start_ns, deadline_ns)
            if outcome is not None:
                return outcome
        return self.hand_out(into)

    @property
    def is_between(self) -> bool:
        return self._header is None and not self._done

    @property
    def header_address(self) -> int:
        """Where the caller reads the header of the next message to, by itself."""
        return self._bytes_address

    def announced(self, into: torch.Tensor | None) -> Header | None:
        """What the bytes of the header announce, and where it goes; None for a goodbye."""
        if self._header is None:
            self._header = Header.decode(self._bytes, self._max_payload_bytes, self._sequence, self._peer)
            self._done = 0
        header = self._header
        if header.frame is _GOODBYE:
            return None
        if self._target is None:
            self._target = room_for(header, into, self._peer)
        elif into is not None:
            room_for(header, into, self._peer)  # what does not fit is refused before the rest is read
        return header

    def end(self, into: torch.Tensor, done: int) -> Message | None:
        """So many bytes of the header, or of the payload once that is announced, the caller has read by itself."""
        self._done = done
        whole = self._header is not None and done == self._header.payload_bytes
        return self.hand_out(into).message if whole else None

    def hand_out(self, into: torch.Tensor | None) -> Received:
        """The message that is here whole; the next one is due."""
        assert self._header is not None, "it was announced"
        received = hand_out(self._header, self._target, into, self._peer)
        self._header, self._target, self._done = None, None, 0
        self._sequence += 1
        return received

    def _fill(
        self, address: int, num_bytes: int, start_ns: int, deadline_ns: int
    ) -> TimedOut | Closed | PeerDied | None:
        """Read on until `num_bytes` are there (None), the deadline passes or the peer is found gone."""
        if self._done == num_bytes:
            return None
        now_ns = start_ns
        while True:
            until_ns = min(deadline_ns, now_ns + SLICE_NS) if deadline_ns > now_ns else 0
            self._done = self._read(address, num_bytes, self._done, until_ns, self._spins)
            if self._done == num_bytes:
                return None
            end = self._peer_end()
            if end is not None:
                # What the peer sent before it left may have arrived after the last look.
                self._done = self._read(address, num_bytes, self._done, 0, 0)
                return None if self._done == num_bytes else end
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                return TimedOut((now_ns - start_ns) / 1e9)


class QueuedLink(Link):
    """A link whose medium is the subclass's; `max_payload_bytes` bounds what may be sent and announced."""

    _outgoing: Outgoing
    _incoming: Incoming

    def __init__(self, peer: str, max_payload_bytes: int) -> None:
        self.peer = peer
        self.counters = LinkCounters()
        self._max_payload_bytes = max_payload_bytes
        self._gone: Closed | PeerDied | None = None
        self._closed = False
        self._receiving = threading.Lock()
        self._leaving = threading.Lock()
        forget_in_children(self)

    def send(self, message: Message) -> SendOutcome:
        counters = self.counters
        header = Header.of(message, counters.messages_sent)
        num_bytes = header.payload_bytes
        check_size(num_bytes, self._max_payload_bytes, self.peer)
        outcome = self._outgoing.send(header.encode(), message.payload, num_bytes)
        if isinstance(outcome, Queued):
            if isinstance(self._gone, PeerDied):  # found out by trying
                return self._gone
            counters.messages_sent += 1
            counters.bytes_sent += num_bytes
        elif isinstance(outcome, Full):
            counters.full_count += 1
        return outcome

    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        with self._receiving:
            if self._closed:
                return Closed()
            outcome = self._incoming.receive(timeout_s, into)
        if isinstance(outcome, Received):
            self.counters.messages_received += 1
            self.counters.bytes_received += outcome.message.payload_bytes
        return outcome

    def flush(self, timeout_s: float) -> FlushOutcome:
        return self._outgoing.flush(timeout_s)

    def let_go_in_child(self) -> None:
        """Close a parent's end in its forked child (a data loader's, say): it would hide its death."""
        if not self._closed:
            self._closed = True
            self._let_go(in_child=True)

    def close(self, *, silently: bool = False) -> None:
        """Close the link; `silently` means without a goodbye, as a crash would: the peer sees PeerDied."""
        with self._leaving:
            if self._closed:
                return
            self._closed = True
            complete = self._outgoing.close()
            if not silently:
                self._say_goodbye(complete)
            self.interrupt()
            with self._receiving:
                self._let_go()

    @abstractmethod
    def _say_goodbye(self, complete: bool) -> None:
        """Tell the peer that this was all, or, where not all of it is `complete`, that the rest is lost."""

    def interrupt(self) -> None:
        """Have a receive in another thread return, if it does not by itself."""

    @abstractmethod
    def _let_go(self, *, in_child: bool = False) -> None:
        """Let go of the medium; in a child, of what would hide the death of its parent."""
