"""Asynchronous steps: nobody waits for anybody.

Downpour SGD of Dean et al., "Large Scale Distributed Deep Networks" (NIPS 2012), without its replicas of data: batches
are given out in order to whoever is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.strategies.common.consistency.policy import Book, Group, Policy

__all__ = ["Async"]


@dataclass(frozen=True, slots=True)
class Async(Policy):
    """A read includes the reader's own updates, and of the others whatever has arrived."""

    @property
    def lag(self) -> None:
        """A read waits for nobody else."""
        return None

    @property
    def each_alone(self) -> bool:
        """Each update by itself."""
        return True

    def next_group(self, book: Book) -> Group | None:
        """Each update by itself, as it comes."""
        return Group(0, book.first_waiting(1)) if book.num_waiting else None

    def __str__(self) -> str:
        return "async"
