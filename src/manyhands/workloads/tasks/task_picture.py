"""The picture of what a task's workers found, as one page beside the run's report."""

from __future__ import annotations

from pathlib import Path

from manyhands.data.store.atomic import write_atomically
from manyhands.observe.draw.charts import Series, data_table, document, line_chart, section
from manyhands.workloads.tasks.builtin import TaskTable

__all__ = ["write_picture"]


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
