"""Of the time in which a worker could only wait: what it waited for others, and what for bytes on their way. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.strategies.allreduce.priority.sender import Lateness

__all__ = ["Blocked", "exposed"]


@dataclass(frozen=True, slots=True)
class Blocked:
    """From when to when a worker did nothing."""

    begin_ns: int
    end_ns: int


def exposed(blocked: Sequence[Blocked], late: Sequence[Lateness]) -> tuple[int, dict[int, int]]:
    """Exposed communication, and the waiting for each worker that was late, of a worker that was blocked, in ns.

    What its courier waited while the worker computed was hidden, and is in neither.
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
