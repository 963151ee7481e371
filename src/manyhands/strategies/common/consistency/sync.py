"""Synchronous steps: batch k is split over all workers, and step k is made of all its parts.

With backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981) the first n - b parts to
arrive make the step, and the slowest b count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.common.consistency.policy import BatchPlace, Book, Group, Policy

__all__ = ["Sync"]


@dataclass(frozen=True, slots=True)
class Sync(Policy):
    """Every worker waits for every step; `backup` of them may be late for it."""

    backup: int = 0

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise UserError(f"consistency=sync:{self.backup}: the number of backup workers must be 0 or more")

    @property
    def lag(self) -> int:
        """A read includes all steps before it."""
        return 0

    @property
    def stepwise(self) -> bool:
        """All updates of one clock make one step."""
        return True

    @property
    def lockstep(self) -> bool:
        """True unless there are backup workers."""
        return not self.backup

    @property
    def fewest_workers(self) -> int:
        """At least one part makes a step, besides those that may be late."""
        return self.backup + 1

    @property
    def chosen_by_lead(self) -> bool:
        """With backup workers, only the lead knows which parts were in time."""
        return self.backup > 0

    def next_group(self, book: Book) -> Group | None:
        """The step of the next clock, in the order of the slots."""
        clock = book.step
        slots = book.slots_at(clock)
        if not slots or book.num_arrived(clock) < max(1, len(slots) - self.backup):
            return None
        return Group(clock, tuple((slot, clock) for slot in slots if book.waits(slot, clock)))

    def place(self, rank: int, count: int, clock: int, first: tuple[int, int]) -> BatchPlace:
        """A part of the batch that has the clock's number."""
        del first
        return BatchPlace(clock, rank, count)

    def __str__(self) -> str:
        return f"sync:{self.backup}" if self.backup else "sync"
