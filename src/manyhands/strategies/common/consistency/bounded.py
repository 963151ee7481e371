"""Bounded staleness: no worker runs more than s clocks ahead of the slowest.

The stale synchronous parallel model of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server" (NIPS 2013). Each update is one optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.common.consistency.policy import Book, Group, Policy

__all__ = ["Bounded"]


@dataclass(frozen=True, slots=True)
class Bounded(Policy):
    """A read at clock c includes every slot's updates below c - bound."""

    bound: int

    def __post_init__(self) -> None:
        if self.bound < 1:
            raise UserError(
                f"consistency=bounded:{self.bound}: the bound must be 1 or more; bounded:0 is sync"
            )

    @property
    def lag(self) -> int:
        """The number of clocks that a read may miss."""
        return self.bound

    @property
    def each_alone(self) -> bool:
        """True: every update is a separate step."""
        return True

    def next_group(self, book: Book) -> Group | None:
        """Return each update as a separate step, in order of arrival."""
        return Group(0, book.first_waiting(1)) if book.num_waiting else None

    def __str__(self) -> str:
        return f"bounded:{self.bound}"
