"""`central` as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.facts import IN_STEP, Facts, ModelFootprint, Stepping, Truth, WorkerMemory, shared_copy
from manyhands.strategy import Strategy, buckets_setting, check_buckets

__all__ = ["Central"]


@dataclass(frozen=True, kw_only=True)
class Central(Strategy):
    """One copy of the parameters per host; each worker reduces and updates its slice of them.

    On several hosts the first worker of each sums what its host has reduced with those of the others.
    """

    word: ClassVar[str] = "central"
    about: ClassVar[str] = "one copy of the parameters per host; each worker updates its slice"
    truth: ClassVar[Truth] = Truth.ONE_COPY
    buckets: int = buckets_setting()

    def __post_init__(self) -> None:
        check_buckets(self.buckets)

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        return shared_copy(model, workers, workers)

    @property
    def facts(self) -> Facts:
        """All workers take every step together; each steps its slice, of pieces where the optimizer allows that."""
        stepping = (Stepping.IN_PIECES, Stepping.APART)
        return Facts(promises=IN_STEP, stepping=stepping, cannot_cross_hosts="", refused_buffers={})
