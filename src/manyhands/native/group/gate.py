"""A gate that admits one worker at a time, by number: a fair lock, or a fixed order of workers.

A worker that draws a number and waits for it holds a ticket lock, first come first served (Mellor-Crummey and Scott,
1991). Workers that wait for numbers agreed on beforehand pass in that order. `Gate` is for steps of Python; `enter`
and `leave` are the same gate for compiled steps, which pass it too often for Python.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from manyhands.errors import Aborted, PeerTimeout
from manyhands.native.atomics import add_u32, clock_ns
from manyhands.native.counters import Counter
from manyhands.native.decorators import helper
from manyhands.native.segment import CACHE_LINE, Segment
from manyhands.native.wait_sign import LongWait
from manyhands.native.waiting import ABORTED, REACHED, announce, spins_for, wait_until

if TYPE_CHECKING:
    from manyhands.native.group.shared_group import SharedGroup

FREE, LOCKED, TURNS = 0, 1, 2
"""Who may go through: everybody at any time; one at a time, first come first served; one at a time, by number."""

_SLICE_NS = 100_000_000  # how often a waiter polls for an abort


class Gate:
    """One worker's side of a gate whose memory begins at `offset` of `segment`, which is zero at first.

    `group` says how long a wait may last, and ends it when the run is taken down.
    """

    NUM_BYTES = 2 * Counter.NUM_BYTES + 2 * CACHE_LINE

    def __init__(self, segment: Segment, offset: int, group: SharedGroup, purpose: str) -> None:
        self._tickets = Counter.within(segment, offset)
        self._inside = Counter.within(segment, offset + Counter.NUM_BYTES)
        words = segment.address + offset + 2 * Counter.NUM_BYTES
        self._served, self._never = words, words + CACHE_LINE
        self._group, self._purpose, self._spins = group, purpose, spins_for(group.world)
        self._waits: dict[int, int] = {}

    def draw(self) -> int:
        return self._tickets.add()

    def reset(self, number: int, rank: int) -> None:
        """While nobody waits: admit `number` next, which belongs to `rank`."""
        self._tickets.set(number)
        self._inside.set(rank)
        announce(self._served, number)

    def enter(self, number: int) -> None:
        """Wait until this number is admitted; PeerTimeout names the worker that is inside."""
        begin = until = time.monotonic_ns()
        deadline, peer = begin + int(self._group.timeout_s * 1e9), self._inside.get()
        with LongWait() as wait:
            while True:
                until = min(until + _SLICE_NS, deadline)
                if wait_until(self._served, number, self._never, until, self._spins) == REACHED:
                    break
                self._group.poll()  # raises Aborted
                late = self._inside.get()
                wait.goes_on(late)
                if time.monotonic_ns() >= deadline:
                    raise PeerTimeout(
                        f"worker {self._group.rank} waited {self._group.timeout_s:g} s for worker {late} to "
                        f"{self._purpose}; check that it is still running, or raise timeout_s",
                        late,
                    )
        self._inside.set(self._group.rank)
        if peer != self._group.rank:
            self._waits[peer] = self._waits.get(peer, 0) + time.monotonic_ns() - begin

    def leave(self, number: int, next_rank: int | None = None) -> None:
        if next_rank is not None:
            self._inside.set(next_rank)
        announce(self._served, number + 1)

    def compiled(self, order: int) -> CompiledGate:
        tickets = self._tickets.address if order == LOCKED else 0
        patience_ns = int(self._group.timeout_s * 1e9)
        return CompiledGate(order, self._served, tickets, self._group.abort_address, patience_ns, self._spins)

    def take_waits(self) -> dict[int, int]:
        waits, self._waits = self._waits, {}
        return waits


class CompiledGate(NamedTuple):
    """A gate for compiled code: addresses and numbers."""

    order: int = FREE
    served: int = 0
    tickets: int = 0
    abort: int = 0
    patience_ns: int = 0
    spins: int = 0


def require_admitted(status: int, gate: CompiledGate) -> None:
    """Raise the error for how a compiled step's wait ended, unless it was REACHED."""
    if status == ABORTED:
        raise Aborted("a worker stopped waiting at the gate: another failed first, or the run is ending")
    if status != REACHED:
        raise PeerTimeout(
            f"a worker waited {gate.patience_ns / 1e9:g} s at the gate; check that the others are still running, or "
            "raise timeout_s",
            -1,
        )


@helper()
def enter(gate: Any, number: int) -> Any:
    """Wait to be admitted: returns the number, `number` itself in a fixed order, and how the wait ended."""
    mine = np.int64(add_u32(gate[2], np.uint32(1))) if gate[0] == LOCKED else np.int64(number)
    return mine, wait_until(gate[1], mine, gate[3], clock_ns() + gate[4], gate[5])


@helper()
def leave(gate: Any, number: int) -> None:
    announce(gate[1], number + 1)
