"""The table at the end of a run: where each worker's time went, and which workers held up the others."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from manyhands.observe.analyse.remarks import about_workers
from manyhands.observe.analyse.slowness import Late, Straggler
from manyhands.observe.analyse.totals import WorkerTotals

__all__ = ["end_table", "end_text", "words_table"]

_TEXT_WIDTH = 100


def end_table(summary: Mapping[str, Any]) -> Table:
    """Return the totals `per_worker` of a run's summary as a table, with warnings below."""
    workers = [WorkerTotals.from_dict(row) for row in summary["per_worker"]]
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", caption_style="", pad_edge=False)
    table.add_column("worker", justify="right")
    table.add_column("steps", justify="right")
    for name in ("compute", "exchange", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
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
    slow = [Straggler.from_dict(row) for row in summary.get("slow", ())]
    late = Late.from_dict(summary["late"]) if summary.get("late") else None
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


def end_text(summary: Mapping[str, Any]) -> str:
    """Return the same as plain text without colours, for files, pipes and logs."""
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(end_table(summary))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
