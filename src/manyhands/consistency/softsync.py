"""Softsync: a step from every so many gradients, whoever they are from.

n-softsync of Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950): of lambda
learners, every c = lambda // n gradients make one update, so that staleness centres on n. Lecture slides sometimes
call n the number of workers and lambda the accumulation factor: here n is the splitting parameter, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.consistency.policy import Book, Group, Policy
from manyhands.errors import UserError

__all__ = ["SoftSync"]


@dataclass(frozen=True, slots=True)
class SoftSync(Policy):
    """Each step is the mean of the next slots // splits gradients to arrive at the lead; readers wait for no step."""

    splits: int

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise UserError(f"consistency=softsync:{self.splits}: the splitting parameter must be 1 or more")

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
        """A worker reads on while its gradient waits for others."""
        return True

    def includes_own(self, num_active: int) -> bool:
        """Where every gradient is a step of its own: so one worker alone trains as if there were no server."""
        return self._group_size(num_active) == 1

    def next_group(self, book: Book) -> Group | None:
        """The first so many that wait; at the end of the run, the rest."""
        size = self._group_size(book.num_active)
        if book.num_waiting < size:
            size = book.num_waiting if book.drained else 0
        return Group(0, book.first_waiting(size)) if size else None

    def _group_size(self, num_active: int) -> int:
        return max(1, num_active // self.splits)

    def __str__(self) -> str:
        return f"softsync:{self.splits}"
