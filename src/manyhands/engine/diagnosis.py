"""Diagnoses a loss or gradient that is not finite, from the weights and the earlier losses; pure.

No step is taken with a loss that is not finite, so the weights are those of the step before:

    weights not finite              the last update broke them: its gradient overflowed, or the step taken with it
    weights or loss grown without   training diverges, and this loss is where it left the range of numbers
    bounds
    neither                         this batch, or what the loss function does with it
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Course", "diagnose"]

_GROWN_LOSS = 10.0  # times the first one
_GROWN_WEIGHT = 1e3  # trained weights are some orders smaller


@dataclass(slots=True)
class Course:
    """The course of a run's loss so far."""

    first: float | None = None
    last: float | None = None

    def add(self, loss: float) -> None:
        """Add the next loss."""
        if self.first is None:
            self.first = loss
        self.last = loss

    @property
    def has_grown(self) -> bool:
        """Whether the loss has grown far beyond where it began."""
        if self.first is None or self.last is None:
            return False
        return self.last > _GROWN_LOSS * max(abs(self.first), 1e-3)


def diagnose(
    model: nn.Module, course: Course, *, what: str = "loss", since: str = "", clip: bool = False
) -> str:
    """What broke first and what to try, as a part of a sentence.

    `what` is not finite now; `since` names the update that the weights are of, where that is known (empty: the model
    was built with them); `clip` says whether clipping is something to try.
    """
    bad, largest, where = _weights(model)
    grown = (
        f", and the loss had grown from {course.first:.3g} to {course.last:.3g}" if course.has_grown else ""
    )
    rate = "lower the learning rate" + (" or clip the gradient (Task(clip_norm=1.0))" if clip else "")
    if bad is not None and not since:
        return f"the model began with weights that are not finite, the first in {bad!r}; start from others"
    if bad is not None:
        return f"the weights are not finite since {since}, the first in {bad!r}{grown}; {rate}"
    if course.has_grown or largest > _GROWN_WEIGHT:
        return (
            f"the {what} is the first that is not: training diverges, the weights are up to {largest:.3g} "
            f"({where!r}){grown}; {rate}"
        )
    reached = _first_gradient(model)
    so = f", and so its gradient is not, the first in {reached!r}" if reached is not None else ""
    return (
        f"the {what} is the first that is not: the weights are finite, up to {largest:.3g} ({where!r}){so}; look at "
        "that batch, and at what the loss divides by or takes the logarithm of; a lower learning rate may help"
    )


@torch.no_grad()
def _weights(model: nn.Module) -> tuple[str | None, float, str]:
    """The first parameter with a value that is not finite; else the largest value and where it is."""
    largest, where = 0.0, ""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        most = float(parameter.detach().abs().max())  # a NaN comes through
        if not math.isfinite(most):
            return name, most, name
        if most >= largest:
            largest, where = most, name
    return None, largest, where


def _first_gradient(model: nn.Module) -> str | None:
    """The first parameter whose gradient is not finite, where the model holds gradients."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return name
    return None
