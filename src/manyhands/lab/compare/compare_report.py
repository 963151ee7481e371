"""One HTML file of a whole comparison: what the data show, curves, the table, the promises, and how it was made."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import torch
from rich import box
from rich.table import Table

from manyhands.errors import format_bytes
from manyhands.facts import Promises
from manyhands.lab.compare.figures import CompareRow, Figures, Point, Spread
from manyhands.native.version import __version__
from manyhands.observe.draw import paper
from manyhands.observe.draw.charts import Series, line_chart, loss_chart, share_bars


def machine() -> dict[str, str]:
    return {
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "manyhands": __version__,
    }


PROMISES = ("survives a worker's death?", "a server's?", "may workers join?", "same numbers as one process?")
"""The questions, in the order of the fields of `Promises`."""

_MEASURES = (
    "seconds\nto target",
    "steps\nto it",
    "samples\n/s",
    "waiting",
    "messages\n/step",
    "bytes\n/step",
    "busiest\nsends",
    "stale,\nmax",
)
_PRICE = "price,\n1k st."  # of a thousand steps
_NARROWEST = 12


def columns(found: Figures) -> list[str]:
    """The heads of all columns after the strategy; a line break is where a narrow one may break."""
    joules = ["joules\n/run"] if _has_joules(found) else []
    return [*_MEASURES, *joules, *([_PRICE] if found.prices is not None else []), *_metric_names(found)]


def _has_joules(found: Figures) -> bool:
    return any(row.joules is not None for row in found.rows)


def cells(found: Figures, row: CompareRow) -> list[str]:
    if not row.runs:
        return ["failed" if row.failures else "not run", *["–"] * (len(columns(found)) - 1)]
    partly = "" if row.always_reached or found.target is None else f" ({row.reached} of {len(row.runs)})"
    stale = "0" if row.staleness_max == 0 else f"{_show(row.staleness_mean, '{:.2f}')}, {row.staleness_max}"
    reached = "never"
    if row.target_s:
        spread = max(row.target_s.high - row.target_s.median, row.target_s.median - row.target_s.low)
        reached = f"{row.target_s.median:.2f}" + (f" ±{spread:.2f}" if spread > 0 else "") + partly
    return [
        reached,
        _show(row.target_steps, "{:,.0f}"),
        _show(row.samples_per_s, "{:,.0f}"),
        f"{100 * row.waiting.median:.0f} %" if row.waiting else "–",
        _show(row.messages_per_step, "{:,.3g}"),
        _size(row.bytes_per_step),
        _size(row.busiest_bytes_per_step),
        stale,
        *([_show(row.joules, "{:,.0f}")] if _has_joules(found) else []),
        *([_show(row.price_per_1000_steps, "{:,.3g}")] if found.prices is not None else []),
        *(_show(row.final.get(name), "{:.4f}") for name in _metric_names(found)),
    ]


def promise_cells(promises: Promises, *, words: bool = False) -> list[str]:
    answers = [getattr(promises, one.name) for one in fields(promises)]
    if not words:
        return [one.answer.value for one in answers]
    return [f"{one.answer.value}: {one.words}" for one in answers]


def measures_table(found: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("strategy", overflow="fold", min_width=_NARROWEST)
    for head in columns(found):
        table.add_column(head, justify="right", no_wrap=True, min_width=max(map(len, head.split("\n"))))
    for row in found.rows:
        table.add_row(row.name, *cells(found, row))
    return table


def promises_table(found: Figures) -> Table:
    table = Table("strategy", box=box.SIMPLE_HEAD, pad_edge=False)
    for question in PROMISES:
        table.add_column(question, max_width=16)
    for row in found.rows:
        table.add_row(row.name, *promise_cells(row.strategy.facts.promises))
    return table


def _metric_names(found: Figures) -> list[str]:
    """The metric of the target, then the training loss: what every strategy ended with."""
    names = [] if found.target is None else [found.target.metric]
    return [*names, *(["loss"] if "loss" not in names else [])]


def score_cells(found: Figures, row: CompareRow) -> list[str]:
    return [
        f"{spread.median:.4f} ({spread.low:.4f} to {spread.high:.4f})" if spread is not None else "–"
        for spread in (row.final.get(name) for name in found.scores)
    ]


def scores_table(found: Figures) -> Table:
    table = Table("strategy", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in found.scores:
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(row.name, *score_cells(found, row))
    return table


def _show(spread: Spread | None, form: str) -> str:
    return "–" if spread is None else form.format(spread.median)


def _size(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    number, unit = format_bytes(spread.median).split()
    return f"{float(number):.3g} {unit}" if float(number) < 1000 else f"{float(number):.0f} {unit}"


_SMOOTH = 20  # a loss is drawn as the mean of this part of the steps around it: 1 / _SMOOTH of them


def report(
    found: Figures,
    sentences: Sequence[str],
    title: str,
    command: str,
    facts: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """The page of a comparison; `facts` are the machine's, by name, and `notes` what else there is to say."""
    rows = [row for row in found.rows if row.runs]
    head = ["strategy", *(name.replace("\n", " ") for name in columns(found))]
    target = f"time and steps to {found.target}; " if found.target is not None else ""
    caption = (
        f"Medians over the repeats: {target}messages and bytes of a step, sent by all together, and bytes sent by "
        "the busiest process"
    )
    if _has_joules(found):
        caption += (
            "; joules of the whole machine from a run's start to its end, processes and evaluations with it"
        )
    if found.prices is not None:
        caption += f"; the price of 1,000 steps, of all processes together, at {found.prices} an hour"
    table = paper.data_table(head, [[row.name, *cells(found, row)] for row in found.rows], title=caption)
    promises = [[row.name, *promise_cells(row.strategy.facts.promises, words=True)] for row in found.rows]
    promised = paper.data_table(
        ["strategy", *PROMISES],
        promises,
        title="What each strategy guarantees",
        words=range(len(PROMISES) + 1),
    )
    scores = []
    if found.scores:
        cells_of = [[row.name, *score_cells(found, row)] for row in found.rows]
        scored = paper.data_table(
            ["strategy", *found.scores], cells_of, title="Medians over the repeats, and their range"
        )
        scores = [paper.section("scores", "Quality of the models", scored, "wide")]
    about = (
        "Seconds are training time, without starting processes and evaluating models. Metrics were measured every "
        f"{found.evaluate_every} steps and at the end, which limits the precision of times to the target. Nothing was "
        "saved before the end. Curves show each strategy's median run."
    )
    about = " ".join([about, *sorted({row.strategy.facts.when_evaluating for row in found.rows} - {""})])
    # Beside the two curves of a metric there is room for how it was made.
    kind = "wide" if found.target is None else ""
    parts = [
        paper.findings_section(sentences),
        paper.section("table", "Side by side", table, "wide"),
        *scores,
        *_curves("loss", rows, losses=True),
        paper.section("time", "Where the workers' time went", _shares(rows)),
        *(_curves(found.target.metric, rows, losses=False) if found.target is not None else ()),
        paper.made_section(command, facts, about, *notes, kind=kind),
        paper.section("promises", "What each promises", promised, "wide"),
    ]
    return paper.document(title, parts)


