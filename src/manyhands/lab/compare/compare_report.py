"""One HTML file of a whole comparison: what the data show, curves, the table, the promises, and how it was made."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from rich import box
from rich.table import Table

from manyhands.errors import format_bytes
from manyhands.facts import Promises
from manyhands.lab.compare.figures import CompareRow, Figures, Measured, Point, Spread
from manyhands.native.version import __version__
from manyhands.observe.draw.charts import (
    Series,
    data_table,
    document,
    findings_section,
    line_chart,
    loss_chart,
    made_section,
    quiet,
    section,
    share_bars,
)
from manyhands.observe.draw.paper import PART_COLOURS

__all__ = ["Made", "machine", "measures_table", "promises_table", "report", "scores_table"]


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
    return [*_MEASURES, *([_PRICE] if found.prices is not None else []), *_metric_names(found)]


def cells(found: Figures, row: CompareRow) -> list[str]:
    if not row.runs:
        return ["failed" if row.failures else "not run", *["–"] * (len(columns(found)) - 1)]
    partly = "" if row.always_reached or found.target is None else f" ({row.reached} of {len(row.runs)})"
    stale = "0" if row.staleness_max == 0 else f"{_show(row.staleness_mean, '{:.2f}')}, {row.staleness_max}"
    return [
        f"{_with_spread(row.target_s)}{partly}" if row.target_s else "never",
        _show(row.target_steps, "{:,.0f}"),
        _show(row.samples_per_s, "{:,.0f}"),
        f"{100 * row.waiting.median:.0f} %" if row.waiting else "–",
        _show(row.messages_per_step, "{:,.3g}"),
        _size(row.bytes_per_step),
        _size(row.busiest_bytes_per_step),
        stale,
        *([_show(row.price_per_1000_steps, "{:,.3g}")] if found.prices is not None else []),
        *(_show(row.final.get(name), "{:.4f}") for name in _metric_names(found)),
    ]


def promise_cells(promises: Promises, *, words: bool = False) -> list[str]:
    """The answers, with the sentences behind them where `words` are wanted."""
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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
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
    """What was measured of a strategy's models at the end besides, as median and range."""
    return [
        f"{spread.median:.4f} ({spread.low:.4f} to {spread.high:.4f})" if spread is not None else "–"
        for spread in (row.final.get(name) for name in found.scores)
    ]


