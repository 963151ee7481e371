"""Examples of a chosen density, to see what it does to workers that update one memory without locks.

Each example has so many of the features, drawn alike, with values of 1 or -1, and a label by a hidden set of weights.
Two examples that are learned at the same time disturb each other where they share a feature: how likely that is follows
from the density alone (Niu, Recht, Ré and Wright, "HOGWILD!", 2011, call it the sparsity of the hypergraph).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manyhands.errors import UserError, check_count

_BLOCK = 4096  # examples drawn and written at a time
_NOISE = 0.1  # of labels, turned over


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseProblem:
    """How many examples of how many features, and how many of these each has."""

    features: int
    examples: int
    density: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.features < 1 or self.examples < 2:
            given = f"features={self.features}, examples={self.examples}"
            raise UserError(f"{given}: at least 1 feature and 2 examples are needed")
        if not 0 < self.density <= 1:
            raise UserError(f"density={self.density:g} must be above 0 and at most 1")
        check_count("seed", self.seed, 0)

    @property
    def nonzeros(self) -> int:
        return max(1, round(self.density * self.features))


def shared_chance(features: int, nonzeros: int) -> float:
    """How likely two examples share a feature: 1 - C(n - k, k) / C(n, k)."""
    if 2 * nonzeros > features:
        return 1.0
    apart = 2 * math.lgamma(features - nonzeros + 1) - math.lgamma(features - 2 * nonzeros + 1)
    return 1.0 - math.exp(apart - math.lgamma(features + 1))


def write_examples(problem: SparseProblem, path: Path) -> None:
    """Write the examples as a LIBSVM file; the same for the same problem."""
    draw = np.random.default_rng([problem.seed, problem.features, problem.nonzeros])
    hidden = draw.standard_normal(problem.features)
    with path.open("w") as file:
        for begin in range(0, problem.examples, _BLOCK):
            count = min(problem.examples - begin, _BLOCK)
            keys = draw.random((count, problem.features), np.float32)
            rows = np.sort(np.argpartition(keys, problem.nonzeros - 1, axis=1)[:, : problem.nonzeros], axis=1)
            signs = np.where(draw.random(rows.shape) < 0.5, -1, 1)  # or dense examples would all be the same
            yes = ((hidden[rows] * signs).sum(1) > 0) ^ (draw.random(count) < _NOISE)
            file.writelines(
                f"{'+1' if label else '-1'} {' '.join(f'{at}:{sign}' for at, sign in zip(row, own, strict=True))}\n"
                for label, row, own in zip(yes.tolist(), (rows + 1).tolist(), signs.tolist(), strict=True)
            )
