"""Where noise comes from, and its two forms.

A guarantee holds against whoever cannot guess the noise, so it is drawn from the operating system's generator and is no
function of the run's seed. `SeededDraws` is for tests: who knows the seed can take its noise off again.

The continuous Gaussian is rounded to a grid far finer than its deviation and far coarser than double precision, since
the last bits of a floating-point sum could tell what was added (Mironov, "On Significance of the Least Significant Bits
for Differential Privacy", CCS 2012); rounding what is already noisy costs no privacy. The discrete one is that of
Canonne, Kamath and Steinke ("The Discrete Gaussian for Differential Privacy", NeurIPS 2020), by rejection from a
discrete Laplace. Theirs is exact; here chances are in double precision, off by some 10⁻¹⁶ of themselves.
"""

from __future__ import annotations

import math
import os
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands.data.randomness import mix

__all__ = ["SeededDraws", "SystemDraws", "UniformDraws", "add_gaussian", "discrete_gaussian"]

_GRID: Final = 2.0**-24
"""What the continuous Gaussian is rounded to, in deviations."""
_AT_ONCE: Final = 1 << 18
"""Items drawn at once, so that the temporaries stay small."""


class UniformDraws(Protocol):
    """A source of independent uniform random numbers."""

    def uniform(self, count: int) -> NDArray[np.float64]: ...


class SystemDraws:
    """The operating system's generator, a cryptographic one."""

    def uniform(self, count: int) -> NDArray[np.float64]:
        words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
        return ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53


class SeededDraws:
    """Numbers that follow from a seed and a few others; for tests alone."""

    def __init__(self, seed: int, *numbers: int) -> None:
        self._random = np.random.default_rng(mix(seed, *numbers))

    def uniform(self, count: int) -> NDArray[np.float64]:
        return 1.0 - self._random.random(count)


def add_gaussian(sums: NDArray[np.float64], deviation: float, draws: UniformDraws) -> None:
    """Add noise of this deviation to each item in place, and round to the grid."""
    step = deviation * _GRID
    for begin in range(0, len(sums), _AT_ONCE):
        part = sums[begin : begin + _AT_ONCE]
        part += deviation * _normal(len(part), draws)
        np.rint(part / step, out=part)
        part *= step


def discrete_gaussian(count: int, deviation: float, draws: UniformDraws) -> NDArray[np.int64]:
    """Integers, each k with a probability in proportion to exp(-k² / (2 deviation²)); deviation at least 1."""
    if not 1 <= deviation < 2.0**40:
        raise ValueError(f"a discrete Gaussian of deviation {deviation:g}: from 1 to 2^40 is provided for")
    found = np.empty(count, dtype=np.int64)
    for begin in range(0, count, _AT_ONCE):
        part = found[begin : begin + _AT_ONCE]
        done = 0
        while done < len(part):
            some = _accepted(len(part) - done, deviation, draws)
            part[done : done + len(some)] = some
            done += len(some)
    return found


def _normal(count: int, draws: UniformDraws) -> NDArray[np.float64]:
    half = (count + 1) // 2
    radius = np.sqrt(-2.0 * np.log(draws.uniform(half)))
    angle = (2.0 * math.pi) * draws.uniform(half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _accepted(count: int, deviation: float, draws: UniformDraws) -> NDArray[np.int64]:
    scale = math.floor(deviation) + 1
    size = np.floor(-scale * np.log(draws.uniform(count)))
    negative = draws.uniform(count) <= 0.5
    keep = np.exp(-((size - deviation**2 / scale) ** 2) / (2 * deviation**2)) >= draws.uniform(count)
    keep &= ~(negative & (size == 0))  # or nought would come twice as often
    found: NDArray[np.int64] = np.where(negative, -size, size)[keep].astype(np.int64)
    return found
