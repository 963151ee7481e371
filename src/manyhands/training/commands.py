"""What somebody may ask of a run while it goes on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["AddWorker", "Command", "RemoveWorker"]


@dataclass(frozen=True, slots=True)
class AddWorker:
    """One worker more, in a slot of its own."""


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
