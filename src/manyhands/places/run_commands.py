"""Commands to a run under way."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["MORE_WORKERS", "AddWorker", "Command", "RemoveWorker"]

MORE_WORKERS = 16
"""How many may be added to a run in all; what they need is made ready when it starts."""


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Add one worker, in a new slot: the next number, counted from the initial number of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveWorker:
    """Remove the worker in this slot, once it has finished its pending work."""

    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """A change of the workers; `done` receives the slot that it concerns."""

    change: AddWorker | RemoveWorker | None
    """None: end the run."""
    done: Future[int] = field(default_factory=Future)
