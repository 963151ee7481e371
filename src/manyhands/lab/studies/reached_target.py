"""When a run first reached a loss: pure, from the rows of its history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

_LEAST_WINDOW = 4
_WINDOWS = 10  # in a run
_MARGIN = 1.02
_WARM = 4  # steps that do not count: memory is taken, links are opened


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The mean loss of the last few batches, at the end of each, in the order of time."""

    steps: tuple[int, ...]  # how many batches were done by then
    seconds: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> LossCurve:
        """Of the steps in a history; those that workers take on their own, in the order in which they ended."""
        known = [row for row in rows if "loss" in row and "at_s" in row]
        ended = [
            (row["at_s"], row["loss"]) for row in sorted(known, key=lambda row: (row["at_s"], row["step"]))
        ]
        window = max(1, min(len(ended), max(_LEAST_WINDOW, len(ended) // _WINDOWS)))
        means = [
            sum(loss for _, loss in ended[end - window : end]) / window
            for end in range(window, len(ended) + 1)
        ]
        steps = tuple(range(window, len(ended) + 1))
        return cls(steps, tuple(at_s for at_s, _ in ended[window - 1 :]), tuple(means))

    @property
    def lowest(self) -> float:
        return min(self.losses)

    def reached(self, target: float) -> tuple[int, float] | None:
        """The batches and the seconds until the loss was first at most `target`; None where it never was."""
        for steps, seconds, loss in zip(self.steps, self.seconds, self.losses, strict=True):
            if loss <= target:
                return steps, seconds
        return None


def common_target(curves: Iterable[LossCurve]) -> float:
    """A loss that all of them reach: a little above the highest of their lowest ones."""
    return _MARGIN * max(curve.lowest for curve in curves)


def mean_step_s(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The time of a step, of which one in a few may take long, as under `local`; None where too few were done to tell.

    The median of three parts of the run, so that a moment in which the machine was busy does not count; not of single
    steps, or the long ones would not count either.
    """
    ends: list[float] = sorted(row["at_s"] for row in rows if "loss" in row and "at_s" in row)[_WARM:]
    part = (len(ends) - 1) // 3
    if part < 1:
        return None
    return median((ends[at + part] - ends[at]) / part for at in (0, part, 2 * part))


def crossing(xs: Sequence[float], one: Sequence[float | None], other: Sequence[float | None]) -> float | None:
    """Where the curve of `one` first rises above that of `other`, on straight lines between points; None: nowhere.

    A value of None is worse than any other.
    """
    ends = [(x, _difference(a, b), None in (a, b)) for x, a, b in zip(xs, one, other, strict=True)]
    if ends[0][1] > 0:
        return xs[0]
    for (x, before, is_open), (beyond, after, opens) in pairwise(ends):
        if after > 0:
            return beyond if is_open or opens else x - before / (after - before) * (beyond - x)
    return None


def _difference(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return float(one is None) - float(other is None)
    return one - other
