"""A finished run for notebooks and terminals: a short table with its loss curve, or one line.

The curve is a separate image (`<img>`), so that the styles of the notebook and of the chart do not affect each other.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from manyhands.observe.analyse.remarks import headline, in_order
from manyhands.observe.analyse.totals import TotalsSnapshot, WorkerTotals
from manyhands.observe.draw.axes import short_number
from manyhands.observe.draw.charts import Series, loss_chart
from manyhands.observe.draw.paper import STYLE, data_table
from manyhands.observe.draw.showing import Panel
from manyhands.observe.record.checked_values import final_loss

_WIDTH = 480
_LEAST_WAITING = 0.005  # share of a worker's time; less rounds to nothing


def facts_of(
    summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], path: Path | None = None
) -> list[tuple[str, str]]:
    """Return names and values about a run; `steps` are its rows that have a loss."""
    facts = [(name, str(summary[name])) for name in ("task", "strategy", "workers") if name in summary]
    if "steps" in summary:
        done, asked = summary["steps"], summary.get("steps_asked")
        facts.append(("steps", f"{done} of {asked}" if asked not in (None, done) else str(done)))
    if steps:
        first, last = _ends(steps)
        facts.append(("loss", f"{first} → {last}"))
    measured = [one for one in summary.get("final", {}).items() if one[0] != "loss"]
    facts += [(name, short_number(_number(value))) for name, value in measured]
    if "seconds" in summary:
        facts.append(("time", f"{summary['seconds']:.1f} s"))
    if summary.get("samples_per_s"):
        facts.append(("speed", f"{summary['samples_per_s']:,.0f} samples/s"))
    workers = [WorkerTotals.from_dict(row) for row in summary.get("per_worker", ())]
    if len(workers) > 1:
        most = max(workers, key=lambda worker: worker.split().wait)
        peer = most.waits_mostly_for()
        whom = f", mostly for {peer}" if peer is not None else ""
        waited = f"worker {most.worker} {100 * most.split().wait:.0f} % of its time{whom}"
        facts.append(("waiting", waited if most.split().wait >= _LEAST_WAITING else "none"))
    if path is not None:
        facts.append(("directory", str(path)))
    return [(name, value) for name, value in facts if value]


def run_line(facts: Iterable[tuple[str, str]]) -> str:
    words = []
    for name, value in facts:
        match name:
            case "task" | "strategy" | "time" | "speed" | "directory":  # they say themselves what they are
                words.append(value)
            case "workers" | "steps":
                words.append(f"{value} {name.removesuffix('s') if value == '1' else name}")
            case _:
                words.append(f"{name} {value}")
    return " · ".join(words)


def loss_curve(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the loss over the steps as an image with inline data; empty where there is no step."""
    if not steps:
        return ""
    first, last = _ends(steps)
    steps = sorted(steps, key=lambda row: row["step"])  # asynchronous runs are unordered
    losses = [_number(row["loss"]) for row in steps]
    curve = Series(name="loss", xs=[float(row["step"]) for row in steps], ys=losses)
    figure = loss_chart([curve], title="Loss", x_label="step")
    svg = figure[figure.index("<svg xmlns") : figure.rindex("</svg>") + len("</svg>")]
    opening, _, drawn = svg.partition(">")
    style = f"<style>{STYLE} svg.chart {{ background: var(--card); }}</style>"
    picture = base64.b64encode(f"{opening}>{style}{drawn}".encode(errors="backslashreplace")).decode()
    return (
        f'<img width="{_WIDTH}" alt="loss over steps, from {escape(first)} to {escape(last)}" '
        f'src="data:image/svg+xml;base64,{picture}"/>'
    )


def run_html(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], path: Path | None = None) -> str:
    left = 'style="text-align: left"'  # overrides the notebook's style
    rows = "".join(
        f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>"
        for name, value in facts_of(summary, steps, path)
    )
    html = f"<div><table><tbody>{rows}</tbody></table>{loss_curve(steps)}</div>"
    return html.encode(errors="backslashreplace").decode()  # a task may return something that is not text


def _ends(steps: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    first = min(steps, key=lambda row: row["step"])
    return short_number(_number(first["loss"])), short_number(_number(final_loss(steps)))


def _number(value: Any) -> float:
    """Return a number of the history, in which non-finite values may be None."""
    return float("nan") if value is None else float(value)


_SLOT_COLUMNS = ("slot", "steps", "compute", "exchange", "waiting", "mostly for")


def running_line(strategy: str, slots: Sequence[int], steps: int, now: TotalsSnapshot | None) -> str:
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
    rows = [[str(slot), "starting", "", "", "", ""] for slot in slots]
    for row, slot in zip(rows, slots, strict=True):
        if (worker := known.get(slot)) is not None:
            peer = worker.waits_mostly_for()
            shares = [f"{100 * share:.0f} %" for share in worker.split()]
            row[1:] = [str(worker.steps), *shares, "" if peer is None else str(peer)]
    return f"<div>{panel}{data_table(_SLOT_COLUMNS, rows, title=strategy, scrolls=False)}</div>"


def ended_html(sentence: str) -> str:
    return f"<div><code>{escape(sentence)}</code></div>"
