"""A sweep as a table, and as one HTML file: what the data show, parallel coordinates, all runs, how it was made."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import ManyhandsError
from manyhands.lab.sweep.trials import SweepPlan, SweepTrial
from manyhands.observe.analyse.curves import lower_is_better
from manyhands.observe.draw import axes as number_axes
from manyhands.observe.draw import paper
from manyhands.observe.record.checked_values import number


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
        return bool(self.final)

    def to_dict(self) -> dict[str, Any]:
        measured = {"seconds": self.seconds, "samples_per_s": self.samples_per_s} if self.done else {}
        return {
            "number": self.trial.number,
            "settings": dict(self.trial.values),
            "final": dict(self.final),
            **measured,
            **({"failure": self.failure} if self.failure else {}),
        }


def read_row(trial: SweepTrial, folder: Path, failure: str = "") -> SweepRow:
    try:
        exists = RunDirectory.is_one(folder)
        summary = RunDirectory.open(folder, lock=False).read_summary() if exists else None
    except ManyhandsError as error:
        return SweepRow(trial=trial, final={}, failure=str(error))
    if summary is None:
        return SweepRow(trial=trial, final={}, failure=failure)
    kept = summary.get("final")
    found = {str(name): number(value) for name, value in kept.items()} if isinstance(kept, dict) else {}
    numbers = [
        math.nan if (value := number(summary.get(name))) is None else value
        for name in ("seconds", "samples_per_s")
    ]
    final = {name: value for name, value in found.items() if value is not None}
    return SweepRow(
        trial=trial,
        final=final,
        seconds=numbers[0],
        samples_per_s=numbers[1],
        failure="" if final else "its summary has no final value",
    )


def best_first(rows: Iterable[SweepRow], metric: str) -> list[SweepRow]:
    """In the order of the metric, the best first; then those that have none, as they were numbered."""
    sign = 1 if lower_is_better(metric) else -1

    def place(row: SweepRow) -> tuple[bool, float, int]:
        value = row.final.get(metric, math.nan)
        known = math.isfinite(value)
        return not known, sign * value if known else 0.0, row.trial.number

    return sorted(rows, key=place)


def sentences(plan: SweepPlan, rows: Sequence[SweepRow]) -> list[str]:
    metric, ranked = plan.metric, best_first(rows, plan.metric)
    known = [row for row in ranked if math.isfinite(row.final.get(metric, math.nan))]
    said = []
    if known:
        best = known[0]
        named = _named(best.trial, plan) or "the only combination"
        said.append(
            f"Best of {len(known)} runs: {named}, with {metric} {best.final[metric]:.4g} after {best.seconds:.1f} s."
        )
        if len(known) > 1:
            values = [row.final[metric] for row in known]
            said.append(f"The others end between {values[1]:.4g} and {values[-1]:.4g}.")
        if len(plan.varying) > 1:
            said += _effects(plan, known)
    failed = [row for row in rows if row.failure]
    if failed:
        said.append(f"{len(failed)} of {len(rows)} runs failed; the first: {failed[0].failure}")
    empty = sum(row.done and not math.isfinite(row.final.get(metric, math.nan)) for row in rows)
    if empty:
        said.append(f"{empty} of {len(rows)} runs ended without a finite {metric}.")
    missing = sum(not row.done and not row.failure for row in rows)
    if missing:
        said.append(f"{missing} of {len(rows)} runs have not ended.")
    return said


def _named(trial: SweepTrial, plan: SweepPlan) -> str:
    return ", ".join(f"{setting.name}={trial.values[setting.name]}" for setting in plan.varying)


def _effects(plan: SweepPlan, rows: Sequence[SweepRow]) -> Iterator[str]:
    """By each setting, the mean for each value, over the combinations of the others that ended with every value."""
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
        some = f" over the {len(whole)} of {of_all} combinations that ended with each"
        over = "" if len(whole) == of_all else some
        yield f"By {setting.name}, on average{over}: {means}."


_AT_THE_SAME_TIME = (
    "Runs shared the machine, each on its own cores: compare their seconds with one another, and not with a "
    "run that has the machine to itself."
)


def sweep_cells(plan: SweepPlan, rows: Sequence[SweepRow]) -> tuple[list[str], list[list[str]]]:
    varying = [setting.name for setting in plan.varying]
    others = list(dict.fromkeys(name for row in rows for name in row.final if name != plan.metric))
    all_well = not any(row.failure for row in rows)
    head = ["run", *varying, plan.metric, *others, "seconds", "samples/s", "" if all_well else "failed"]
    cells = []
    for row in best_first(rows, plan.metric):
        values = [row.trial.values[name] for name in varying]
        found = [row.final.get(name, math.nan) for name in (plan.metric, *others)]
        numbers = [f"{value:.4g}" if math.isfinite(value) else "" for value in found]
        speed = [f"{row.seconds:.1f}", f"{row.samples_per_s:,.0f}"] if row.done else ["", ""]
        cells.append([row.trial.folder, *values, *numbers, *speed, row.failure])
    if all_well:
        return head[:-1], [row[:-1] for row in cells]
    return head, cells


def sweep_picture(plan: SweepPlan, rows: Sequence[SweepRow]) -> str:
    """Parallel coordinates: the settings that vary, then what came out."""
    ended = [row for row in best_first(rows, plan.metric) if row.done]
    axes = [
        ParallelAxis(name=setting.name, values=[row.trial.values[setting.name] for row in ended])
        for setting in plan.varying
    ]
    axes.append(ParallelAxis(name="seconds", values=[row.seconds for row in ended]))
    values = [row.final.get(plan.metric, math.nan) for row in ended]
    axes.append(ParallelAxis(name=plan.metric, values=values))
    names = [_named(row.trial, plan) for row in ended]
    return parallel_coordinates(axes, names, title=f"Every line is a run; the best by {plan.metric} is thick")


def sweep_page(
    plan: SweepPlan,
    rows: Sequence[SweepRow],
    sentences: Sequence[str],
    command: str,
    facts: Mapping[str, str],
) -> str:
    head, cells = sweep_cells(plan, rows)
    words = [0, *(place for place, name in enumerate(head) if name in ("strategy", "failed"))]
    table = paper.data_table(head, cells, title="The best first", words=words)
    return paper.document(
        f"{plan.task}: {len(rows)} combinations",
        [
            paper.findings_section(sentences),
            paper.section("picture", "Settings and results", sweep_picture(plan, rows), "wide"),
            paper.section("table", "All runs", table, "wide"),
            paper.made_section(command, facts, _AT_THE_SAME_TIME),
        ],
    )


_HEIGHT, _TOP, _BOTTOM, _SIDE = 240.0, 34.0, 14.0, 46.0
_LEAST_WIDTH, _APART = 360.0, 104.0
_NAME_LETTERS, _VALUE_LETTERS = 18, 16
_KINDS = (("s0", 3.0, 1.0, "the best"), ("s2", 1.6, 0.9, "best third"), ("s4", 1.3, 0.7, "middle third"))
_LAST = ("s7", 1.1, 0.55, "last third")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAxis:
    """One axis: its name, and each line's value on it; texts are placed evenly in order of appearance."""

    name: str
    values: Sequence[str | float]

    @property
    def numbers(self) -> list[float] | None:
        found = []
        for value in self.values:
            try:
                found.append(float(value))
            except ValueError:
                return None
        return found


