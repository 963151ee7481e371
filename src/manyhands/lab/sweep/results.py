"""What came out of a sweep's runs, in order of a metric, and what that says of the settings."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import ManyhandsError
from manyhands.lab.compare.comparison import lower_is_better
from manyhands.lab.sweep.trials import SweepPlan, SweepTrial
from manyhands.observe.record.checked_values import number

__all__ = ["SweepRow", "best_first", "read_row", "sentences"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One trial: what it ended with, or the sentence that it failed with; neither, if it has not ended."""

    trial: SweepTrial
    final: Mapping[str, float]
    seconds: float = math.nan
    samples_per_s: float = math.nan
    failure: str = ""

    @property
    def done(self) -> bool:
        """Whether it came to its end."""
        return bool(self.final)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        measured = {"seconds": self.seconds, "samples_per_s": self.samples_per_s} if self.done else {}
        return {
            "number": self.trial.number,
            "settings": dict(self.trial.values),
            "final": dict(self.final),
            **measured,
            **({"failure": self.failure} if self.failure else {}),
        }


def read_row(trial: SweepTrial, folder: Path, failure: str = "") -> SweepRow:
    """What the run in this folder came to; a damaged one is a failure."""
    if not RunDirectory.is_one(folder):
        return SweepRow(trial=trial, final={}, failure=failure)
    try:
        summary = RunDirectory.open(folder, lock=False).read_summary()
    except ManyhandsError as error:
        return SweepRow(trial=trial, final={}, failure=str(error))
    if summary is None:
        return SweepRow(trial=trial, final={}, failure=failure)
    told = summary.get("final")
    found = {str(name): number(value) for name, value in told.items()} if isinstance(told, dict) else {}
    final = {name: value for name, value in found.items() if value is not None}
    return SweepRow(
        trial=trial,
        final=final,
        seconds=_or_nan(number(summary.get("seconds"))),
        samples_per_s=_or_nan(number(summary.get("samples_per_s"))),
        failure="" if final else "its summary holds no final value",
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def best_first(rows: Iterable[SweepRow], metric: str) -> list[SweepRow]:
    """In the order of the metric, the best first; then those that have none, as they were numbered."""
    sign = 1 if lower_is_better(metric) else -1

    def place(row: SweepRow) -> tuple[bool, float, int]:
        value = row.final.get(metric, math.nan)
        known = math.isfinite(value)
        return not known, sign * value if known else 0.0, row.trial.number

    return sorted(rows, key=place)


def sentences(plan: SweepPlan, rows: Sequence[SweepRow]) -> list[str]:
    """What the data show: the best trial, how far the settings matter, and what failed."""
    metric, ranked = plan.metric, best_first(rows, plan.metric)
    known = [row for row in ranked if math.isfinite(row.final.get(metric, math.nan))]
    told = []
    if known:
        best = known[0]
        named = _named(best.trial, plan) or "the only combination"
        told.append(
            f"Best of {len(known)} runs: {named}, with {metric} {best.final[metric]:.4g} after {best.seconds:.1f} s."
        )
        if len(known) > 1:
            values = [row.final[metric] for row in known]
            told.append(f"The others end between {values[1]:.4g} and {values[-1]:.4g}.")
        if len(plan.varying) > 1:
            told += _effects(plan, known)
    failed = [row for row in rows if row.failure]
    if failed:
        told.append(f"{len(failed)} of {len(rows)} runs failed; the first: {failed[0].failure}")
    empty = sum(row.done and not math.isfinite(row.final.get(metric, math.nan)) for row in rows)
    if empty:
        told.append(f"{empty} of {len(rows)} runs ended without a finite {metric}.")
    missing = sum(not row.done and not row.failure for row in rows)
    if missing:
        told.append(f"{missing} of {len(rows)} runs have not ended.")
    return told


def _named(trial: SweepTrial, plan: SweepPlan) -> str:
    return ", ".join(f"{setting.name}={trial.values[setting.name]}" for setting in plan.varying)


def _effects(plan: SweepPlan, rows: Sequence[SweepRow]) -> Iterator[str]:
    """By each setting: the mean of the metric for each of its values, over the same combinations of the others.

    A combination that did not end with every value is left out, or a value would be judged by what it was tried with.
    """
    for setting in plan.varying:
        found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        for row in rows:
            others = tuple(row.trial.values[one.name] for one in plan.varying if one is not setting)
            found[others][row.trial.values[setting.name]] = row.final[plan.metric]
        whole = [values for values in found.values() if len(values) == len(setting.values)]
        if not whole:
            continue
        means = ", ".join(
            f"{statistics.fmean(values[value] for values in whole):.4g} with {value}"
            for value in setting.values
        )
        of_all = math.prod(len(one.values) for one in plan.varying if one is not setting)
        over = (
            ""
            if len(whole) == of_all
            else f" over the {len(whole)} of {of_all} combinations that ended with each"
        )
        yield f"By {setting.name}, on average{over}: {means}."
