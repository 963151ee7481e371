"""What somebody may ask of a run while it goes on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["MORE_WORKERS", "AddWorker", "Command", "RemoveWorker"]

MORE_WORKERS = 16
"""How many may be added to a run in all; what they need is made ready when it starts."""


@dataclass(frozen=True, slots=True)
class AddWorker:
    """One worker more, in a slot of its own: the next number, from the number of workers at the start on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveWorker:
    """The worker in this slot finishes what it owes, and leaves."""

    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """A change of the workers; `done` gets the slot that it is about."""

    change: AddWorker | RemoveWorker | None
    """None: end the run."""

    done: Future[int] = field(default_factory=Future)