def scores_table(found: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for name in found.scores:
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(row.name, *score_cells(found, row))
    return table


def _show(spread: Spread | None, form: str) -> str:
    return "–" if spread is None else form.format(spread.median)


def _with_spread(spread: Spread) -> str:
    away = max(spread.high - spread.median, spread.median - spread.low)
    return f"{spread.median:.2f}" + (f" ±{away:.2f}" if away > 0 else "")


def _size(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    number, unit = format_bytes(spread.median).split()
    return f"{float(number):.3g} {unit}" if float(number) < 1000 else f"{float(number):.0f} {unit}"


_SMOOTH = 20  # a loss is drawn as the mean of this part of the steps around it: 1 / _SMOOTH of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """How a comparison was made."""

    title: str
    command: str
    facts: Mapping[str, str]
    """The machine and the settings, by name."""
    notes: tuple[str, ...] = ()
    """What else there is to say, in sentences."""


def report(found: Figures, sentences: Sequence[str], made: Made) -> str:
    rows = [row for row in found.rows if row.runs]
    head = ["strategy", *(name.replace("\n", " ") for name in columns(found))]
    table = data_table(head, [[row.name, *cells(found, row)] for row in found.rows], title=_caption(found))
    promises = [[row.name, *promise_cells(row.strategy.facts.promises, words=True)] for row in found.rows]
    parts = [
        findings_section(sentences),
        section("table", "Side by side", table, "wide"),
        *_scores(found),
        *_losses(rows),
        section("time", "Where the workers' time went", _shares(rows)),
        *_metrics(found, rows),
        # Beside the two curves of a metric there is room for it.
        made_section(
            made.command, made.facts, *_about(found, made), kind="wide" if found.target is None else ""
        ),
        section(
            "promises",
            "What each promises",
            data_table(
                ["strategy", *PROMISES],
                promises,
                title="What a run's users may rely on",
                words=range(len(PROMISES) + 1),
            ),
            "wide",
        ),
    ]
    return document(made.title, parts)


def _scores(found: Figures) -> list[str]:
    if not found.scores:
        return []
    cells = [[row.name, *score_cells(found, row)] for row in found.rows]
    table = data_table(["strategy", *found.scores], cells, title="Medians over the repeats, and their range")
    return [section("scores", "What the models are worth", table, "wide")]


def _caption(found: Figures) -> str:
    target = f"time and steps to {found.target}; " if found.target is not None else ""
    return (
        f"Medians over the repeats: {target}messages and bytes of a step, sent by all together, and bytes sent by "
        f"the busiest process{_price_caption(found)}"
    )


def _price_caption(found: Figures) -> str:
    if found.prices is None:
        return ""
    return f"; the price of 1,000 steps, of all processes together, at {found.prices} an hour"


_AXES: tuple[tuple[str, Callable[[Point], float]], ...] = (
    ("steps", lambda point: point.step),
    ("seconds", lambda point: point.at_s),
)


def _losses(rows: Sequence[CompareRow]) -> list[str]:
    """The loss of each strategy's middle run, against steps and against seconds."""
    parts = []
    for label, place in _AXES:
        curves = [_series(row.name, smooth(_middle(row).losses, "loss"), "loss", place) for row in rows]
        chart = loss_chart(curves, title=f"Training loss, smoothed, over {label}", x_label=label)
        parts.append(section(f"loss-{label}", f"Loss against {label}", chart))
    return parts


def _metrics(found: Figures, rows: Sequence[CompareRow]) -> list[str]:
    """The metric of the target in the same way, where there is a target."""
    if found.target is None:
        return []
    metric, parts = found.target.metric, []
    for label, place in _AXES:
        curves = [_series(row.name, _middle(row).evaluations, metric, place) for row in rows]
        chart = line_chart(
            curves, title=f"On the evaluation data, over {label}", x_label=label, y_label=metric
        )
        heading = f"{metric[:1].upper()}{metric[1:]} against {label}"
        parts.append(section(f"metric-{label}", heading, chart))
    return parts


def _series(name: str, points: Sequence[Point], value: str, place: Callable[[Point], float]) -> Series:
    known = sorted((point for point in points if value in point.values), key=place)
    return Series(
        name=name, xs=[place(point) for point in known], ys=[point.values[value] for point in known]
    )


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


def _middle(row: CompareRow) -> Measured:
    """The run that took the median of the time; the lower one of two."""
    return sorted(row.runs, key=lambda run: run.seconds)[(len(row.runs) - 1) // 2]


def _shares(rows: Sequence[CompareRow]) -> str:
    if not rows:
        return quiet("No run came to its end.")
    shares = [(_short(row.name), [1 - row.waiting.median, row.waiting.median]) for row in rows if row.waiting]
    names = quiet("Of the time that workers accounted for, medians over the repeats.")
    return (
        share_bars(
            shares,
            ["computing and exchanging", "waiting"],
            title="Share of time",
            colours=[PART_COLOURS["compute"], PART_COLOURS["waiting"]],
        )
        + names
    )


def _short(name: str) -> str:
    """`ps consistency=async` as `ps async`, where there is room for that alone."""
    return " ".join(part.rpartition("=")[2] for part in name.split())


def _about(found: Figures, made: Made) -> list[str]:
    """What a reader must know of the clock and the curves, and the notes."""
    clock = (
        "Seconds are those of training: starting processes does not count, and the clock stands still while a model is "
        f"evaluated. Metrics were measured every {found.evaluate_every} steps and at the end, so times to the target "
        "are exact to that. Nothing was saved before the end. Curves are those of each strategy's middle run."
    )
    for sentence in sorted({row.strategy.facts.when_evaluating for row in found.rows} - {""}):
        clock += f" {sentence}"
    return [clock, *made.notes]
