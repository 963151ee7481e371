"""The messages of the control connection, which also carries those of `places.local.control`, and their send queue.

process                                        leader
  ControlHello(rank, who it is, terms)       ──►
                                          ◄──  ControlWelcome | ControlRefused(field, reason)
  ControlPing(sent_ns)                       ──►
                                          ◄──  ControlPong(sent_ns, leader_ns)        the clock for all events
  Note, Finished, Failed                  ◄─►  Note, Stop                            of `places.local.control`
  ControlMarked(step, state, …)              ──►
  ControlEvents(lost) + records              ──►
  StoreCall(number, …)                    ──►
                                          ◄──  StoreAnswer(number, …)
                                          ◄─►  ControlPiece(name, last) + bytes       of a large object
                                          ◄──  ControlOver(rank, sentence)            the run has failed
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from manyhands.errors import PeerTimeout
from manyhands.places.local.control import Failed, Finished, Note, Stop
from manyhands.places.local.status import State
from manyhands.transport.messages import MessageCoder

CONTROL_FINGERPRINT: Final = "manyhands line 1"
"""The protocol of both ends of a control connection. The terms of the run are compared later, one by one."""
PIECE_BYTES: Final = 1 << 20
_MOST_WAITING: Final = 4096

LinkMessage = tuple[object, list[Any]]  # a message and its payload


class Term(NamedTuple):
    """A setting that must be the same on every process of a run."""

    name: str
    value: str


class ControlHello(NamedTuple):
    """A process's first message: its identity, its rank, and the terms it expects."""

    rank: int
    world: int
    role: str
    name: str
    host: str  # the identity of its host, from `places.local.host`
    pid: int
    unix_s: float  # its wall clock, for the warning about clocks that differ
    terms: tuple[Term, ...]


class ControlWelcome(NamedTuple):
    """The leader admits the process to the run."""

    leader: str  # the leader's name
    clock: str
    """The id of the leader's clock; a process with the same id reads the same time and needs no offset."""


class ControlRefused(NamedTuple):
    """The leader rejects the process; `field` names what did not match."""

    field: str
    reason: str


class ControlPing(NamedTuple):
    """A clock reading of the process, to be answered with the leader's."""

    sent_ns: int


class ControlPong(NamedTuple):
    """The reading of the ping, and the leader's clock when it answered."""

    sent_ns: int
    leader_ns: int


class ControlMarked(NamedTuple):
    """What the process is doing; `stage` is -1 outside of pipelines."""

    step: int
    state: State
    waiting_for: int
    stage: int
    microbatch: int


class ControlEvents(NamedTuple):
    """The payload is event records; `lost` more were dropped since the last message."""

    lost: int


class StoreCall(NamedTuple):
    """A call to the key-value store that the leader keeps."""

    number: int
    call: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


class StoreAnswer(NamedTuple):
    """The result of a store call; `found` is False if one of the keys does not exist."""

    number: int
    found: bool
    values: tuple[str, ...]


class ControlPiece(NamedTuple):
    """The payload is the next piece of a large object; `last` marks its end."""

    name: str
    last: bool


class ControlOver(NamedTuple):
    """The run has failed and all waits must end; `rank` is the process whose failure it was."""

    rank: int
    sentence: str


# Numbers are part of the protocol: never reuse one (6 was a frame of `places.local.control`).
CONTROL_CODER: Final = MessageCoder(
    {
        1: ControlHello,
        2: ControlWelcome,
        3: ControlRefused,
        4: ControlPing,
        5: ControlPong,
        7: ControlMarked,
        8: ControlEvents,
        9: StoreCall,
        10: StoreAnswer,
        11: ControlPiece,
        12: ControlOver,
        13: Note,
        14: Failed,
        15: Finished,
        16: Stop,
    }
)


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

    def empty(self, send: Callable[[object, list[Any]], bool]) -> bool:
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
