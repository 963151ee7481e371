"""The best plans, tried for some steps: what was predicted, beside what was seen."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import ManyhandsError
from manyhands.foresight.plan.plan_search import PlanRow
from manyhands.lab.compare.run_comparison import CompareSettings, compare
from manyhands.task import Task

__all__ = ["Tried", "try_plans"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One plan: seconds of a step."""

    strategy: str
    predicted_s: float
    seen_s: float


def try_plans(
    task: Task, rows: Sequence[PlanRow], *, steps: int, seed: int = 0, repeats: int = 1
) -> list[Tried]:
    """Run each plan for some steps, one after the other; the fastest comes first."""
    tried = []
    with tempfile.TemporaryDirectory(prefix="manyhands-plan-") as folder:
        for workers in sorted({row.workers for row in rows}):
            group = [row for row in rows if row.workers == workers]
            settings = CompareSettings(
                workers=workers, steps=steps, seed=seed, repeats=repeats, evaluate_every=steps
            )
            texts = "; ".join(str(row.strategy) for row in group)
            found = compare(task, texts, out=Path(folder) / str(workers), settings=settings)
            for row, measured in zip(group, found.figures.rows, strict=True):
                if measured.failures:
                    raise ManyhandsError(f"{row.strategy} failed when it was tried: {measured.failures[0]}")
                if measured.samples_per_s is None or row.predicted is None:
                    continue
                seen_s = task.batch_size / measured.samples_per_s.median
                tried.append(
                    Tried(strategy=str(row.strategy), predicted_s=row.predicted.seconds, seen_s=seen_s)
                )
    return sorted(tried, key=lambda one: one.seen_s)
