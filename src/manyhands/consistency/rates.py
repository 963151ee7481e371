"""Staleness-aware rates, as a wrapper of any policy.

Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950): an update that is tau steps
stale moves the parameters by alpha0 / tau of its gradient, and by alpha0 when it is fresh.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.consistency.policy import BatchPlace, Book, Group, Policy

__all__ = ["StalenessAware"]


@dataclass(frozen=True, slots=True)
class StalenessAware(Policy):
    """The policy `inner` in everything but the rate."""

    inner: Policy

    @property
    def lag(self) -> int | None:
        """As inside."""
        return self.inner.lag

    @property
    def stepwise(self) -> bool:
        """As inside."""
        return self.inner.stepwise

    @property
    def each_alone(self) -> bool:
        """As inside."""
        return self.inner.each_alone

    @property
    def chosen_by_lead(self) -> bool:
        """As inside."""
        return self.inner.chosen_by_lead

    @property
    def outlives_read(self) -> bool:
        """As inside."""
        return self.inner.outlives_read

    def includes_own(self, num_active: int) -> bool:
        """As inside."""
        return self.inner.includes_own(num_active)

    def next_group(self, book: Book) -> Group | None:
        """As inside."""
        return self.inner.next_group(book)

    def place(self, rank: int, count: int, clock: int, first: tuple[int, int]) -> BatchPlace:
        """As inside."""
        return self.inner.place(rank, count, clock, first)

    def rate(self, staleness: int) -> float:
        """One part in `staleness`."""
        return self.inner.rate(staleness) / max(staleness, 1)

    def __str__(self) -> str:
        return f"aware:{self.inner}"
