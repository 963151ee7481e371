"""What policies have in common that make a step of every so many updates, in the order in which they arrive."""

from __future__ import annotations

from abc import abstractmethod

from manyhands.strategies.common.consistency.policy import Book, Group, Policy

__all__ = ["ByArrival"]


class ByArrival(Policy):
    """Each step is the mean of the next `group_size` updates to arrive at the lead; readers wait for no step."""

    __slots__ = ()

    @abstractmethod
    def group_size(self, num_active: int) -> int:
        """How many updates make a step, with so many workers."""

    @property
    def lag(self) -> None:
        """A read waits for nobody else."""
        return None

    @property
    def chosen_by_lead(self) -> bool:
        """Arrival at the lead decides."""
        return True

    @property
    def outlives_read(self) -> bool:
        """A worker reads on while its update waits for others."""
        return True

    def includes_own(self, num_active: int) -> bool:
        """Where every update is a step of its own."""
        return self.group_size(num_active) == 1

    def next_group(self, book: Book) -> Group | None:
        """The first so many that wait; at the end of the run, the rest."""
        size = self.group_size(book.num_active)
        if book.num_waiting < size:
            size = book.num_waiting if book.drained else 0
        return Group(0, book.first_waiting(size)) if size else None
