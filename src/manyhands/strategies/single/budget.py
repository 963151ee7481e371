"""How a limit on device memory is spent: pure, from the sizes of the units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from manyhands.errors import UserError, format_bytes
from manyhands.strategy import enough, show_size

__all__ = ["Budget", "UnitBytes", "plan_budget"]

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
    largest = max(
        units, key=lambda unit: unit.to_step, default=UnitBytes(name="", values=0, gradients=0, state=0)
    )
    usable = int(limit * _KEPT)
    tight = lasting + largest.to_step
    if usable < tight:
        what = largest.name if largest.lasts else f"the largest layer, {largest.name!r},"
        raise UserError(
            f"device_memory={show_size(limit)}: {what} takes "
            f"{format_bytes(largest.to_step)} with its gradient and its optimizer state, and what stays "
            f"through a step {format_bytes(lasting)}; use at least device_memory={enough(tight / _KEPT + 1)}"
        )
    coming = max((unit.values + unit.state for unit in units), default=0)
    leaving = max((unit.values + unit.state for unit in units), default=0)
    roomy = tight + coming + leaving
    ahead = roomy <= usable
    return Budget(ahead=ahead, activations=usable - (roomy if ahead else tight))
