"""Curves of bounded length for runs of any length: evenly thinned points, and rates over bins that double."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.observe.analyse.acting_history import ActingHistory
from manyhands.observe.analyse.thinned import MAX_POINTS, ThinnedCurve
from manyhands.observe.analyse.view import Curve
from manyhands.observe.record.checked_values import final_loss, last_row, logged_values, number, text, whole
from manyhands.observe.record.events import Records

_FIRST_BIN_NS = 250_000_000
_PARTS = 1_000_000  # per sample
_MAX_METRICS = 100


class RateCurve:
    """Samples per second over bins of time, whose length doubles when there are too many of them.

    A step's samples are spread evenly over the time that it took, so that steps which are longer than a bin give a
    steady rate and no spikes. Whole millionths of a sample are counted, and a step's parts add up to all of it however
    it is cut: the same events give the same curve in whatever portions they arrive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._first_bin = 0
        self._bin_ns = _FIRST_BIN_NS
        self._parts: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # in millionths of a sample
        self._steps: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._begin_ns = 0
        self._newest: dict[int, tuple[int, int]] = {}  # start and end of each role's newest step

    def add(self, steps: Records) -> None:
        """Add STEP records, those of one role in recording order."""
        if not len(steps):
            return
        starts = steps["start_ns"].astype(np.int64)
        # A corrupt or foreign file may have times that no clock produces.
        ends = np.maximum(starts + 1, starts + steps["duration_ns"].astype(np.int64))
        self._begin_ns = min(self._begin_ns or int(starts.min()), int(starts.min()))
        both = zip(starts.tolist(), ends.tolist(), strict=True)
        self._newest.update(zip(steps["role"].tolist(), both, strict=True))
        first, last = int(starts.min()) // self._bin_ns, int(ends.max()) // self._bin_ns
        if len(self._parts):
            first = min(first, self._first_bin)
            last = max(last, self._first_bin + len(self._parts) - 1)
        while last - first >= MAX_POINTS:
            odd_begin, odd_end = self._first_bin % 2, (self._first_bin + len(self._parts)) % 2
            self._bin_ns *= 2
            self._first_bin //= 2
            if len(self._parts):
                columns = (self._parts, self._steps)
                pairs = [np.pad(one, (odd_begin, odd_end)).reshape(-1, 2) for one in columns]
                self._parts, self._steps = pairs[0].sum(axis=1), pairs[1].max(axis=1)
            first, last = first // 2, last // 2
        if not len(self._parts):
            self._first_bin = first
        before = self._first_bin - first
        after = last - (self._first_bin + len(self._parts) - 1)
        self._parts = np.pad(self._parts, (before, max(0, after)))
        self._steps = np.pad(self._steps, (before, max(0, after)))
        self._first_bin = first
        place, parts = spread(starts, ends, steps["count"], self._bin_ns)
        np.add.at(self._parts, place - self._first_bin, parts)
        np.maximum.at(self._steps, ends // self._bin_ns - self._first_bin, steps["step"] + 1)

    def curve(self, first_ns: int) -> Curve:
        edges = (self._first_bin + np.arange(len(self._parts) + 1)) * self._bin_ns
        edges[:1] = self._begin_ns
        # Up to when every active worker has reported its steps; a step is reported when it ends.
        newest = max((end for _, end in self._newest.values()), default=0)
        until = min((end for start, end in self._newest.values() if 2 * end - start >= newest), default=0)
        whole = int(np.searchsorted(edges[1:], until, side="right"))
        if whole == 0 and len(self._parts):
            edges = np.array([self._begin_ns, newest])
            parts, steps = self._parts.sum(keepdims=True), self._steps.max(keepdims=True)
        else:
            parts, steps, edges = self._parts[:whole], self._steps[:whole], edges[: whole + 1]
        return Curve(
            name=self.name,
            steps=tuple(np.maximum.accumulate(steps).astype(float).tolist()),
            seconds=tuple(((edges[1:] - first_ns) / 1e9).tolist()),
            values=tuple((parts * (1e9 / _PARTS) / np.diff(edges)).tolist()),
        )


def spread(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], bin_ns: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Spread counts over their durations: bins, and millionths, which add up exactly however they are cut."""
    first = starts // bin_ns
    spanned = (ends - 1) // bin_ns - first + 1
    owner = np.repeat(np.arange(len(starts)), spanned)
    bins = np.arange(len(owner)) - np.repeat(np.cumsum(spanned) - spanned, spanned) + first[owner]
    whole = counts[owner] * np.int64(_PARTS)

    def until(moment_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        begin, end = starts[owner], ends[owner]
        share = (np.clip(moment_ns, begin, end) - begin) / (end - begin)
        cut: npt.NDArray[np.int64] = np.rint(share * whole).astype(np.int64)
        return cut

    return bins, until((bins + 1) * bin_ns) - until(bins * bin_ns)


class HistoryCurves:
    """The history of a run as curves."""

    def __init__(self) -> None:
        self.step = 0
        self.final: dict[str, float] = {}
        self._last: Mapping[str, Any] = {}  # the row of the last step
        self._measured: Mapping[str, Any] = {}  # the row of the last evaluation
        self._loss = ThinnedCurve("loss")
        self._metrics: dict[str, ThinnedCurve] = {}
        self._logged: dict[str, ThinnedCurve] = {}
        self.acting = ActingHistory()
        self._before_s = 0.0  # seconds taken by earlier parts of a resumed run
        self._last_s = 0.0
        self.best: tuple[str, float, int] | None = None
        """Of the first metric that is not a loss, or of the evaluation loss: its name, best value and step."""

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add one row of metrics.jsonl; return False where it is not a row that a run writes, which is left out."""
        step, at_s = whole(row.get("step")), number(row.get("at_s") or 0.0)
        loss, metrics = row.get("loss"), row.get("metrics")
        if step is None or step < 0 or at_s is None or not (loss is None or number(loss) is not None):
            return False
        if not (metrics is None or isinstance(metrics, Mapping)):
            return False
        if at_s < self._last_s / 2:  # the clock of a resumed run restarts at 0
            self._before_s += self._last_s
        self._last_s = at_s
        self.step = max(self.step, step)
        if loss is not None:
            self._last = last_row((self._last, row), "loss") or row
            self._loss.add(step, self._before_s + at_s, float(loss))
            self.acting.add(row, self._before_s + at_s)
            for name, value in logged_values(row).items():
                self._logged.setdefault(name, ThinnedCurve(name)).add(step, self._before_s + at_s, value)
        if metrics is not None:
            named = {text(name): number(value) for name, value in metrics.items()}
            known = {name: value for name, value in named.items() if value is not None}
            self._measured = last_row((self._measured, row), "metrics") or row
            self.final = known if self._measured is row else self.final
            for name, value in known.items():
                if name in self._metrics or len(self._metrics) < _MAX_METRICS:
                    curve = self._metrics.setdefault(name, ThinnedCurve(name))
                    curve.add(step, self._before_s + at_s, value)
            # The best evaluation is judged by the first metric of those that say most.
            name, best, _ = self.best or ("", None, 0)
            if best is None or max(map(_worth, known), default=0) > _worth(name):
                name, best = max(known, key=_worth, default=""), None
            newest = known.get(name)
            better = operator.lt if lower_is_better(name) else operator.gt
            if newest is not None and (best is None or better(newest, best)):
                self.best = (name, newest, step)
        return True

    @property
    def loss(self) -> float | None:
        return final_loss((self._last,))

    def curves(self, later_s: float) -> list[Curve]:
        return [self._loss.curve(later_s), *(curve.curve(later_s) for curve in self._metrics.values())]

    def logged(self, later_s: float) -> list[Curve]:
        """The learning rate and the gradient's norm, where the run logs them."""
        return [curve.curve(later_s) for curve in self._logged.values()]


def _worth(metric: str) -> int:
    """A metric says more than a loss on data held out, and that more than a loss on what was trained on."""
    return 2 if not metric.endswith("loss") else int(not metric.startswith("pass_"))


_LOWER = ("loss", "error", "perplexity", "cost", "distance", "mae", "mse", "rmse", "nll")
_LOWER_BEGINS = ("bits_per_", "error_", "loss_")  # bits per byte or per character: lower is better


def lower_is_better(metric: str) -> bool:
    name = metric.lower()
    return name.endswith(_LOWER) or name.startswith(_LOWER_BEGINS)