def parallel_coordinates(
    axes: Sequence[ParallelAxis], names: Sequence[str], *, title: str, empty: str = "No run has ended."
) -> str:
    """Draw lines, best first, named by `names`; one with a value that is not finite is left out."""
    keep = [
        n
        for n in range(len(names))
        if all(isinstance(axis.values[n], str) or math.isfinite(axis.values[n]) for axis in axes)  # type: ignore[arg-type]
    ]
    if not keep or not axes:
        return paper.figure(title, paper.quiet(empty), kind="plot")
    kept = [ParallelAxis(name=axis.name, values=[axis.values[n] for n in keep]) for axis in axes]
    width = max(_LEAST_WIDTH, 2 * _SIDE + _APART * (len(kept) - 1))
    gap = (width - 2 * _SIDE) / max(1, len(kept) - 1)
    placed = [(_SIDE + gap * place, axis.name, *_crossings(axis)) for place, axis in enumerate(kept)]
    drawn = []
    for rank, n in reversed([*enumerate(keep)]):
        path = "M" + " ".join(f"{x:.1f},{crossings[rank]:.1f}" for x, _, crossings, _ in placed)
        path += "h6" if len(placed) == 1 else ""
        colour, wide, opacity, _ = _kind(rank, len(keep))
        drawn.append(
            f'<path class="curve {colour}" stroke-width="{wide:g}" stroke-opacity="{opacity:g}" d="{path}">'
            f"<title>{escape(f'{rank + 1}. {names[n]}')}</title></path>"
        )
    for x, name, _, ticks in placed:
        drawn.append(paper.svg_line("axis", x, _TOP, x, _HEIGHT - _BOTTOM))
        drawn.append(paper.svg_text(x, 14.0, name, "label", "middle", _NAME_LETTERS))
        for y, words in ticks:
            drawn.append(paper.svg_text(x + 4, y + 3.5, words, "tick", "start", _VALUE_LETTERS))
    ranges = "; ".join(f"{axis.name} {_range(axis)}" for axis in kept)
    said = f"{title}: {len(keep)} runs; {ranges}; the best is {names[keep[0]]}"
    kinds = list(dict.fromkeys(_kind(rank, len(keep)) for rank in range(len(keep))))
    marks = [
        paper.line_mark(f'class="curve {colour}" stroke-width="{wide:g}"') for colour, wide, _, _ in kinds
    ]
    explained = paper.legend([name for _, _, _, name in kinds], marks)
    return paper.figure(title, paper.svg_chart(drawn, width, _HEIGHT, said), explained, "plot")


