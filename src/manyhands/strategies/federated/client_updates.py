"""What clients send in a round, and what becomes of it: one client's update, and the tally that collects them.

client ──ClientUpdate──► RoundTally.add, each with its weight; total() ──► TallySum ──► the algorithm: `mean`, `step`

A tally may wrap another: what is done to each update before it is added (coding, clipping) and to the sum afterwards
(noise) is a tally of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.engine.exchange import Traffic

__all__ = [
    "ClientAssignment",
    "ClientUpdate",
    "RoundPlace",
    "RoundTally",
    "TallySum",
    "WeighedUpdate",
    "shaped",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientAssignment:
    """The work assigned to a client in a round."""

    client: int
    weights: Sequence[Tensor]
    """The model that it begins with."""
    number: int
    """The round in which the client was given the work, from 0; its random numbers follow from it."""
    staleness: int = 0
    """How many rounds ago that was, when its update is counted."""
    samples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Indices of the client's samples, once an algorithm has said who takes part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlace:
    """The round that a worker is in: its number, the clients asked, and this worker's rank."""

    number: int
    """Number of the round, from 0."""
    clients: Sequence[int]
    """The clients that were asked."""
    rank: int
    """Rank of this worker."""
    total: Callable[[Tensor], Tensor]
    """Collective: the sum over the workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientUpdate:
    """What a client sends: how far each tensor has come, what it weighs, and how many steps it took."""

    client: int
    change: Sequence[Tensor]
    """In the order of the model's parameters, then its floating-point buffers, then what the algorithm adds."""
    samples: int
    steps: int
    loss: float
    """The mean over its steps."""
    staleness: int = 0
    """How many rounds old the model was that it began with."""
    encoded_bytes: int | None = None
    """What a codec made of it; None: it travels as it is."""

    @property
    def num_bytes(self) -> int:
        if self.encoded_bytes is not None:
            return self.encoded_bytes
        return sum(change.numel() * change.element_size() for change in self.change)

    @property
    def norm(self) -> float:
        """Euclidean, over all tensors together, in double precision."""
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in self.change]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(map(_all_finite, self.change))


@dataclass(frozen=True, kw_only=True, slots=True)
class WeighedUpdate:
    """One client's update with its weight, where the server must see single updates."""

    client: int
    change: Sequence[Tensor]
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TallySum:
    """The result of a round's tally, the same on every worker."""

    sums: Sequence[Tensor]
    """Sums of weight times update, one tensor for each of an update's, in double precision."""
    weight: float
    """Sum of the weights; 0: no client's update was counted."""
    loss: float
    """The sum of weight times mean loss."""
    traffic: Traffic
    """What the clients sent that this worker simulated."""
    updates: Sequence[WeighedUpdate] = ()
    """Each by itself, in the order of the round's clients, for an algorithm with `single_updates`; else none."""
    missing: int = 0
    """Of the clients that `updates` would list, how many sent none that counts."""


class RoundTally(Protocol):
    """Collects the updates of one round."""

    def add(self, update: ClientUpdate, weight: float) -> None:
        """Add an update of a client that this worker simulated; its numbers are finite."""

    def total(self, largest: int | None = None) -> TallySum:
        """Collective, once: what all workers' updates come to. NonFinite where the round must be abandoned.

        Without those whose norm is of a larger class (`norm_class`) than `largest`, where that is given.
        """


def _all_finite(tensor: Tensor) -> bool:
    """Check the extremes, which are not finite where any item is not: one pass, without a tensor of results."""
    if not tensor.numel():
        return True
    return all(math.isfinite(extreme) for extreme in torch.stack(tensor.aminmax()).tolist())


def shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A row of all items as tensors of these shapes, on their devices."""
    pieces = torch.split(flat, [one.numel() for one in like])
    return [piece.view(one.shape).to(one.device) for piece, one in zip(pieces, like, strict=True)]
