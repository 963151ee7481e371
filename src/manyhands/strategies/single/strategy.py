"""`single` as a value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from manyhands.errors import UserError, format_bytes
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
from manyhands.strategies.common.usual_promises import IN_STEP
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    WorkerTraffic,
    enough,
    parse_size,
    setting,
    show_size,
    silent,
)


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """The plain loop in one process: the reference for everything else.

    With `device_memory` the device holds some layers at a time, and the others wait at `offload`.
    """

    word: ClassVar[str] = "single"
    about: ClassVar[str] = "a plain loop in one process; the reference"
    truth: ClassVar[Truth] = Truth.ONE_PROCESS
    refuses: ClassVar[Mapping[str, str]] = {"codec": "it is one process and sends nothing"}
    most_workers: ClassVar[int | None] = 1
    device_memory: int = setting(0, parse_size, show_size)
    """Bytes of the device that layers, gradients, optimizer state and activations may take; 0: all there are."""
    offload: str = setting("host", str)
    """Where layers are that are not on the device: `host`, or a folder, in a file that is mapped into memory."""

    def __post_init__(self) -> None:
        if self.offload != "host" and not self.device_memory:
            needs = "needs device_memory, as in device_memory=2GiB"
            raise UserError(f"offload={self.offload} {needs}")

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        super().check(workers, device, compiled=compiled)
        if compiled and self.device_memory:
            given = f"device_memory={show_size(self.device_memory)}"
            raise UserError(f"{given}: compiled steps have no layers to move; leave it out")
        if self.offload != "host" and not os.access(self.offload, os.W_OK | os.X_OK):
            why = "must be a writable folder; create it, or use offload=host"
            raise UserError(f"offload={self.offload}: {why}")

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        if not self.device_memory:
            return super().needs(model, workers)
        plan_budget(self.device_memory, _units(model), model.buffers)  # refuses what is too little
        some = "some layers at a time, up to the limit"
        return [
            WorkerMemory(who="device", besides=self.device_memory, what=some),
            WorkerMemory(who=self.offload, weights=model.parameters, state=model.state),
        ]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """With `device_memory`, layers come and go by the link `memory`, with their optimizer state in backward."""
        found = PredictedStep(compute_s=profile.compute_s(), optimizer_s=profile.optimizer_s)
        if not self.device_memory or not profile.layers:
            return found
        from manyhands.strategies.common.step_times import gathered_s

        model, samples = profile.model, profile.samples(1)
        kept = model.state / (model.parameters or 1)
        values_s = [machines.memory.seconds(layer.gradient_bytes) for layer in profile.layers]
        # Its gradient's step brings the state, and values and state go back meanwhile, in the other direction.
        both_s = [machines.memory.seconds((1 + kept) * layer.gradient_bytes) for layer in profile.layers][
            ::-1
        ]
        forward_s = [layer.forward.seconds(samples) for layer in profile.layers]
        backward_s = [layer.backward.seconds(samples) for layer in reversed(profile.layers)]
        if plan_budget(self.device_memory, _units(model), model.buffers).ahead:
            whole_s = gathered_s(forward_s, values_s) + gathered_s(backward_s, both_s) + both_s[-1]
            moved_s = whole_s - sum(forward_s) - sum(backward_s)
        else:
            moved_s = sum(values_s) + 2 * sum(both_s)
        return replace(found, exchange_s=moved_s)

    def sends(self, model: ModelFootprint, workers: int) -> list[WorkerTraffic]:
        del model
        return silent(workers)

    @property
    def facts(self) -> Facts:
        limited = self.device_memory > 0
        same = Promise(answer=Answer.YES, words="it is the one process")
        return Facts(
            promises=replace(IN_STEP, same_numbers=same),
            stepping=(Stepping.IN_TURN if limited else Stepping.TOGETHER,),
            waits_for=Waits.NOBODY,
            straggler_advice="",
            record_order="free",
            in_threads=True,
            leaves_steps_out=not limited,
            cannot_compile="device_memory frees and fetches parameters between layers, which compiled code cannot "
            "know of"
            if limited
            else "",
            instead_of_own_loop="give the model and its loss to mh.fit for device_memory" if limited else "",
            refused_buffers={},
        )


def _units(model: ModelFootprint) -> list[UnitBytes]:
    whole = model.parameters or 1  # without parameters there is neither
    gradients, state = model.gradients / whole, model.state / whole
    return [
        UnitBytes(
            name=layer.name,
            values=layer.parameters,
            gradients=int(layer.parameters * gradients),
            state=int(layer.parameters * state),
            lasts=layer.lasts,
        )
        for layer in model.layers
    ]


_KEPT: Final = 0.85
"""The fraction of the limit to plan with; the rest is for a layer's temporaries and allocator rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """The memory that a unit takes on the device."""

    name: str
    values: int
    gradients: int
    state: int
    lasts: bool = False
    """Whether its values stay on the device from their first use to the end of a step."""

    @property
    def to_step(self) -> int:
        return self.values + self.gradients + self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The plan for the device memory."""

    ahead: bool
    """Whether the next unit is prefetched while one is computed with."""
    activations: int
    """Bytes of tensors saved by autograd that may stay on the device; the rest is offloaded to host memory."""


def plan_budget(limit: int, units: Sequence[UnitBytes], buffers: int = 0) -> Budget:
    """Plan how to stay within `limit` bytes; a UserError states the need if not even one layer at a time fits."""
    lasting = sum(unit.values for unit in units if unit.lasts) + buffers
    none = UnitBytes(name="", values=0, gradients=0, state=0)
    largest = max(units, key=lambda unit: unit.to_step, default=none)
    usable = int(limit * _KEPT)
    tight = lasting + largest.to_step
    if usable < tight:
        what = largest.name if largest.lasts else f"the largest layer, {largest.name!r},"
        raise UserError(
            f"device_memory={show_size(limit)}: {what} needs "
            f"{format_bytes(largest.to_step)} with its gradient and optimizer state, and tensors kept for the complete "
            f"step need {format_bytes(lasting)}; use at least device_memory={enough(tight / _KEPT + 1)}"
        )
    moving = max((unit.values + unit.state for unit in units), default=0)
    roomy = tight + 2 * moving  # one comes, and one leaves
    ahead = roomy <= usable
    return Budget(ahead=ahead, activations=usable - (roomy if ahead else tight))