_AXES: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("steps", lambda point: point.step),
    ("seconds", lambda point: point.at_s),
)


def _curves(metric: str, rows: Sequence[CompareRow], *, losses: bool) -> list[str]:
    """A metric of each strategy's middle run, or the training loss, against steps and against seconds."""
    parts = []
    for label, place in _AXES:
        series = []
        for row in rows:
            # Of the run that took the median of the time; the lower one of two.
            run = sorted(row.runs, key=lambda run: run.seconds)[(len(row.runs) - 1) // 2]
            points = smooth(run.losses, "loss") if losses else run.evaluations
            known = sorted((point for point in points if metric in point.values), key=place)
            values = [point.values[metric] for point in known]
            series.append(Series(name=row.name, xs=[place(point) for point in known], ys=values))
        if losses:
            chart = loss_chart(series, title=f"Training loss, smoothed, over {label}", x_label=label)
        else:
            title = f"On the evaluation data, over {label}"
            chart = line_chart(series, title=title, x_label=label, y_label=metric)
        heading = f"{metric[:1].upper()}{metric[1:]} against {label}"
        parts.append(paper.section(f"{'loss' if losses else 'metric'}-{label}", heading, chart))
    return parts


def smooth(points: Sequence[Point], value: str) -> list[Point]:
    """Means over a moving window of a twentieth of the points, which end at the point they stand for."""
    width = max(1, len(points) // _SMOOTH)
    return [
        Point(
            step=point.step,
            at_s=point.at_s,
            values={value: statistics.fmean(one.values[value] for one in points[max(0, end - width) : end])},
        )
        for end, point in enumerate(points, start=1)
    ]


def _shares(rows: Sequence[CompareRow]) -> str:
    if not rows:
        return paper.quiet("No run finished.")
    shares = [  # `ps consistency=async` as `ps async`: there is room for that alone
        (
            " ".join(part.rpartition("=")[2] for part in row.name.split()),
            [1 - row.waiting.median, row.waiting.median],
        )
        for row in rows
        if row.waiting
    ]
    bars = share_bars(
        shares,
        ["computing and exchanging", "waiting"],
        title="Share of time",
        colours=[paper.PART_COLOURS["compute"], paper.PART_COLOURS["waiting"]],
    )
    return bars + paper.quiet("Shares of the measured worker time, medians over the repeats.")
