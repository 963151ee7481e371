"""A buffer: a step from every so many updates, from any worker, independent of the number of workers.

FedBuff's rule (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022), for clients
of which a few are active at a time. It is not a `consistency=` of parameter servers: n-softsync makes its groups a
part of the workers and keeps the promise that one worker alone trains as the plain loop does; a buffer would not.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.common.consistency.arrival import ByArrival

__all__ = ["Buffered"]


@dataclass(frozen=True, slots=True)
class Buffered(ByArrival):
    """Each step is the mean of the next `size` updates to arrive; readers wait for no step."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"buffered:{self.size}: how many updates make a step must be 1 or more")

    def group_size(self, num_active: int) -> int:
        """Return the requested size, independent of the number of workers."""
        del num_active
        return self.size

    def __str__(self) -> str:
        return f"buffered:{self.size}"
