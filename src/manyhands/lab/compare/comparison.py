"""What a comparison runs, in which order, and what it measures the time to; nothing is run here.

Repeats are interleaved, so that a machine which grows slower or faster over the minutes does so for all alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.errors import UserError, nearest
from manyhands.observe.analyse.curves import lower_is_better
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy

DEFAULT_STRATEGIES = "allreduce; central; ps; ps consistency=bounded:4; ps consistency=async; hogwild"
"""One of each kind that trains any task."""

_TARGET = re.compile(r"\s*(?P<metric>[^<>=\s]+)\s*(?P<sign><=|>=|=)\s*(?P<value>\S+)\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A value of a metric that a run reaches or does not; `chosen` where nobody asked for it."""

    metric: str
    value: float
    lower: bool  # whether smaller values are better ones
    chosen: bool = False

    @classmethod
    def parse(cls, text: str) -> Target:
        match = _TARGET.fullmatch(text)
        if match is None:
            raise UserError(f"target {text!r} is not a metric and a value; write it as accuracy=0.95")
        try:
            value = float(match["value"])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"target {text!r}: {match['value']!r} is not a number; write it as accuracy=0.95")
        lower = match["sign"] == "<=" if match["sign"] != "=" else lower_is_better(match["metric"])
        return cls(metric=match["metric"], value=value, lower=lower)

    def require_known(self, metrics: Sequence[str]) -> None:
        if not metrics:
            raise UserError(f"target {self.metric}: the task has no evaluation data to measure it on")
        if self.metric not in metrics:
            raise UserError(
                f"target {self.metric}: the task has no such metric; {nearest(self.metric, metrics)}"
            )

    def reached_by(self, value: float) -> bool:
        return value <= self.value if self.lower else value >= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.lower else '≥'} {self.value:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of a comparison: which strategy (by its place in the list), which time."""

    place: int
    repeat: int

    def folder(self, strategy: Strategy) -> str:
        """The name of its run directory: `05-ps-2` is the second run of the fifth strategy."""
        return f"{self.place + 1:02d}-{strategy.word}-{self.repeat + 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far an experiment of several runs is."""

    done: int
    runs: int
    current: str  # what runs now
    seconds_left: float | None  # None before the first run has ended


def parse_strategies(text: str) -> tuple[Strategy, ...]:
    """Strategies separated by semicolons; a UserError names the first bad one, or one that stands there twice."""
    check_separators("--strategies", text)
    strategies = [Strategy.parse(part) for part in text.split(";") if part.strip()]
    if not strategies:
        raise UserError(
            f"--strategies {text!r} is empty; separate strategies by semicolons, such as 'allreduce; ps'"
        )
    for place, strategy in enumerate(strategies):
        if strategy in strategies[:place]:
            raise UserError(
                f"--strategies has {str(strategy)!r} twice; --repeats runs each of them several times"
            )
    return tuple(strategies)


def check_separators(option: str, text: str) -> None:
    """UserError where commas separate strategies; settings may have commas, as in `cuts=1,2`."""
    comma = rf"\s*,\s*(?=(?:{'|'.join(STRATEGIES)})(?:[\s,;]|$))"
    if re.search(comma, text):
        fixed = re.sub(comma, "; ", text)
        raise UserError(f"{option} {text!r}: separate strategies by semicolons, not commas; write {fixed!r}")


def trials(strategies: int, repeats: int) -> list[Trial]:
    """All runs in their order: every strategy once, then every one again."""
    if repeats < 1:
        raise UserError(f"--repeats {repeats} must be at least 1")
    return [Trial(place=place, repeat=repeat) for repeat in range(repeats) for place in range(strategies)]


def workers_of(strategy: Strategy, workers: int) -> int:
    """How many workers a strategy is compared with: no more than it can have, whatever the others have."""
    return workers if strategy.most_workers is None else min(workers, strategy.most_workers)


def default_target(finals: Sequence[Sequence[Mapping[str, float]]]) -> Target | None:
    """What the better half of the strategies reached in each of their runs, in four digits; None for no metric."""
    finals = [runs for runs in finals if runs]
    every = [final for runs in finals for final in runs]
    shared = [name for name in every[0] if all(name in final for final in every)] if every else []
    shared = [name for name in shared if name != "loss"]  # of a single batch: it jumps about
    shared = [name for name in shared if all(math.isfinite(final[name]) for final in every)]
    if not shared:
        return None
    metric = next((name for name in shared if not lower_is_better(name)), shared[0])
    lower = lower_is_better(metric)
    reached = sorted(
        ((max if lower else min)(final[metric] for final in runs) for runs in finals), reverse=not lower
    )
    value = reached[(len(reached) - 1) // 2]
    # In four digits, and no harder to reach: whoever computes the same in another order reaches it, too.
    shown = float(f"{value:.4g}")
    if value not in (0, shown) and (value < shown) != lower:
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
        shown = float(f"{shown + (unit if lower else -unit):.4g}")
    return Target(metric=metric, value=shown, lower=lower, chosen=True)
