"""The table at the end of a run: where each worker's time went, and which workers held up the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.errors import format_bytes
from manyhands.observe.analyse.explain import PART_WORDS, Explanation
from manyhands.observe.analyse.remarks import about_workers
from manyhands.observe.analyse.slow_workers import Late, Straggler, from_summary
from manyhands.observe.analyse.totals import WorkerTotals


def end_table(summary: Mapping[str, Any]) -> Table:
    workers = [WorkerTotals.from_dict(row) for row in summary["per_worker"]]
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", caption_style="", pad_edge=False)
    for name in ("worker", "steps", "compute", "exchange", "waiting"):
        table.add_column(name, justify="right", no_wrap=name not in ("worker", "steps"))
    table.add_column("mostly for")
    for worker in workers:
        seconds = (worker.compute_s, worker.exchange_s, worker.wait_s)
        peer = worker.waits_mostly_for()
        table.add_row(
            str(worker.worker),
            str(worker.steps),
            *(
                f"{_seconds(spent)} {100 * share:3.0f} %"
                for spent, share in zip(seconds, worker.split(), strict=True)
            ),
            "" if peer is None else f"{peer} ({_seconds(worker.wait_for_s[peer])})",
        )
    slow = [from_summary(Straggler, row) for row in summary.get("slow", ())]
    late = from_summary(Late, summary["late"]) if summary.get("late") else None
    notices = [*about_workers(slow, late, summary.get("strategy", "")), *summary["events"]["notes"]]
    table.caption = "\n".join(notices) or None
    return table


def words_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts; all columns but the first are right-aligned numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


_PARTS = ("compute", "exchange", "wait", "apply", "input", "other")
_COLUMNS = {{"wait": "waiting", "apply": "applying"}.get(part, part): f"{part}_ms" for part in _PARTS}
_ALWAYS = ("compute", "exchange", "waiting")  # the other parts only where they are not zero
_GAPS = (2, 1)  # gaps between two columns in characters; the first that fits is used
_UNBOUNDED = 10_000  # characters in a line


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """Return a table of texts without lines; all but the first `words` columns are right-aligned numbers."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(Text(name), justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # a name may look like markup
    return table


def parts_table(found: Explanation) -> Table:
    of_whom = "the critical path" if found.synchronous else "the mean worker"
    parts = {word: getattr(found.parts, field) for field, word in PART_WORDS.items()}
    whole = found.parts.step_ms
    rows = [(word, f"{ms:.2f}", f"{100 * ms / whole if whole else 0:.0f} %") for word, ms in parts.items()]
    others = {
        "in all": whole,
        "ideal": found.ideal_ms,
        "evaluation, per step": found.evaluate_ms,
        "checkpoints, per step": found.checkpoint_ms,
    }
    rows += [(word, f"{ms:.2f}", "") for word, ms in others.items()]
    return plain_table((f"median step of {of_whom}", "ms", "share"), rows)


def layers_table(layers: Iterable[Mapping[str, Any]]) -> Table:
    rows = [
        (
            *(row["layer"], row["how"]),
            *(format_bytes(row[name]) for name in ("forward_bytes", "backward_bytes")),
            f"{round(row['messages'], 1):g}",
        )
        for row in layers
    ]
    return plain_table(("layer", "sliced", "sent forward", "sent backward", "messages"), rows, words=2)


def workers_table(found: Explanation, console: Console) -> Table:
    """Return each worker's median step in milliseconds, as wide as the console allows; empty parts are left out."""
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
        times = [path.parts.step_ms, *(getattr(path.parts, _COLUMNS[name]) for name in parts)]
        # At most seven characters up to a quarter of an hour: seconds need no hundredths of a millisecond.
        shown = [f"{time:.2f}" if time < 1000 else f"{time:.0f}" for time in times]
        came_last = [f"{100 * path.last_share:.0f} %"] if last else []
        table.add_row(str(path.worker), str(path.steps), *shown, *came_last)
    return table
