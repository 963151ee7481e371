"""Speed over the number of workers: speed-ups, Amdahl's fit, and the knee beyond which more workers hardly help.

Amdahl (1967): if a share s of a step does not get shorter with more workers, n of them are
S(n) = 1 / (s + (1 - s) / n) times as fast, and never more than 1 / s times. Written 1 / S - 1 / n = s (1 - 1 / n),
it is linear in s, and the least-squares s is a quotient of two sums. The law is about processors, so only the numbers
of workers that have a core each are fitted: what workers lose that share a core is no serial part of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = [
    "HALF",
    "ScalingCurve",
    "ScalingPoint",
    "amdahl_speedup",
    "find_knee",
    "fit_amdahl",
    "scaling_curve",
]

HALF = 0.5
"""More workers are worth it as long as they bring at least this part of what they would bring at best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One number of workers."""

    workers: int
    samples_per_s: float
    """The median over the repeats."""
    low: float
    high: float
    speedup: float
    """Times as fast as one worker."""
    amdahl: float | None
    """What the fit gives for so many workers with a core each; None where nothing could be fitted."""
    forecast: float
    """What the simulator says of so many workers on the cores there are."""
    waiting: float = 0.0
    """The share of the workers' time."""

    @property
    def efficiency(self) -> float:
        """Of the speed-up that as many workers have at best."""
        return self.speedup / self.workers

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: getattr(self, name) for name in self.__slots__} | {"efficiency": self.efficiency}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCurve:
    """All of them, in order."""

    points: tuple[ScalingPoint, ...]
    cores: int
    """That all of them had."""
    serial_share: float | None
    """Amdahl's s; None where fewer than two numbers of workers had a core each."""
    knee: int
    """The number of workers up to which more of them were worth it."""
    is_past: bool
    """Whether more than that were measured, and were not worth it."""

    @property
    def limit(self) -> float | None:
        """The speed-up that no number of workers goes beyond, by Amdahl's fit; None where there is no fit."""
        if self.serial_share is None:
            return None
        return 1 / self.serial_share if self.serial_share > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        limit = self.limit if self.limit is not None and math.isfinite(self.limit) else None
        return {
            "cores": self.cores,
            "points": [point.to_dict() for point in self.points],
            "serial_share": self.serial_share,
            "limit": limit,
            "knee": self.knee,
            "is_past": self.is_past,
        }


def amdahl_speedup(serial_share: float, workers: float) -> float:
    """S(n) = 1 / (s + (1 - s) / n)."""
    return 1 / (serial_share + (1 - serial_share) / workers)


def fit_amdahl(speedups: Mapping[int, float]) -> float | None:
    """The share s, from 0 to 1, that is nearest to these speed-ups by the squares of 1 / S - 1 / n - s (1 - 1 / n).

    None where there is nothing but one worker, of which no share can be told.
    """
    above = sum((1 - 1 / n) * (1 / speed - 1 / n) for n, speed in speedups.items() if speed > 0)
    below = sum((1 - 1 / n) ** 2 for n, speed in speedups.items() if speed > 0)
    return min(1.0, max(0.0, above / below)) if below else None


def find_knee(speedups: Mapping[int, float]) -> tuple[int, bool]:
    """The last number of workers that was worth it, and whether one after it was not.

    Going from m workers to n is worth it where the speed grows by at least half as much as their number does:
    S(n) / S(m) - 1 >= (n / m - 1) / 2.
    """
    counts = sorted(speedups)
    for fewer, more in pairwise(counts):
        if speedups[more] / speedups[fewer] - 1 < HALF * (more / fewer - 1):
            return fewer, True
    return counts[-1], False


def scaling_curve(
    rates: Mapping[int, Sequence[float]],
    forecast: Mapping[int, float],
    waiting: Mapping[int, float],
    cores: int,
) -> ScalingCurve:
    """From samples per second, run by run, for each number of workers (1 among them), and the forecast speed-ups."""
    medians = {workers: statistics.median(of_runs) for workers, of_runs in sorted(rates.items())}
    speedups = {workers: rate / medians[1] for workers, rate in medians.items()}
    serial = fit_amdahl({workers: speed for workers, speed in speedups.items() if workers <= cores})
    knee, is_past = find_knee(speedups)
    points = tuple(
        ScalingPoint(
            workers=workers,
            samples_per_s=rate,
            low=min(rates[workers]),
            high=max(rates[workers]),
            speedup=speedups[workers],
            amdahl=None if serial is None else amdahl_speedup(serial, workers),
            forecast=forecast[workers],
            waiting=waiting.get(workers, 0.0),
        )
        for workers, rate in medians.items()
    )
    return ScalingCurve(points=points, cores=cores, serial_share=serial, knee=knee, is_past=is_past)
