"""Updates as integers modulo 2ᵏ, so that masks cancel exactly and sums do not depend on their order.

    x ──clip to ±c──► round(x / step), step = c / (2ᵇ⁻¹ - 1) ──times the weight w──► modulo 2ᵏ

A vector is w·q for each item, and then w itself: the server learns the sum of weights and no single one. Rounding is to
the nearest, ties to even, so that a mean is off by at most half a step. n clients of the largest weight, with the
largest numbers, must stay below 2ᵏ⁻¹ (one bit is the sign), or the configuration is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.errors import UserError, check_count
from manyhands.strategies.federated.client_updates import ClientUpdate

RINGS: Final[dict[int, np.dtype[np.unsignedinteger]]] = {  # the k of 2ᵏ, and words that count modulo that
    k: np.dtype(kind) for k, kind in ((16, np.uint16), (32, np.uint32), (64, np.uint64))
}
MOST_WEIGHT: Final = 2**20  # the bound of a client's weight, unless another is given

LOSS_ITEMS: Final = 2
Words = NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedPoint:
    """How numbers become words, and their sum numbers again; UserError where a field makes no sense."""

    clip: float = 8.0  # the largest absolute value of an item; what is larger is clipped to it
    bits: int = 24  # bits of an item, including its sign
    max_weight: int = MOST_WEIGHT  # what a client weighs at most; who says more counts for so much
    ring: int = 64  # k of modulo 2ᵏ: 16, 32 or 64

    def __post_init__(self) -> None:
        if not 0 < self.clip < math.inf:
            raise UserError(f"range={self.clip:g}: must be a number above 0")
        if not 2 <= self.bits <= 32:
            raise UserError(f"bits={self.bits}: must be an integer from 2 to 32")
        check_count("max_weight", self.max_weight)
        if self.ring not in RINGS:
            raise UserError(f"ring={self.ring}: must be 16, 32 or 64")

    @property
    def most(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    @property
    def step(self) -> float:
        """The distance of two neighbouring values; a mean is off by at most half of it."""
        return self.clip / self.most

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return RINGS[self.ring]

    @property
    def most_clients(self) -> int:
        """How many clients the words can hold: the largest n with n · max_weight · most < 2ᵏ⁻¹."""
        return int(2 ** (self.ring - 1) - 1) // (self.max_weight * self.most)

    def check_capacity(self, clients: int) -> None:
        if clients > self.most_clients:
            raise UserError(
                f"bits={self.bits}: {clients} clients of a weight of up to {self.max_weight} overflow a sum modulo "
                f"2^{self.ring}, which has room for {self.most_clients}; use fewer bits or clients, or a smaller weight"
            )

    def encode(self, values: NDArray[np.floating], weight: int) -> Words:
        """A client's words, its weight the last; UserError if a value is not finite or the weight below 1."""
        values = np.asarray(values, dtype=np.float64)
        if not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            why = f"item {first} of the update is {values[first]}; only finite numbers can be summed"
            raise UserError(why)
        check_count("weight", weight)
        weight = min(weight, self.max_weight)
        whole = np.rint(np.clip(values, -self.clip, self.clip) / self.step).astype(np.int64)
        np.clip(whole, -self.most, self.most, out=whole)  # the division may round up by one
        return np.append(whole * weight, weight).astype(self.dtype)

    def decode(self, words: Words) -> tuple[NDArray[np.int64], int]:
        signed = words.view(f"i{words.itemsize}").astype(np.int64)
        return signed[:-1], int(signed[-1])

    def may_be_sum(self, words: Words, clients: int) -> bool:
        """Whether so many clients, who kept within the bounds, can have sent this; random words cannot be."""
        items, weight = self.decode(words)
        most = weight * self.most
        in_bounds = -most <= int(items.min()) and int(items.max()) <= most
        return clients <= weight <= clients * self.max_weight and in_bounds


def words_of(fixed: FixedPoint, update: ClientUpdate, weight: float) -> Words:
    if weight != int(weight) or weight < 1:
        why = f"secure=yes: client {update.client} weighs {weight:g}; only integers of at least 1 are summed"
        raise UserError(why)
    flat = torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in update.change]).numpy()
    whole = math.floor(update.loss)
    loss = [whole * fixed.step, (update.loss - whole) * fixed.clip]
    return fixed.encode(np.append(flat, loss), int(weight))


def sum_of(fixed: FixedPoint, words: Words) -> tuple[Tensor, float, float]:
    """The sum of weight times update, all tensors in a row in double precision; of weight times loss; of weights."""
    items, weight = fixed.decode(words)
    sums = torch.from_numpy(items.astype(np.float64) * np.float64(fixed.step))
    whole, rest = (float(one) for one in items[-LOSS_ITEMS:])
    return sums[:-LOSS_ITEMS], whole + rest / fixed.most, float(weight)
