"""What a model of tables is worth: scores and a confusion table on data held out, and its important features."""

from __future__ import annotations

from manyhands.observe.analyse.view import RunView
from manyhands.observe.draw.axes import short_number
from manyhands.observe.draw.paper import PageSection, data_table, matrix, tile

_MOST_DRAWN = 20  # labels of a confusion table


def model(run: RunView) -> PageSection:
    view = run.model
    if view is None:
        return PageSection("The model", "", "absent")
    parts = []
    if view.scores:
        tiles = "".join(tile(name, f"{value:.4g}") for name, value in view.scores.items())
        parts.append(f'<dl class="tiles">{tiles}</dl>')
    if 0 < len(view.confusion) <= _MOST_DRAWN:
        parts.append(
            matrix(
                view.confusion,
                [f"label {name}" for name in view.labels],
                [f"predicted {name}" for name in view.labels],
                title=f"Labels and predictions, {view.measured_on}",
                show=lambda count: f"{count:,.0f}",
            )
        )
    if view.by_label:
        figures = [
            (name, f"{rows:,}", *(f"{one:.3f}" for one in rest)) for name, rows, *rest in view.by_label
        ]
        parts.append(data_table(("label", "rows", "precision", "recall", "F1"), figures, title="By label"))
    body = "\n".join(parts)
    if view.importance:
        rows = [(name, short_number(gain), f"{splits:,}") for name, gain, splits in view.importance]
        some = f", {len(rows)} of {view.features}" * (len(rows) < view.features)
        table = data_table(("feature", "gain", "splits"), rows, title=f"Important features{some}")
        body = f'<div class="pair"><div>{body}</div><div>{table}</div></div>' if parts else table
    heading = f"The model on {view.measured_on}" if view.measured_on else "The model"
    return PageSection(heading, body, "wide")
