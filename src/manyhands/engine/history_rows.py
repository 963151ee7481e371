"""The rows of a run's history: in the order of their steps, with the mean loss of each pass; and overlaps. Pure."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from manyhands.task import Passes

__all__ = ["PASS_LOSS", "PassLosses", "RowsInOrder", "overlap_report", "overlap_summary"]


class RowsInOrder:
    """Releases rows of the history in step order; an evaluation comes after the steps that it has seen."""

    def __init__(self, steps_done: int = 0) -> None:
        self._given = steps_done
        self._waiting: list[tuple[int, int, int, dict[str, Any]]] = []
        self._count = 0

    def add(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add rows of any worker; returns those that are complete up to their step."""
        for row in rows:
            self._count += 1
            heapq.heappush(self._waiting, (row["step"], "metrics" in row, self._count, row))
        ready = []
        while self._waiting:
            step, is_evaluation, _, _ = self._waiting[0]
            if step > self._given + (not is_evaluation):
                break
            ready.append(heapq.heappop(self._waiting)[-1])
            self._given = max(self._given, step)
        return ready

    def rest(self) -> list[dict[str, Any]]:
        """The rows that still wait for steps that never came, as after a failure."""
        return [heapq.heappop(self._waiting)[-1] for _ in range(len(self._waiting))]


PASS_LOSS = "pass_loss"
"""The metric in the history: of every sample before the update with it."""


class PassLosses:
    """Adds a row with the mean loss of a pass after the row of the last step of the pass to arrive.

    `known` are earlier rows of the same run, which have theirs.
    """

    def __init__(self, passes: Passes, known: Iterable[dict[str, Any]] = ()) -> None:
        self._passes = passes
        self._open: dict[int, tuple[int, float, float]] = {}  # by pass: steps, sums of losses and of weights
        self.add(known)

    def add(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take rows of any steps; returns them with the rows of the passes that they complete."""
        out = []
        for row in rows:
            out.append(row)
            if row.get("loss") is not None:
                out += self._take(row)
        return out

    def _take(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        passes = self._passes
        number, place = divmod(row["step"] - 1, passes.steps)
        usual = passes.last_weight if place == passes.steps - 1 else passes.weight
        weight = row.get("weight", usual)
        steps, losses, weights = self._open.get(number, (0, 0.0, 0.0))
        steps, losses, weights = steps + 1, losses + row["loss"] * weight, weights + weight
        if steps < passes.steps:
            self._open[number] = steps, losses, weights
            return []
        self._open.pop(number, None)
        total = weights if passes.total is None else passes.total
        mean = losses / total if total else 0.0
        step = (number + 1) * passes.steps
        return [{"step": step, "metrics": {PASS_LOSS: mean}, "at_s": row.get("at_s", 0.0)}]


def overlap_summary(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """A histogram over all workers: steps of others between read and write, and how many steps had so many."""
    overlap: collections.Counter[int] = collections.Counter()
    for counts in workers:
        overlap.update({int(number): count for number, count in counts.items()})
    steps = sum(overlap.values())
    return {
        "mean": sum(number * count for number, count in overlap.items()) / steps if steps else 0.0,
        "max": max(overlap, default=0),
        "histogram": {str(number): overlap[number] for number in sorted(overlap)},
    }


def overlap_report(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """The summary's entry; empty for one worker, or where nothing was counted."""
    return {"overlap": overlap_summary(workers)} if len(workers) > 1 and any(workers) else {}
