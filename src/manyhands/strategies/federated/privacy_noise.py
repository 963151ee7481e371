"""Where noise comes from, and its two forms.

A guarantee holds against whoever cannot guess the noise, so it is drawn from the operating system's generator and is no
function of the run's seed. `seeded_draws` is for tests: who knows the seed can take its noise off again.

The continuous Gaussian is rounded to a grid far finer than its deviation and far coarser than double precision, since
the last bits of a floating-point sum could tell what was added (Mironov, "On Significance of the Least Significant Bits
for Differential Privacy", CCS 2012); rounding what is already noisy costs no privacy. The discrete one is that of
Canonne, Kamath and Steinke ("The Discrete Gaussian for Differential Privacy", NeurIPS 2020), by rejection from a
discrete Laplace. Theirs is exact; here chances are in double precision, off by some 10⁻¹⁶ of themselves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.randomness import mix
from manyhands.errors import UserError
from manyhands.strategies.federated.client_updates import Tensors

UniformDraws = Callable[
    [int], NDArray[np.float64]
]  # so many independent uniform numbers, above 0 and up to 1
_GRID: Final = 2.0**-24  # what the continuous Gaussian is rounded to, in deviations
_AT_ONCE: Final = 1 << 18  # items drawn at once, so that the temporaries stay small


def system_draws(count: int) -> NDArray[np.float64]:
    """Of the operating system's generator, a cryptographic one."""
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


def seeded_draws(seed: int, *numbers: int) -> UniformDraws:
    """Draws that follow from a seed and a few numbers; for tests alone."""
    random = np.random.default_rng(mix(seed, *numbers))
    return lambda count: 1.0 - random.random(count)


def add_gaussian(sums: NDArray[np.float64], deviation: float, draws: UniformDraws) -> None:
    step = deviation * _GRID
    for begin in range(0, len(sums), _AT_ONCE):
        part = sums[begin : begin + _AT_ONCE]
        half = (len(part) + 1) // 2
        radius = np.sqrt(-2.0 * np.log(draws(half)))
        angle = (2.0 * math.pi) * draws(half)
        part += deviation * np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: len(part)]
        np.rint(part / step, out=part)
        part *= step


def discrete_gaussian(count: int, deviation: float, draws: UniformDraws) -> NDArray[np.int64]:
    """Integers, each k with a probability in proportion to exp(-k² / (2 deviation²)); deviation at least 1."""
    if not 1 <= deviation < 2.0**40:
        raise ValueError(f"a discrete Gaussian of deviation {deviation:g}: must be between 1 and 2^40")
    found, scale = np.empty(count, dtype=np.int64), math.floor(deviation) + 1
    for begin in range(0, count, _AT_ONCE):
        part = found[begin : begin + _AT_ONCE]
        done = 0
        while done < len(part):  # by rejection from a discrete Laplace
            size = np.floor(-scale * np.log(draws(len(part) - done)))
            negative = draws(len(size)) <= 0.5
            chance = np.exp(-((size - deviation**2 / scale) ** 2) / (2 * deviation**2))
            keep = chance >= draws(len(size))
            keep &= ~(negative & (size == 0))  # or zero would come twice as often
            some = np.where(negative, -size, size)[keep].astype(np.int64)
            part[done : done + len(some)] = some
            done += len(some)
    return found


# How long an update may be. `clip=1.0` shortens every update whose Euclidean norm, over all tensors together, is
# above 1. `clip=adaptive:0.5` follows a quantile of the norms (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially
# Private Learning with Adaptive Clipping", NeurIPS 2021): each client also says whether its norm was within the bound,
# and after a round bound ← bound · exp(-0.2 (share within - quantile)). As in the paper the first bound is 0.1.

FIRST_BOUND: Final = 0.1  # the first bound of an adaptive clip
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
                why = f"clip={text}: {number!r} is not a quantile between 0 and 1, as in adaptive:0.5"
                raise UserError(why)
            return cls(bound=FIRST_BOUND, quantile=quantile)
        bound = _number(text)
        if not 0 < bound < math.inf:
            why = f"clip={text}: must be a number above 0, adaptive:QUANTILE, or no for updates of any length"
            raise UserError(why)
        return cls(bound=bound)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def clipped(change: Tensors, bound: float) -> tuple[Tensor, bool]:
    """An update in one row, no longer than `bound`, and whether it was within; zero where it is not finite."""
    flat = torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in change])
    norm = float(torch.linalg.vector_norm(flat))
    if not math.isfinite(norm):
        return torch.zeros_like(flat), False
    return (flat, True) if norm <= bound else (flat.mul_(bound / norm), False)


def next_bound(bound: float, quantile: float, within: float) -> float:
    # the share has noise: a step of e⁵ and more says nothing, and could overflow
    return bound * math.exp(max(-5.0, min(5.0, -_RATE * (within - quantile))))


# One round's noise. A client's vector is its clipped update and, where the clip adapts, one item that says whether it
# was clipped: ±1/2, scaled so that all items get noise of one deviation. With the bound C and a cohort of m, the noise
# multiplier z is shared between both as in the paper on adaptive clipping (Theorem 1):
#
#     1/z² = 1/z_u² + 1/(2 s)²,   s = max(m/20, z)        deviation = z_u · C
#
# so that the vector as a whole is the Gaussian mechanism of multiplier z, whatever C is.
#
# With noise by clients (Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
# with Secure Aggregation", ICML 2021) the vector is cut to whole steps towards zero, which makes none longer, and each
# client adds a discrete Gaussian of variance deviation²/t, with t the fewest clients of which the secure sum shows
# anything. The sum then has at least the variance of the server's noise, whoever has left. It is a discrete Gaussian
# but for a divergence of τ = 10 Σₖ exp(-2π² v k/(k+1)) per item, v a client's variance in steps; from `LEAST_STEPS` on
# that is below 10⁻²⁷⁰ and is not counted.

LEAST_STEPS: Final = 8.0  # the least deviation of a client's noise, in steps of the fixed point
TAIL: Final = 12.0  # capacity for a client's noise, in deviations; the chance of exceeding it is 10⁻³²
_BIT_SHARE: Final = 20  # s is the cohort by this, as in the paper


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundNoise:
    """The noise of a round in which updates are at most as long as `bound`."""

    update: float  # the multiplier of the update alone, z_u
    bit: float  # the deviation of the noise of the sum of bits, s; 0 where there are none
    bound: float
    adapts: bool

    @classmethod
    def of(cls, noise: float, cohort: float, *, bound: float, adapts: bool) -> RoundNoise:
        if not adapts or noise == 0:
            return cls(update=noise, bit=0.0, bound=bound, adapts=adapts)
        bit = max(cohort / _BIT_SHARE, noise)
        update = 1 / math.sqrt(noise**-2 - (2 * bit) ** -2)
        return cls(update=update, bit=bit, bound=bound, adapts=adapts)

    @property
    def deviation(self) -> float:
        return self.update * self.bound

    @property
    def bit_scale(self) -> float:
        return self.deviation / self.bit if self.bit else self.bound

    def vector(self, update: Tensor, within: bool) -> Tensor:
        if not self.adapts:
            return update
        bit = (0.5 if within else -0.5) * self.bit_scale
        return torch.cat([update, torch.tensor([bit], dtype=torch.float64)])

    def in_steps(
        self, vector: Tensor, step: float, clients: int, draws: UniformDraws | None
    ) -> NDArray[np.int64]:
        """A client's vector in steps, cut towards zero, with its share of the noise; `clients`: the fewest of a sum."""
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
