"""A sweep as a table, and as one HTML file: what the data show, parallel coordinates, all runs, how it was made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from manyhands.lab.sweep.results import SweepRow, best_first
from manyhands.lab.sweep.trials import SweepPlan
from manyhands.observe.draw.charts import data_table, document, findings_section, made_section, section
from manyhands.observe.draw.parallel import ParallelAxis, parallel_coordinates

__all__ = ["sweep_cells", "sweep_page", "sweep_picture"]

_AT_THE_SAME_TIME = (
    "Runs went on at the same time, each on cores of its own: seconds compare them with one another, and not with a "
    "run that has the machine to itself."
)


def sweep_cells(plan: SweepPlan, rows: Sequence[SweepRow]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table, the best first."""
    varying = [setting.name for setting in plan.varying]
    others = list(dict.fromkeys(name for row in rows for name in row.final if name != plan.metric))
    head = [
        "run",
        *varying,
        plan.metric,
        *others,
        "seconds",
        "samples/s",
        "" if _all_well(rows) else "failed",
    ]
    cells = []
    for row in best_first(rows, plan.metric):
        values = [row.trial.values[name] for name in varying]
        numbers = [_number(row.final.get(name, math.nan)) for name in (plan.metric, *others)]
        speed = [f"{row.seconds:.1f}", f"{row.samples_per_s:,.0f}"] if row.done else ["", ""]
        cells.append([row.trial.folder, *values, *numbers, *speed, row.failure])
    if _all_well(rows):
        return head[:-1], [row[:-1] for row in cells]
    return head, cells


def _all_well(rows: Sequence[SweepRow]) -> bool:
    return not any(row.failure for row in rows)


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else ""


def sweep_picture(plan: SweepPlan, rows: Sequence[SweepRow]) -> str:
    """Parallel coordinates: the settings that vary, then what came out."""
    ended = [row for row in best_first(rows, plan.metric) if row.done]
    axes = [
        ParallelAxis(name=setting.name, values=[row.trial.values[setting.name] for row in ended])
        for setting in plan.varying
    ]
    axes.append(ParallelAxis(name="seconds", values=[row.seconds for row in ended]))
    axes.append(
        ParallelAxis(name=plan.metric, values=[row.final.get(plan.metric, math.nan) for row in ended])
    )
    names = [", ".join(f"{s.name}={row.trial.values[s.name]}" for s in plan.varying) for row in ended]
    return parallel_coordinates(axes, names, title=f"Every line is a run; the best by {plan.metric} is thick")


def sweep_page(
    plan: SweepPlan, rows: Sequence[SweepRow], told: Sequence[str], command: str, facts: Mapping[str, str]
) -> str:
    """The whole page; it needs nothing from elsewhere."""
    head, cells = sweep_cells(plan, rows)
    words = [0, *(place for place, name in enumerate(head) if name in ("strategy", "failed"))]
    return document(
        f"{plan.task}: {len(rows)} combinations",
        [
            findings_section(told),
            section("picture", "Settings and what came of them", sweep_picture(plan, rows), "wide"),
            section(
                "table", "All runs", data_table(head, cells, title="The best first", words=words), "wide"
            ),
            made_section(command, facts, _AT_THE_SAME_TIME),
        ],
    )
