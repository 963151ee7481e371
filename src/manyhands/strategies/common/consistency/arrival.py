"""The common base of policies that make a step of every so many updates, in the order of arrival."""

from __future__ import annotations

from abc import abstractmethod

from manyhands.strategies.common.consistency.policy import Book, Group, Policy

__all__ = ["ByArrival"]


class ByArrival(Policy):
    """Each step is the mean of the next `group_size` updates to arrive at the lead; readers wait for no step."""

    __slots__ = ()

    @abstractmethod
    def group_size(self, num_active: int) -> int:
        """Return how many updates make a step, given the number of workers."""

    @property
    def lag(self) -> None:
        """Reads wait for no other worker."""
        return None

    @property
    def chosen_by_lead(self) -> bool:
        """True: arrival at the lead decides."""
        return True

    @property
    def outlives_read(self) -> bool:
        """True: a worker continues to read while its update waits for others."""
        return True

    def includes_own(self, num_active: int) -> bool:
        """True if every update is a separate step."""
        return self.group_size(num_active) == 1

    def next_group(self, book: Book) -> Group | None:
        """Return the first waiting updates, as many as make a step; at the end of the run, the rest."""
        size = self.group_size(book.num_active)
        if book.num_waiting < size:
            size = book.num_waiting if book.drained else 0
        return Group(0, book.first_waiting(size)) if size else None
