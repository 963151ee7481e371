"""An explanation as terminal tables: the parts of the median step, per worker, and bytes per layer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.errors import format_bytes
from manyhands.observe.analyse.explain import Explanation, WorkerPath
from manyhands.observe.analyse.explained_in_words import PART_WORDS
from manyhands.observe.analyse.layer_traffic import LayerSent

__all__ = ["layers_table", "parts_table", "workers_table"]

_COLUMNS = {
    "compute": "compute_ms",
    "exchange": "exchange_ms",
    "waiting": "wait_ms",
    "applying": "apply_ms",
    "input": "input_ms",
    "other": "other_ms",
}
_ALWAYS = ("compute", "exchange", "waiting")  # the other parts only where they are not zero
_GAPS = (2, 1)  # gaps between two columns in characters; the first that fits is used
_UNBOUNDED = 10_000  # characters in a line


def parts_table(found: Explanation) -> Table:
    """Return the parts of the run's median step, in milliseconds and as shares."""
    of_whom = "the critical path" if found.synchronous else "the mean worker"
    table = Table(box=None, pad_edge=False)
    table.add_column(f"median step of {of_whom}")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    whole = found.parts.step_ms
    for field, word in PART_WORDS.items():
        part = getattr(found.parts, field)
        table.add_row(word, f"{part:.2f}", f"{100 * part / whole if whole else 0:.0f} %")
    for word, time_ms in (
        ("in all", whole),
        ("ideal", found.ideal_ms),
        ("evaluation, per step", found.evaluate_ms),
        ("checkpoints, per step", found.checkpoint_ms),
    ):
        table.add_row(word, f"{time_ms:.2f}", "")
    return table


def layers_table(layers: Sequence[LayerSent]) -> Table:
    """Return what a training step sends for each sharded layer, summed over all workers."""
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "sliced"):
        table.add_column(column, overflow="fold")
    for column in ("sent forward", "sent backward", "messages"):
        table.add_column(column, justify="right")
    for row in layers:
        table.add_row(
            Text(row.layer),
            Text(row.how),
            format_bytes(row.forward_bytes),
            format_bytes(row.backward_bytes),
            f"{round(row.messages, 1):g}",
        )
    return table


def workers_table(found: Explanation, console: Console) -> Table:
    """Return each worker's median step in milliseconds, one row each, as wide as the console allows.

    At 80 columns no heading or number is cut. A part that no worker spent time on has no column, nor has the share of
    steps in which a worker was last where workers do not wait for each other.
    """
    parts = [
        name
        for name, field in _COLUMNS.items()
        if name in _ALWAYS or any(f"{getattr(path.parts, field):.2f}" != "0.00" for path in found.workers)
    ]
    unbounded = console.options.update(max_width=_UNBOUNDED)
    tables = [_workers(found, parts, gap) for gap in _GAPS]
    fitting = (
        table for table in tables if console.measure(table, options=unbounded).maximum <= console.width
    )
    return next(fitting, tables[-1])


def _workers(found: Explanation, parts: list[str], gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    last = ("came\nlast",) if found.synchronous else ()
    for column in ("worker", "steps", "step, ms", *parts, *last):
        table.add_column(column, justify="right", overflow="fold", vertical="bottom")
    for path in found.workers:
        table.add_row(*_cells(path, parts), *((f"{100 * path.last_share:.0f} %",) if last else ()))
    return table


def _cells(path: WorkerPath, parts: list[str]) -> list[str]:
    times = [path.parts.step_ms, *(getattr(path.parts, _COLUMNS[name]) for name in parts)]
    return [str(path.worker), str(path.steps), *map(_milliseconds, times)]


def _milliseconds(time: float) -> str:
    """Format in at most seven characters up to a quarter of an hour: seconds need no hundredths of a millisecond."""
    return f"{time:.2f}" if time < 1000 else f"{time:.0f}"
