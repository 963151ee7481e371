"""The report of a run: what the live page shows, in one file beside its events; and the picture of what it trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.analyse.source import existing_run
from manyhands.draw.charts import Series, data_table, document, line_chart, section
from manyhands.draw.page import report
from manyhands.store.atomic import write_atomically

if TYPE_CHECKING:
    from manyhands.tasks.builtin import TaskTable

__all__ = ["write_picture", "write_report"]


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write `report.html` into the run's directory, or `out`; UserError where there is no run."""
    path = out or run / "report.html"
    write_atomically(path, [report(existing_run(run).poll()).encode()])
    return path


def write_picture(run: Path, table: TaskTable) -> Path:
    """Write `picture.html` into the run's directory: a task's table, and its curves with their points."""
    path = run / "picture.html"
    series = [Series(name=one.name, xs=one.xs, ys=one.ys, dots=one.dots) for one in table.curves]
    (middle,) = (one.ys for one in table.curves if one.name == table.against)
    apart = [
        Series(name=one.name, xs=one.xs, ys=[y - other for y, other in zip(one.ys, middle, strict=True)])
        for one in table.curves
    ]
    charts = (
        line_chart(series, title="The points of each worker, and the lines", x_label="x", y_label="y"),
        line_chart(apart, title=f"How far each line is above “{table.against}”", x_label="x", y_label="y"),
    )
    rows = data_table(table.head, table.rows, title="The numbers")
    headings = ("The lines", "The lines apart")
    sections = [section(f"chart-{n}", headings[n], chart) for n, chart in enumerate(charts)]
    page = document(table.title, [*sections, section("rows", "In numbers", rows, "wide")])
    write_atomically(path, [page.encode()])
    return path
