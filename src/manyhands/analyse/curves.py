"""Curves of bounded length, however long the run: points thinned evenly, and rates over bins that grow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.analyse.view import Curve
from manyhands.record.events import Records
from manyhands.record.plain import number, text, whole

__all__ = ["MAX_POINTS", "HistoryCurves", "RateCurve", "ThinnedCurve"]

MAX_POINTS = 400
"""Of a curve as it is shown."""

_FIRST_BIN_NS = 250_000_000
_MAX_METRICS = 100


class ThinnedCurve:
    """Points as they come: all of them, then every second, every fourth and so on, and always the newest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._points: list[tuple[float, float, float]] = []
        self._newest: tuple[float, float, float] | None = None
        self._seen = 0
        self._stride = 1

    def add(self, step: float, seconds: float, value: float) -> None:
        """One more point; a value that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._newest = (step, seconds, value)
        if self._seen % self._stride == 0:
            self._points.append(self._newest)
            if len(self._points) >= MAX_POINTS:
                self._points = self._points[::2]
                self._stride *= 2
        self._seen += 1

    def curve(self, later_s: float = 0.0) -> Curve:
        """What is left of the points, `later_s` added to their seconds."""
        points = list(self._points)
        if self._newest is not None and points[-1] is not self._newest:
            points.append(self._newest)
        return Curve(
            name=self.name,
            steps=tuple(step for step, _, _ in points),
            seconds=tuple(seconds + later_s for _, seconds, _ in points),
            values=tuple(value for _, _, value in points),
        )


class RateCurve:
    """Samples per second over bins of time, whose length doubles when there are too many of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._first_bin = 0
        self._bin_ns = _FIRST_BIN_NS
        self._samples: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, steps: Records) -> None:
        """Count the samples of STEP records at the time each step ended."""
        if not len(steps):
            return
        ends = (steps["start_ns"] + steps["duration_ns"]).astype(np.int64)
        first, last = int(ends.min()) // self._bin_ns, int(ends.max()) // self._bin_ns
        if len(self._samples):
            first = min(first, self._first_bin)
            last = max(last, self._first_bin + len(self._samples) - 1)
        while last - first >= MAX_POINTS:
            self._coarsen()
            first, last = first // 2, last // 2
        self._reach(first, last)
        place = ends // self._bin_ns - self._first_bin
        np.add.at(self._samples, place, steps["count"])
        np.maximum.at(self._steps, place, steps["step"] + 1)

    def curve(self, first_ns: int) -> Curve:
        """The rate in each bin but the newest, which is not over; one bin alone is shown as it is."""
        whole = slice(0, max(1, len(self._samples) - 1))
        ends = (self._first_bin + 1 + np.arange(len(self._samples))) * self._bin_ns
        return Curve(
            name=self.name,
            steps=tuple(np.maximum.accumulate(self._steps)[whole].astype(float).tolist()),
            seconds=tuple(((ends - first_ns) / 1e9)[whole].tolist()),
            values=tuple((self._samples * (1e9 / self._bin_ns))[whole].tolist()),
        )

    def _reach(self, first: int, last: int) -> None:
        """Have a place for every bin from `first` to `last`."""
        if not len(self._samples):
            self._first_bin = first
        before = self._first_bin - first
        after = last - (self._first_bin + len(self._samples) - 1)
        self._samples = np.pad(self._samples, (before, max(0, after)))
        self._steps = np.pad(self._steps, (before, max(0, after)))
        self._first_bin = first

    def _coarsen(self) -> None:
        odd_begin, odd_end = self._first_bin % 2, (self._first_bin + len(self._samples)) % 2
        self._bin_ns *= 2
        self._first_bin //= 2
        if not len(self._samples):
            return
        pairs = [
            np.pad(column, (odd_begin, odd_end)).reshape(-1, 2) for column in (self._samples, self._steps)
        ]
        self._samples, self._steps = pairs[0].sum(axis=1), pairs[1].max(axis=1)


class HistoryCurves:
    """The rows of the history as curves."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.final: dict[str, float] = {}
        self._loss = ThinnedCurve("loss")
        self._metrics: dict[str, ThinnedCurve] = {}
        self._before_s = 0.0  # what earlier parts of a resumed run took
        self._last_s = 0.0

    def add(self, row: Mapping[str, Any]) -> bool:
        """One row as it stands in metrics.jsonl; False where it is none that a run writes, and is left out."""
        step, at_s = whole(row.get("step")), number(row.get("at_s") or 0.0)
        loss, metrics = row.get("loss"), row.get("metrics")
        if step is None or step < 0 or at_s is None or not (loss is None or number(loss) is not None):
            return False
        if not (metrics is None or isinstance(metrics, Mapping)):
            return False
        if at_s < self._last_s / 2:  # the clock of a resumed run begins anew
            self._before_s += self._last_s
        self._last_s = at_s
        self.step = max(self.step, step)
        if loss is not None:
            self.loss = float(loss)
            self._loss.add(step, self._before_s + at_s, self.loss)
        if metrics is not None:
            named = {text(name): number(value) for name, value in metrics.items()}
            self.final = {name: value for name, value in named.items() if value is not None}
            for name, value in self.final.items():
                if name in self._metrics or len(self._metrics) < _MAX_METRICS:
                    curve = self._metrics.setdefault(name, ThinnedCurve(name))
                    curve.add(step, self._before_s + at_s, value)
        return True

    def curves(self, later_s: float) -> list[Curve]:
        """`loss` first, then one for each metric."""
        return [self._loss.curve(later_s), *(curve.curve(later_s) for curve in self._metrics.values())]
