"""How wrong predictions were: pairs of a predicted and a seen step time, and what they say of the next prediction.

Of each kind of strategy the median of seen ÷ predicted corrects the next prediction, and the spread around it is its
error. Few pairs say little: both are drawn towards what is usual, as if two usual pairs had been seen besides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.strategy import Strategy

__all__ = ["Correction", "SeenStep", "TrackRecord", "cost_class"]

# Of the logarithm, where nothing is known: the residuals of benchmarks/plan.py
_USUAL_SPREAD = 0.15
_USUAL_PAIRS = 2
_NINE_OF_TEN = 1.645  # standard deviations
_MOST_PAIRS = 20  # of one kind that count: machines change


def cost_class(strategy: Strategy) -> str:
    """The kind of strategies whose steps cost alike, and whose predictions err alike."""
    return strategy.facts.cost_class or strategy.word


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenStep:
    """One prediction, before any correction, and what was seen."""

    kind: str  # see `cost_class`
    predicted_s: float
    seen_s: float

    @property
    def log_ratio(self) -> float:
        return math.log(self.seen_s / self.predicted_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What a prediction is multiplied by, and by what share of it nine of ten are off at the most then."""

    factor: float = 1.0
    error: float = math.expm1(_NINE_OF_TEN * _USUAL_SPREAD)


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """The pairs of one machine, the oldest first; `noise` is how much the task's own measurements differed."""

    pairs: Sequence[SeenStep] = ()
    noise: float = 0.0
    spread: float = _USUAL_SPREAD  # that is usual

    def of(self, kind: str) -> Correction:
        ratios = [one.log_ratio for one in self.pairs if one.kind == kind][-_MOST_PAIRS:]
        count = len(ratios)
        middle = statistics.median(ratios) if ratios else 0.0
        shift = middle * count / (count + _USUAL_PAIRS)
        squares = sum((one - shift) ** 2 for one in ratios) + _USUAL_PAIRS * self.spread**2
        # A median of noisy steps is itself uncertain: by a quarter of their spread, for about a dozen of them.
        spread = math.hypot(math.sqrt(squares / (count + _USUAL_PAIRS)), self.noise / 4)
        return Correction(factor=math.exp(shift), error=math.expm1(_NINE_OF_TEN * spread))
