"""The mean loss of each pass over the data, from the rows of a run's history. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from manyhands.task import Passes

__all__ = ["PASS_LOSS", "PassLosses"]

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
