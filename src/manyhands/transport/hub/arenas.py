"""Shared memory between the two ends of a Unix connection: one arena for payloads in each direction.

The connecting end creates the segment and passes it with its proof (see `handshake`):

       0  released (i64)     how far the accepting end has read arena 0
     128  released (i64)     how far the connecting end has read arena 1
    4096  arena 0            written by the connecting end, read by the accepting one
       …  arena 1            the other way

A payload is contiguous. Positions count the bytes of a direction since its beginning, so the offset in the arena is
the position modulo its size; a payload that would cross the end begins at the start instead. The writer never
overtakes `released`: if there is no space, the payload is sent in the stream. Positions are announced in the frame
(see `frames`), and a system call lies between the copy and its announcement, so only `released` needs an atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from manyhands.native.counters import load, store
from manyhands.native.segment import CACHE_LINE, PAGE, Segment, round_up
from manyhands.transport.messages import ProtocolError

_ALIGNMENT: Final = 64  # of every payload, as of numpy's and torch's allocations
_ENDS: Final = 2
_LEAST_BYTES: Final = _ENDS * PAGE + PAGE


class Arenas:
    """Both directions, as one end sees them; `end` is 0 for the connecting end and 1 for the accepting one."""

    def __init__(self, segment: Segment, end: int) -> None:
        """Take ownership of the segment; ProtocolError if it was not made by `create`."""
        if segment.num_bytes < _LEAST_BYTES or (segment.num_bytes - PAGE) % (_ENDS * PAGE):
            segment.close()
            raise ProtocolError("arena", f"{segment.num_bytes} bytes do not hold a page and two equal arenas")
        self._segment = segment
        capacity = (segment.num_bytes - PAGE) // _ENDS
        views = [segment.memory(PAGE + side * capacity, capacity) for side in range(_ENDS)]
        words = [segment.address + side * CACHE_LINE for side in range(_ENDS)]
        self.writer = ArenaWriter(views[end], words[end])
        self.reader = ArenaReader(views[1 - end], words[1 - end])

    @staticmethod
    def create(capacity_bytes: int) -> Segment:
        return Segment.create(PAGE + _ENDS * round_up(capacity_bytes, PAGE), "a connection")

    def close(self) -> None:
        """Release the segment; a payload still in use keeps the memory mapped. Idempotent."""
        self.writer.close()
        self.reader.close()
        self._segment.close()


class ArenaWriter:
    """The end that writes payloads into an arena."""

    def __init__(self, arena: memoryview, released: int) -> None:
        """Write to `arena`; `released` is the address of the word that the reader advances."""
        self._arena = arena
        self._released = released
        self._before = self._written = 0

    def put(self, parts: Sequence[memoryview], num_bytes: int) -> int:
        """Copy the parts one behind the other; return their position, or -1 if there is no space."""
        capacity = len(self._arena)
        begin, end = _placed(self._written, num_bytes, capacity)
        released = load(self._released)
        empty = released == self._written  # then the bytes skipped at the end need no space
        if num_bytes > capacity or released > self._written or (end - released > capacity and not empty):
            return -1
        at = begin % capacity
        for part in parts:
            self._arena[at : at + len(part)] = part
            at += len(part)
        self._before, self._written = self._written, end
        return begin

    def take_back(self) -> None:
        self._written = self._before

    def close(self) -> None:
        self._arena.release()
        self._arena = memoryview(b"")


class ArenaReader:
    """The end that reads payloads in place."""

    def __init__(self, arena: memoryview, released: int) -> None:
        """Read from `arena`; `released` is the address of the word that this end advances."""
        self._arena = arena
        self._word = released
        self._taken = self._released = 0
        self._held: deque[int] = deque()  # positions handed out, in order
        self._ends: dict[int, int] = {}
        self._given_back: set[int] = set()

    def take(self, position: int, num_bytes: int) -> memoryview:
        """The announced payload, valid until `release`; ProtocolError if it cannot lie there."""
        capacity = len(self._arena)
        begin, end = _placed(self._taken, num_bytes, capacity)
        overlaps = bool(self._held) and end - self._released > capacity
        if position != begin or not 0 < num_bytes <= capacity or overlaps:
            raise ProtocolError(
                "position",
                f"{num_bytes} bytes at {position} do not fit an arena of {capacity} whose position is {self._taken}",
            )
        self._taken = end
        self._held.append(position)
        self._ends[position] = end
        at = begin % capacity
        return self._arena[at : at + num_bytes].toreadonly()

    def release(self, position: int) -> None:
        """Release the payload at `position`; its space is free once all earlier ones are released too."""
        if position not in self._ends:
            return
        self._given_back.add(position)
        while self._held and self._held[0] in self._given_back:
            first = self._held.popleft()
            self._given_back.remove(first)
            self._released = self._ends.pop(first)
        store(self._word, self._released)

    def close(self) -> None:
        self._ends.clear()
        self._held.clear()
        self._arena.release()
        self._arena = memoryview(b"")


def _placed(position: int, num_bytes: int, capacity: int) -> tuple[int, int]:
    """Where the next payload begins, and where the one after it may; both ends compute the same."""
    size = round_up(num_bytes, _ALIGNMENT)
    if capacity and position % capacity + size > capacity:
        position = round_up(position, capacity)
    return position, position + size
