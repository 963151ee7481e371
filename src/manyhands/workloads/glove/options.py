"""What word vectors are learned from, and with: the settings of counting, and those of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.strategy import Strategy
from manyhands.workloads.task_options import CheckedOptions, memory_option, option

BATCH = 1024  # records at a time where a strategy works on batches and no other number is given
WEIGHTINGS: dict[str, Callable[[int], NDArray[np.float64]]] = {
    "distance": lambda window: 1.0 / np.arange(1, window + 1),
    "count": lambda window: np.ones(window),
}
"""What a pair of words counts, by their distance from 1 to the window: 1/distance, as published, or 1."""
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}


@dataclass(frozen=True, kw_only=True)
class CountingOptions:
    """What is counted how, and who trains on it: `workers` threads count; as many train, under `single` one."""

    min_count: int = option(5, "leave out words that occur less often", at_least=1)
    max_vocab: int | None = option(None, "keep this many of the most frequent words", at_least=2)
    window: int = option(15, "context words on each side", at_least=1)
    symmetric: bool = option(True, "use the left context only", flag="--asymmetric")
    weighting: str = option("distance", "pair weight: distance (1/distance) or count (1)", choices=WEIGHTINGS)
    diagonal: bool = option(True, "leave out pairs of a word with itself", flag="--no-diagonal")
    memory_bytes: int = memory_option("limit for counting and shuffling; more goes to disk", flag="--memory")
    workers: int = option(2, "counting threads and training workers", at_least=1)
    strategy: str = option("hogwild", "single, hogwild, allreduce, mirrored, tensor or ps, with settings")
    keep_counts: bool = option(False, "keep the records as cooccurrence.bin", flag="--keep-counts")

    @property
    def training_workers(self) -> int:  # `single` is one, whoever counted
        return min(self.workers, Strategy.parse(self.strategy).most_workers or self.workers)


@dataclass(frozen=True, kw_only=True)
class GloveOptions(CheckedOptions):
    """What to train and for how long."""

    dim: int = option(50, "dimensions of a vector", at_least=1, at_most=100_000)
    passes: int = option(15, "passes over all records", at_least=1, at_most=10**9)
    x_max: float = option(100.0, "count at which a record reaches full weight", above=0)
    """Below it a record weighs (count / x_max) ** alpha."""
    alpha: float = option(0.75, "exponent of the weight of smaller counts", at_least=0)
    rate: float = option(0.05, "learning rate of AdaGrad", above=0)
    """Divided by the root of the accumulators, which start at 1."""
    batch: int = option(1, "records per update", at_least=1, at_most=2**24)
    """1 is the published rule, one after the other; more are summed row by row first."""
    seed: int = option(0, "fixes initial values and the order of records", at_least=0, at_most=2**64 - 1)
    dtype: str = option("float32", "dtype of the parameters", choices=_DTYPES, hidden=True)
    allow_overload: bool = option(False, "start even if this host seems too small for the workers")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    def settings(self) -> NDArray[np.float64]:
        return np.array([self.x_max, self.alpha, self.rate], np.float64)


def usual_batch(strategy: str | Strategy) -> int:
    """How many records a strategy takes at a time where no number is given: one, or `BATCH`."""
    return BATCH if Strategy.parse(strategy).facts.record_order is None else 1
