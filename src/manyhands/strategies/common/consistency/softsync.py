"""Softsync: a step from every so many gradients, whoever they are from.

n-softsync of Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950): of lambda
learners, every c = lambda // n gradients make one update, so that staleness centres on n. Lecture slides sometimes
call n the number of workers and lambda the accumulation factor: here n is the splitting parameter, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.common.consistency.arrival import ByArrival

__all__ = ["SoftSync"]


@dataclass(frozen=True, slots=True)
class SoftSync(ByArrival):
    """Each step is the mean of the next slots // splits gradients to arrive at the lead; readers wait for no step."""

    splits: int

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise UserError(f"consistency=softsync:{self.splits}: the splitting parameter must be 1 or more")

    @property
    def fewest_workers(self) -> int:
        """A group is a part of the workers, and has one of them at least."""
        return self.splits

    def group_size(self, num_active: int) -> int:
        """A part of the workers, so that one worker alone trains as if there were no server."""
        return max(1, num_active // self.splits)

    def __str__(self) -> str:
        return f"softsync:{self.splits}"
