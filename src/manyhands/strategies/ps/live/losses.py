"""Builds the history of a run whose batches end in any order: one row per batch, from the parts that workers
report.

A batch or an evaluation that is computed again (by a successor, or after a return to a snapshot) adds no second
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manyhands.strategies.ps.live.reports import Evaluated, StepComputed

__all__ = ["LossBook"]


class LossBook:
    """Collects the parts of batches; a part that a successor computes again replaces the first."""

    def __init__(self, known: Iterable[Mapping[str, Any]] = ()) -> None:
        """`known` are the rows that a resumed run already has."""
        self._parts: dict[int, dict[int, StepComputed]] = {}
        rows = list(known)
        self._done = {int(row["step"]) - 1 for row in rows if "loss" in row}
        self._evaluated = {int(row["step"]) for row in rows if "metrics" in row}

    def add_evaluation(self, evaluation: Evaluated, at_s: float) -> dict[str, Any] | None:
        """Add an evaluation; its row, or None if its step already has one."""
        if evaluation.step in self._evaluated:
            return None
        self._evaluated.add(evaluation.step)
        return {"step": evaluation.step, "metrics": dict(evaluation.metrics), "at_s": at_s}

    def add(self, part: StepComputed, at_s: float) -> dict[str, Any] | None:
        """Add a report; the batch's row when its last part arrives, else None."""
        batch = part.batch
        if batch in self._done:
            return None
        parts = self._parts.setdefault(batch, {})
        parts[part.part] = part
        if len(parts) < part.parts:
            return None
        del self._parts[batch]
        self._done.add(batch)
        ordered = [parts[number] for number in sorted(parts)]
        return {
            "step": batch + 1,
            "loss": sum(one.loss * one.share for one in ordered),
            "seconds": max(one.seconds for one in ordered),
            "at_s": at_s,
        }
