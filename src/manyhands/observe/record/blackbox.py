"""Black boxes of a run: the last events of each role, readable even after the role's process has died."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NO_STEP, NOBODY, Event, to_events

__all__ = ["BlackBoxes", "describe_event"]


class BlackBoxes:
    """The event rings of a run by role, for inspection while it runs; the caller owns the rings."""

    def __init__(self, rings: Mapping[int, EventRing]) -> None:
        self._rings = rings

    def counts(self) -> Sequence[int]:
        """Return how many events each role has recorded, including lost ones."""
        return [ring.written + ring.dropped for ring in self._rings.values()]

    def last(self, role: int, count: int) -> Sequence[str]:
        """Return the last events of a role, newest last."""
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
