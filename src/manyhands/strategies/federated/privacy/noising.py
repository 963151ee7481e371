"""One round's noise: how much, and how a client's vector and the server's sum are made.

A client's vector is its clipped update and, where the clip adapts, one more item that says whether it was clipped:
±1/2, scaled so that all items get noise of one deviation. With the bound C and a cohort of m, the noise multiplier z is
shared between both as in the paper on adaptive clipping (Theorem 1):

    1/z² = 1/z_u² + 1/(2 s)²,   s = max(m/20, z)        deviation = z_u · C

so that the vector as a whole is the Gaussian mechanism of multiplier z, whatever C is.

With noise by clients (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation", ICML 2021) the vector is cut to whole steps towards nought, which makes none longer, and each
client adds a discrete Gaussian of variance deviation²/t, with t the fewest clients of which the secure sum shows
anything. The sum then has at least the variance of the server's noise, whoever has left. It is a discrete Gaussian but
for a divergence of τ = 10 Σₖ exp(-2π² v k/(k+1)) per item, v a client's variance in steps; from `LEAST_STEPS` on that
is below 10⁻²⁷⁰ and is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.strategies.federated.privacy.noise_draws import UniformDraws, add_gaussian, discrete_gaussian

__all__ = ["LEAST_STEPS", "NoiseShare", "RoundNoise"]

LEAST_STEPS: Final = 8.0
"""The least deviation of a client's noise, in steps of the fixed point."""
TAIL: Final = 12.0
"""Capacity for a client's noise, in deviations; the chance of exceeding it is 10⁻³²."""
_BIT_SHARE: Final = 20
"""s is the cohort by this, as in the paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseShare:
    """How a noise multiplier is shared between the update and the item that says whether it was clipped."""

    update: float
    """The multiplier of the update alone, z_u."""
    bit: float
    """The deviation of the noise of the sum of bits, s; 0 where there are none."""

    @classmethod
    def of(cls, noise: float, cohort: float, *, adapts: bool) -> NoiseShare:
        """The shares for rounds of `cohort` clients, on average."""
        if not adapts:
            return cls(update=noise, bit=0.0)
        if noise == 0:
            return cls(update=0.0, bit=0.0)
        bit = max(cohort / _BIT_SHARE, noise)
        return cls(update=1 / math.sqrt(noise**-2 - (2 * bit) ** -2), bit=bit)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundNoise:
    """The noise of a round in which updates are no longer than `bound`."""

    share: NoiseShare
    bound: float
    adapts: bool

    @property
    def deviation(self) -> float:
        return self.share.update * self.bound

    @property
    def bit_scale(self) -> float:
        """What a bit of one is worth in the vector."""
        return self.deviation / self.share.bit if self.share.bit else self.bound

    def vector(self, update: Tensor, within: bool) -> Tensor:
        if not self.adapts:
            return update
        bit = (0.5 if within else -0.5) * self.bit_scale
        return torch.cat([update, torch.tensor([bit], dtype=torch.float64)])

    def in_steps(
        self, vector: Tensor, step: float, clients: int, draws: UniformDraws | None
    ) -> NDArray[np.int64]:
        """A client's vector in whole steps, cut towards nought, with its share of the noise if it adds one.

        `clients` is the fewest whose sum is shown.
        """
        whole = np.trunc(vector.numpy() / step).astype(np.int64)
        if draws is not None and self.deviation:
            whole += discrete_gaussian(len(whole), self.deviation / step / math.sqrt(clients), draws)
        return whole

    def add(self, sums: Tensor, draws: UniformDraws) -> None:
        if self.deviation:
            add_gaussian(sums.numpy(), self.deviation, draws)

    def share_within(self, item: float, cohort: float) -> float:
        """The share of updates within the bound, from the noisy sum of the clients' indicators."""
        return item / self.bit_scale / cohort + 0.5

    def bounds_for(self, step: float, limit: float, clients: int) -> tuple[float, float]:
        """Between which the bound must stay where clients add noise: for enough steps, and for room up to `limit`."""
        mine = self.share.update / math.sqrt(clients)
        least = LEAST_STEPS * step / mine if mine else 0.0
        return least, limit / (1.0 + TAIL * mine)
