"""Split the time in which a worker was blocked into waiting for late workers and waiting for data in flight. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.strategies.allreduce.priority.sender import Lateness

__all__ = ["Blocked", "exposed"]


@dataclass(frozen=True, slots=True)
class Blocked:
    """An interval in which a worker was blocked."""

    begin_ns: int
    end_ns: int


def exposed(blocked: Sequence[Blocked], late: Sequence[Lateness]) -> tuple[int, dict[int, int]]:
    """Return exposed communication, and the wait for each late worker, of a blocked worker, in nanoseconds.

    What its sender thread waited while the worker computed was hidden, and counts as neither.
    """
    waits: dict[int, int] = {}
    for one in late:
        shared = sum(
            max(0, min(one.end_ns, span.end_ns) - max(one.begin_ns, span.begin_ns)) for span in blocked
        )
        if shared:
            waits[one.peer] = waits.get(one.peer, 0) + shared
    whole = sum(span.end_ns - span.begin_ns for span in blocked)
    return max(0, whole - sum(waits.values())), waits
