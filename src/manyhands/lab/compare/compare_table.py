"""The table of a comparison, as text: the same cells for the terminal and for the report."""

from __future__ import annotations

from dataclasses import fields

from rich import box
from rich.table import Table

from manyhands.errors import format_bytes
from manyhands.facts import Promises
from manyhands.lab.compare.figures import CompareRow, Figures, Spread

__all__ = [
    "PROMISES",
    "cells",
    "columns",
    "measures_table",
    "promise_cells",
    "promises_table",
    "score_cells",
    "scores_table",
]

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
    return [*_MEASURES, *([_PRICE] if found.prices is not None else []), *_metrics(found)]


def cells(found: Figures, row: CompareRow) -> list[str]:
    """One strategy's cells, in the order of the columns."""
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
        *(_show(row.final.get(name), "{:.4f}") for name in _metrics(found)),
    ]


def promise_cells(promises: Promises, *, words: bool = False) -> list[str]:
    """The answers, with the sentences behind them where `words` are wanted."""
    answers = [getattr(promises, one.name) for one in fields(promises)]
    if not words:
        return [one.answer.value for one in answers]
    return [f"{one.answer.value}: {one.words}" for one in answers]


def measures_table(found: Figures) -> Table:
    """What was measured, readable at 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("strategy", overflow="fold", min_width=_NARROWEST)
    for head in columns(found):
        table.add_column(head, justify="right", no_wrap=True, min_width=max(map(len, head.split("\n"))))
    for row in found.rows:
        table.add_row(row.name, *cells(found, row))
    return table


def promises_table(found: Figures) -> Table:
    """What the strategies promise."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy")
    for question in PROMISES:
        table.add_column(question, max_width=16)
    for row in found.rows:
        table.add_row(row.name, *promise_cells(row.strategy.facts.promises))
    return table


def _metrics(found: Figures) -> list[str]:
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
    """The scores, where there are any."""
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
    """The median, and how far the repeats lie from it."""
    away = max(spread.high - spread.median, spread.median - spread.low)
    return f"{spread.median:.2f}" + (f" ±{away:.2f}" if away > 0 else "")


def _size(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    number, unit = format_bytes(spread.median).split()
    return f"{float(number):.3g} {unit}" if float(number) < 1000 else f"{float(number):.0f} {unit}"