def _crossings(axis: ParallelAxis) -> tuple[list[float], list[tuple[float, str]]]:
    """Return where each line crosses the axis, and its ticks as (place, words)."""
    bottom, numbers = _HEIGHT - _BOTTOM, axis.numbers
    if numbers is None:
        words = list(dict.fromkeys(map(str, axis.values)))
        scale = number_axes.Axis(-0.5, len(words) - 0.5, bottom, _TOP)
        at = {word: scale.at(place) for place, word in enumerate(words)}
        return [at[str(value)] for value in axis.values], [(at[word], word) for word in words]
    few = sorted(set(numbers))
    if number_axes.spans_powers(numbers):
        scale, ticks = number_axes.logarithmic(numbers, bottom, _TOP)
    else:
        scale, ticks = number_axes.linear(numbers, bottom, _TOP, 4)
    if len(few) <= 6 and isinstance(axis.values[0], str):  # a setting: its given values are the ticks
        ticks = [(value, number_axes.short_number(value)) for value in few]
    return [scale.at(n) for n in numbers], [(scale.at(n), said) for n, said in ticks]


def _kind(rank: int, count: int) -> tuple[str, float, float, str]:
    if rank == 0:
        return _KINDS[0]
    third = 3 * rank // count
    return _KINDS[third + 1] if third < 2 else _LAST


def _range(axis: ParallelAxis) -> str:
    numbers = axis.numbers
    if numbers is None:
        return ", ".join(dict.fromkeys(map(str, axis.values)))
    return f"from {number_axes.short_number(min(numbers))} to {number_axes.short_number(max(numbers))}"
