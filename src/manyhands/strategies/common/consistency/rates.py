"""Rates that follow staleness, as wrappers of any policy.

`aware:…`: Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950): an update that is
tau steps stale moves the parameters by alpha0 / tau of its gradient, and by alpha0 when it is fresh.

`damped:…`: Xie et al., "Asynchronous Federated Optimization" (arXiv 1903.03934), and FedBuff after it: an update
that is tau steps stale counts by (1 + tau) to the power of -1/2.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from manyhands.strategies.common.consistency.policy import BatchPlace, Book, Group, Policy

__all__ = ["StalenessAware", "StalenessDamped", "StalenessRate"]


@dataclass(frozen=True, slots=True)
class StalenessRate(Policy):
    """Delegates to the policy `inner` in everything but the rate."""

    word: ClassVar[str]
    """The word before the policy that it wraps."""

    inner: Policy

    @property
    def lag(self) -> int | None:
        """Delegates to the inner policy."""
        return self.inner.lag

    @property
    def stepwise(self) -> bool:
        """Delegates to the inner policy."""
        return self.inner.stepwise

    @property
    def each_alone(self) -> bool:
        """Delegates to the inner policy."""
        return self.inner.each_alone

    @property
    def fewest_workers(self) -> int:
        """Delegates to the inner policy."""
        return self.inner.fewest_workers

    @property
    def chosen_by_lead(self) -> bool:
        """Delegates to the inner policy."""
        return self.inner.chosen_by_lead

    @property
    def outlives_read(self) -> bool:
        """Delegates to the inner policy."""
        return self.inner.outlives_read

    def includes_own(self, num_active: int) -> bool:
        """Delegates to the inner policy."""
        return self.inner.includes_own(num_active)

    def next_group(self, book: Book) -> Group | None:
        """Delegates to the inner policy."""
        return self.inner.next_group(book)

    def place(self, rank: int, count: int, clock: int, first: tuple[int, int]) -> BatchPlace:
        """Delegates to the inner policy."""
        return self.inner.place(rank, count, clock, first)

    @abstractmethod
    def rate(self, staleness: int) -> float:
        """What the learning rate is multiplied by for an update of this staleness."""

    def __str__(self) -> str:
        return f"{self.word}:{self.inner}"


@dataclass(frozen=True, slots=True)
class StalenessAware(StalenessRate):
    """Scales the rate by the inverse of the staleness."""

    word: ClassVar[str] = "aware"

    def rate(self, staleness: int) -> float:
        """Return the inner rate divided by `staleness`; unchanged for a fresh update."""
        return self.inner.rate(staleness) / max(staleness, 1)


@dataclass(frozen=True, slots=True)
class StalenessDamped(StalenessRate):
    """Scales the rate by the inverse square root of one plus the staleness."""

    word: ClassVar[str] = "damped"

    def rate(self, staleness: int) -> float:
        """Return the inner rate divided by sqrt(1 + `staleness`), which falls more slowly than 1 / `staleness`."""
        return self.inner.rate(staleness) / math.sqrt(1 + staleness)
