"""`central` as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from manyhands.facts import (
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    StepCosts,
    Stepping,
    TaskProfile,
    Truth,
)
from manyhands.strategies.common.usual_promises import IN_STEP
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    buckets_setting,
    check_buckets,
    shared_copy,
)


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
        return shared_copy(model, workers, workers, keeps_gradients=True, share=1 / workers)

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """Each worker sums its slice of the gradients of its host and steps it; hosts' leaders sum what is left."""
        from manyhands.strategies.common.step_times import (
            all_reduce_s,
            beyond_backward_s,
            buckets_of,
            summed_in_memory_s,
        )

        buckets = buckets_of(profile.layers, self.buckets)
        exchange_s = sum(summed_in_memory_s(machines, num_bytes) / 2 for _, num_bytes in buckets)
        if machines.hosts > 1:
            leaders = replace(machines, per_host=1)
            exchange_s += beyond_backward_s(
                profile,
                profile.samples(machines.workers),
                buckets,
                lambda num_bytes: all_reduce_s("direct", leaders, num_bytes),
            )
        return PredictedStep(
            compute_s=profile.compute_s(machines.workers),
            exchange_s=exchange_s,
            waiting_s=profile.waiting_s(machines.workers),
            optimizer_s=profile.by_owners_s / machines.per_host,
        )

    @property
    def facts(self) -> Facts:
        """All workers take every step together; each steps its slice, of pieces where the optimizer allows that."""
        stepping = (Stepping.IN_PIECES, Stepping.APART)
        return Facts(
            promises=IN_STEP,
            stepping=stepping,
            usual_costs=StepCosts(step_s=1e-4, byte_s=1.5e-10),
            cannot_cross_hosts="",
            refused_buffers={},
        )
