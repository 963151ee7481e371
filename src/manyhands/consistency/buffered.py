"""A buffer: a step from every so many updates, whoever they are from, and however many workers there are.

FedBuff's rule (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022), for clients
of whom a few are under way at a time. It is no `consistency=` of parameter servers: n-softsync, which makes its groups
a part of the workers, keeps the promise that one worker alone trains as the plain loop does, and a buffer would not.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.consistency.policy import Book, Group, Policy
from manyhands.errors import UserError

__all__ = ["Buffered"]


@dataclass(frozen=True, slots=True)
class Buffered(Policy):
    """Each step is the mean of the next `size` updates to arrive; readers wait for no step."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"buffered:{self.size}: how many updates make a step must be 1 or more")

    @property
    def lag(self) -> None:
        """A read waits for nobody else."""
        return None

    @property
    def chosen_by_lead(self) -> bool:
        """Arrival decides."""
        return True

    @property
    def outlives_read(self) -> bool:
        """Others read on while an update waits for its group."""
        return True

    def includes_own(self, num_active: int) -> bool:
        """Where every update is a step of its own."""
        del num_active
        return self.size == 1

    def next_group(self, book: Book) -> Group | None:
        """The first so many that wait; at the end of the run, the rest."""
        size = self.size
        if book.num_waiting < size:
            size = book.num_waiting if book.drained else 0
        return Group(0, book.first_waiting(size)) if size else None

    def __str__(self) -> str:
        return f"buffered:{self.size}"
