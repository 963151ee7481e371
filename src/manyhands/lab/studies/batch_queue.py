"""Inputs that arrive one by one at a server that computes them in batches: when each is finished; pure.

With batches of one, times that are all alike and random arrivals this is the queue M/D/1, whose means are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """When a free server begins a batch: as soon as it is full, or its oldest input has waited so long."""

    name: str
    most: int  # inputs in a batch
    wait_s: float = 0.0


def random_arrivals(rate: float, count: int, seed: int = 0) -> Times:
    """A Poisson process: so many inputs, `rate` a second in the mean."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def finish_times(arrivals: Times, rule: BatchRule, seconds_of: Callable[[int], float]) -> Times:
    """When the batch of each input ends, where a batch of so many takes `seconds_of` it; in the order of arrivals."""
    finished, count = np.empty_like(arrivals), len(arrivals)
    first, free_at = 0, 0.0
    while first < count:
        full_at = float(arrivals[min(first + rule.most, count) - 1])  # nobody comes after the last input
        begin = max(free_at, min(full_at, float(arrivals[first]) + rule.wait_s))
        last = min(first + rule.most, int(np.searchsorted(arrivals, begin, "right")))
        free_at = begin + seconds_of(last - first)
        finished[first:last] = free_at
        first = last
    return finished


def mean_in_system(arrivals: Times, finished: Times) -> float:
    """How many inputs are waiting or computed, averaged over the time until the last is finished."""
    times = np.concatenate([arrivals, finished])
    order = np.argsort(times, kind="stable")
    inside = np.cumsum(np.concatenate([np.ones(len(arrivals)), -np.ones(len(finished))])[order])
    times = times[order]
    return float((inside[:-1] * np.diff(times)).sum() / times[-1])
