"""What a process group of the backend can be told when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import UserError, nearest
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS

__all__ = ["SHARED", "Options"]

SHARED = "shared"
"""The default: all-reduce in shared memory, without messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one group, for `pg_options` of `init_process_group` and `new_group`; the same on every rank.

    `algorithm` says how floats are all-reduced: `shared` (directly in shared memory, the fastest), or one of the
    schedules of `manyhands.strategies.allreduce`, which send messages over links and serve to study them.
    """

    algorithm: str = SHARED

    def __post_init__(self) -> None:
        allowed = (SHARED, *ALGORITHMS)
        if self.algorithm not in allowed:
            raise UserError(f"algorithm={self.algorithm!r}: {nearest(str(self.algorithm), allowed)}")
