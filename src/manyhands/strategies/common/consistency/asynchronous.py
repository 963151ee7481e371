"""Asynchronous steps: no worker waits for another.

Downpour SGD of Dean et al., "Large Scale Distributed Deep Networks" (NIPS 2012), without its replicas of data:
batches are given out in order to the next free worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.strategies.common.consistency.policy import Book, Group, Policy

__all__ = ["Async"]


@dataclass(frozen=True, slots=True)
class Async(Policy):
    """A read includes the reader's updates, and those of other workers that have arrived."""

    @property
    def lag(self) -> None:
        """Reads wait for no other worker."""
        return None

    @property
    def each_alone(self) -> bool:
        """True: every update is a separate step."""
        return True

    def next_group(self, book: Book) -> Group | None:
        """Return each update as a separate step, in order of arrival."""
        return Group(0, book.first_waiting(1)) if book.num_waiting else None

    def __str__(self) -> str:
        return "async"
