"""How long a client's update may be.

`clip=1.0` shortens every update whose Euclidean norm, over all tensors together, is above 1. `clip=adaptive:0.5`
follows a quantile of the norms (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive
Clipping", NeurIPS 2021): each client also says whether its norm was within the bound, and after a round

    bound ← bound · exp(-0.2 (share within - quantile))

As in the paper the first bound is 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from manyhands.errors import UserError

__all__ = ["ClipRule", "clipped", "next_bound"]

FIRST_BOUND: Final = 0.1
"""The first bound of an adaptive clip."""
_RATE: Final = 0.2
_ADAPTIVE: Final = "adaptive"
_NONE: Final = "no"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRule:
    """The first bound of updates, and the quantile that it follows, if it follows any."""

    bound: float
    quantile: float | None = None

    @classmethod
    def parse(cls, text: str) -> ClipRule | None:
        """`1.0`, `adaptive:0.5`, or None for `no`; UserError for anything else."""
        if text == _NONE:
            return None
        word, colon, number = text.partition(":")
        if word == _ADAPTIVE:
            quantile = _number(number) if colon else 0.5
            if not 0 < quantile < 1:
                raise UserError(f"clip={text}: {number!r} is no quantile between 0 and 1, as in adaptive:0.5")
            return cls(bound=FIRST_BOUND, quantile=quantile)
        bound = _number(text)
        if not 0 < bound < math.inf:
            raise UserError(
                f"clip={text}: must be a number above 0, adaptive:QUANTILE, or no for updates of any length"
            )
        return cls(bound=bound)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def clipped(change: Sequence[Tensor], bound: float) -> tuple[Tensor, bool]:
    """An update in one row and double precision, no longer than `bound`, and whether it was within.

    One with a number that is not finite is nought, and was not within.
    """
    flat = torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in change])
    norm = float(torch.linalg.vector_norm(flat))
    if not math.isfinite(norm):
        return torch.zeros_like(flat), False
    return (flat, True) if norm <= bound else (flat.mul_(bound / norm), False)


def next_bound(bound: float, quantile: float, within: float) -> float:
    """What the bound becomes after a round in which the share `within` of the updates was not clipped."""
    return bound * math.exp(-_RATE * (within - quantile))
