"""`hogwild` as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from manyhands.errors import UserError
from manyhands.facts import (
    Answer,
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    Promise,
    Stepping,
    TaskProfile,
    Truth,
    Waits,
)
from manyhands.strategies.common.usual_promises import BY_CHANCE, IN_STEP
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    WorkerTraffic,
    check_choice,
    setting,
    shared_copy,
    silent,
)

_ORDERS = ("free", "locked", "turns")
_HANDS = ("auto", "threads", "processes")


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """One copy of the parameters in shared memory; every worker takes its own steps on it, without locks.

    `order` is `free` for that, or one of two ways to compare it with: `locked` (one step at a time, whoever comes
    first) and `turns` (round-robin: step k is worker k mod n's, in this order). `hands` says what the workers are:
    `processes`, or `threads` of one process where the whole step is compiled (glove, logreg); `auto` is threads there.
    """

    word: ClassVar[str] = "hogwild"
    about: ClassVar[str] = "one shared memory that every worker updates without locks; sparse models"
    truth: ClassVar[Truth] = Truth.ONE_MEMORY
    order: str = setting("free", str)
    """`free`, or to compare with: `locked` (one at a time) or `turns` (round-robin)."""
    hands: str = setting("auto", str)
    """What the workers are: `processes`, `threads` where the step is compiled, or `auto`."""

    def __post_init__(self) -> None:
        check_choice("order", self.order, _ORDERS)
        check_choice("hands", self.hands, _HANDS)

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        return shared_copy(model, workers, 1, keeps_gradients=False)

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """Every worker computes a batch of its own, and nobody waits."""
        if machines.hosts > 1 or self.order != "free":
            return None
        return PredictedStep(
            compute_s=profile.compute_s(), optimizer_s=profile.optimizer_s, batches=machines.workers
        )

    def sends(self, model: ModelFootprint, workers: int) -> list[WorkerTraffic]:
        del model
        return silent(workers)

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        super().check(workers, device, compiled=compiled)
        if self.hands == "threads" and not compiled:
            raise UserError(
                "hogwild hands=threads: only glove and logreg, whose steps are compiled, can use threads; leave hands "
                "out"
            )
        if device != "cpu":
            raise UserError(
                f"device={device}: hogwild trains in the host's memory; use device=cpu, or strategy=mirrored for GPUs"
            )

    def advice(self, workers: int, *, sparse: bool) -> str:
        if self.order != "free" or workers == 1 or sparse:
            return ""
        return (
            "hogwild on a dense model: each step changes parameters that other workers are changing; its theory needs "
            "sparse updates, so declare tables in Task.sparse, or use strategy=mirrored"
        )

    @property
    def facts(self) -> Facts:
        """Each worker takes its own steps; one may be half written when its worker dies, so the run ends then."""
        lazily = "those of one process; for tables, if lazy updates equal dense ones"
        in_some_order = "those of one process on the same batches in another order"
        same = {
            "turns": Promise(answer=Answer.YES, words=lazily),
            "locked": Promise(answer=Answer.NO, words=in_some_order),
            "free": BY_CHANCE,
        }
        return Facts(
            promises=replace(IN_STEP, same_numbers=same[self.order]),
            # while one worker steps, others write to items of the same tensors
            stepping=(Stepping.IN_PIECES,),
            waits_for=Waits.NOBODY,
            straggler_advice="",
            stepwise=False,
            splits_batches=False,
            record_order=self.order,
            in_threads=self.hands != "processes",
            moves_rows=True,
            when_evaluating="Hogwild workers wait for each other at each evaluation.",
            cannot_cross_hosts="its workers write to one memory without locks, and hosts do not share memory",
            cannot_read_apart="under hogwild one worker computes each batch, and which one is not known in advance",
            instead_of_own_loop="leave hands=threads out" if self.hands == "threads" else "",
            refused_buffers={
                "synchronize": "one worker computes each batch, so its statistics are already those of the global batch"
            },
        )
