"""A run in the background, as a line and as notebook HTML: a bar, and a row for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from manyhands.observe.analyse.totals import TotalsSnapshot, WorkerTotals
from manyhands.observe.draw.charts import data_table
from manyhands.observe.draw.headline import headline, in_order
from manyhands.observe.draw.showing import Panel

__all__ = ["ended_html", "running_html", "running_line"]

_COLUMNS = ("slot", "steps", "compute", "exchange", "waiting", "mostly for")


def running_line(strategy: str, slots: Sequence[int], steps: int, now: TotalsSnapshot | None) -> str:
    """Return the progress as one line; `now` is None while the run starts."""
    workers = f"slots {', '.join(map(str, slots))}" if len(slots) > 1 else f"slot {slots[0]}"
    how_far = "starting" if now is None else in_order(headline(now, steps))
    return f"{strategy} · {workers} · {how_far}"


def running_html(strategy: str, slots: Sequence[int], steps: int, now: TotalsSnapshot | None) -> str:
    """Return the progress with the split of each slot's time; a slot without events says so."""
    if now is None:
        panel, known = f"<div><code>{escape(strategy)}: starting</code></div>", {}
    else:
        panel = Panel(now, steps, strategy)._repr_html_()
        known = {worker.worker: worker for worker in now.workers if worker.steps}
    table = data_table(
        _COLUMNS, [_row(slot, known.get(slot)) for slot in slots], title=strategy, scrolls=False
    )
    return f"<div>{panel}{table}</div>"


def ended_html(sentence: str) -> str:
    """Return why the run ended."""
    return f"<div><code>{escape(sentence)}</code></div>"


def _row(slot: int, worker: WorkerTotals | None) -> list[str]:
    if worker is None:
        return [str(slot), "starting", "", "", "", ""]
    peer = worker.waits_mostly_for()
    shares = [f"{100 * share:.0f} %" for share in worker.split()]
    return [str(slot), str(worker.steps), *shares, "" if peer is None else str(peer)]
