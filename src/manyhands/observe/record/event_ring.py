"""A bounded ring of events in shared memory: one process writes, its parent reads, and neither ever waits.

```
line 0   magic · capacity · role              written once, by `create`
line 1   head (events published) · dropped    written by the recording process only
line 2   tail (events consumed)               written by the reader only
page 1…  capacity × 64-byte records           event k lies in slot k mod capacity
```

The writer fills the slot, then publishes it by storing the new head; the reader copies what lies between tail
and head, then stores the new tail (Lamport's single-producer single-consumer queue). A reader therefore never
sees half a record, whatever the moment the writer is killed at, and the memory outlives the writer: the last
events of a dead worker are its black box. When the reader is behind, new events are dropped and counted; the
writer never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from numba import types

from manyhands.errors import UserError
from manyhands.native.atomics import array_at, fence, load_i64, store_i64
from manyhands.native.closeable import Closeable
from manyhands.native.decorators import njit
from manyhands.native.segment import CACHE_LINE, PAGE, Segment
from manyhands.observe.record.events import (
    MAX_ROLE,
    NO_STEP,
    NOBODY,
    RECORD,
    Event,
    EventKind,
    Records,
    to_events,
)

DEFAULT_CAPACITY = 1 << 14
"""Events a ring holds by default: 1 MiB, some seconds of a fast loop during which its reader may be away."""

_MAGIC = 0x6D68_7269_6E67_0001
_CAPACITY, _ROLE = 8, 16
_HEAD, _DROPPED = CACHE_LINE, CACHE_LINE + 8
_TAIL = 2 * CACHE_LINE
_RECORDS = PAGE
_SIZE = RECORD.itemsize


class EventRing(Closeable):
    """One role's events: `create`d by the parent, `attach`ed and written by the role, read by the parent.

    Any thread of the writing process may `record` (the call holds the GIL, which makes the process one
    writer); one thread at a time may `drain`, and any may look at `last`. A context manager; `close` is
    idempotent and leaves the other side's mapping alone.
    """

    def __init__(self, segment: Segment) -> None:
        """Take over a segment laid out by `create`; it is closed with the ring."""
        self._segment = segment
        self._address = segment.address
        self.capacity: int = _load(self._address + _CAPACITY)
        self.role: int = _load(self._address + _ROLE)
        self._records: Records = segment.array(_RECORDS, self.capacity, RECORD)
        warm()  # now rather than at the first event of a training loop

    @classmethod
    def create(cls, *, role: int, capacity: int = DEFAULT_CAPACITY) -> EventRing:
        """Create a ring for events of `role`; `capacity` is a power of two, at least 2."""
        if not 0 <= role <= MAX_ROLE:
            raise UserError(f"role={role} is not allowed; roles are numbered 0 to {MAX_ROLE}")
        if capacity < 2 or capacity & (capacity - 1):
            raise UserError(f"capacity={capacity} is not allowed; it must be a power of two, at least 2")
        segment = Segment.create(_RECORDS + capacity * _SIZE, f"the events of role {role}")
        for offset, value in ((_CAPACITY, capacity), (_ROLE, role), (0, _MAGIC)):
            _store(segment.address + offset, value)
        return cls(segment)

    @classmethod
    def attach(cls, descriptor: int) -> EventRing:
        segment = Segment.attach(descriptor)
        if segment.num_bytes < _RECORDS + _SIZE or _load(segment.address) != _MAGIC:
            segment.close()
            raise UserError(f"descriptor {descriptor} is not an event ring")
        return cls(segment)

    @property
    def descriptor(self) -> int:
        return self._segment.descriptor

    @property
    def written(self) -> int:
        return self._word(_HEAD)

    @property
    def dropped(self) -> int:
        """The number of events lost because the reader was a full ring behind."""
        return self._word(_DROPPED)

    def record(
        self,
        kind: EventKind,
        start_ns: int,
        duration_ns: int = 0,
        *,
        step: int = NO_STEP,
        peer: int = NOBODY,
        num_bytes: int = 0,
        count: int = 0,
        value: float = 0.0,
        message: int = 0,
        wire: int = 0,
    ) -> bool:
        """Publish one event, or drop it where the ring is full; return whether it was kept.

        `start_ns` is `time.monotonic_ns()`; `wire` is made by `wire_of`.
        """
        # `+` makes the enum member a plain int, which the compiled call takes some 30 times faster.
        kept: bool = _record(
            self._address,
            +kind | +wire << 8,
            start_ns,
            duration_ns,
            step,
            peer,
            num_bytes,
            count | message << 32,
            float(value),
        )
        return kept

    def append(self, records: Records, lost: int = 0) -> None:
        """Publish events of another ring, after `lost` that were dropped there; what does not fit is counted, too.

        They get this ring's role and continue its numbers. Only for rings on which `record` is not called.
        """
        head, dropped = self._word(_HEAD), self._word(_DROPPED)
        room = self.capacity - (head - self._word(_TAIL))
        kept = records[: max(0, room)].copy()
        kept["role"], kept["id"] = self.role, head + dropped + lost + np.arange(len(kept))
        start = head % self.capacity
        before_wrap = min(len(kept), self.capacity - start)
        self._records[start : start + before_wrap] = kept[:before_wrap]
        self._records[: len(kept) - before_wrap] = kept[before_wrap:]
        _store(self._address + _DROPPED, dropped + lost + len(records) - len(kept))
        _store(self._address + _HEAD, head + len(kept))

    def drain(self) -> Records:
        """Return a copy of every event not yet drained, oldest first, and free their slots."""
        tail, head = self._word(_TAIL), self._word(_HEAD)
        records = self._copy(tail, head)
        _store(self._address + _TAIL, head)
        return records

    def last(self, count: int) -> Records:
        """Return a copy of the newest events, drained or not, oldest first: at most `count`, or capacity − 1."""
        head = self._word(_HEAD)
        first = max(0, head - min(count, self.capacity))
        records = self._copy(first, head)
        # The writer may have continued into the slots just copied. It may be filling slot `head` right now,
        # which held the event one capacity earlier; every later event is complete.
        oldest_whole = self._word(_HEAD) - self.capacity + 1
        return records[max(0, oldest_whole - first) :]

    def close(self) -> None:
        self._address = 0
        self._records = np.empty(0, RECORD)
        self._segment.close()

    def _word(self, offset: int) -> int:
        if self._address == 0:
            raise ValueError("the event ring is closed")
        word: int = _load(self._address + offset)
        return word

    def _copy(self, first: int, end: int) -> Records:
        start, count = first % self.capacity, end - first
        before_wrap = min(count, self.capacity - start)
        return np.concatenate(
            (self._records[start : start + before_wrap], self._records[: count - before_wrap])
        )


def warm() -> None:
    """Compile the functions of this module, or load them from the cache."""
    _record.compile(_RECORD_SIGNATURE)
    _load.compile((_WORD,))
    _store.compile((_WORD, _WORD))


_WORD = types.int64
_RECORD_SIGNATURE = types.boolean(_WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, _WORD, types.float64)


@njit(cache=True)
def _record(address, kind_and_wire, start_ns, duration_ns, step, peer, num_bytes, count_and_message, value):  # type: ignore[no-untyped-def]
    if address == 0:
        raise ValueError("the event ring is closed")
    capacity = load_i64(address + _CAPACITY)
    head = load_i64(address + _HEAD)
    dropped = load_i64(address + _DROPPED)
    if head - load_i64(address + _TAIL) >= capacity:
        store_i64(address + _DROPPED, dropped + 1)
        return False
    fence()  # store the previous event's head before this slot changes: `last` relies on it
    slot = address + _RECORDS + _SIZE * (head & (capacity - 1))
    record = array_at(slot, _SIZE, np.uint8).view(RECORD)[0]
    record.start_ns = start_ns
    record.duration_ns = duration_ns
    record.kind = kind_and_wire & 0xFF
    record.wire = kind_and_wire >> 8 & 0xFF
    record.codec = kind_and_wire >> 16 & 0xFFFF
    record.role = load_i64(address + _ROLE)
    record.peer = peer
    record.step = step
    record.num_bytes = num_bytes
    record.value = value
    record.id = head + dropped
    record.count = count_and_message & 0xFFFFFFFF
    record.message = count_and_message >> 32 & 0xFFFFFFFF
    store_i64(address + _HEAD, head + 1)
    return True


@njit(cache=True)
def _load(address):  # type: ignore[no-untyped-def]
    fence()  # orders the copy made before this call before the load of this word
    return load_i64(address)


@njit(cache=True)
def _store(address, value):  # type: ignore[no-untyped-def]
    store_i64(address, value)


class BlackBoxes:
    """The event rings of a run by role, for inspection while it runs; the caller owns the rings."""

    def __init__(self, rings: Mapping[int, EventRing]) -> None:
        self._rings = rings

    def counts(self) -> Sequence[int]:
        return [ring.written + ring.dropped for ring in self._rings.values()]

    def last(self, role: int, count: int) -> Sequence[str]:
        if role not in self._rings:
            return ()
        now_ns = time.monotonic_ns()
        return [describe_event(event, now_ns) for event in to_events(self._rings[role].last(count))]


def describe_event(event: Event, now_ns: int) -> str:
    """`12.3 s ago  wait        step 17  for role 2   104.2 ms`."""
    # The record's end is when it was written; clamp it, so that another clock cannot put it in the future.
    ago_s = max(0, now_ns - event.start_ns - event.duration_ns) / 1e9
    parts = [f"{ago_s:8.1f} s ago", f"{event.kind.name.lower():<10}"]
    parts.append(f"step {event.step + 1:<7}" if event.step != NO_STEP else " " * 12)
    parts.append(f"{event.duration_ns / 1e6:10.2f} ms")
    if event.peer != NOBODY:
        parts.append(f"peer {event.peer}")
    if event.num_bytes:
        parts.append(f"{event.num_bytes} bytes")
    return " ".join(parts).rstrip()
