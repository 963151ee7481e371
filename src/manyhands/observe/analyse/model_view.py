"""What a model of tables is worth, from the summary of its run: scores, a confusion table, important features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.observe.analyse.view import ModelView
from manyhands.observe.record.checked_values import number, text, whole

_MOST_FEATURES = 10
_MOST_LABELS = 100


def model_view(summary: Mapping[str, Any]) -> ModelView | None:
    """None where the run did not measure its model; what is damaged is left out."""
    found, features = summary.get("quality"), summary.get("importance")
    measured: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    rows = [one for one in features if isinstance(one, Mapping)] if isinstance(features, list) else []
    if not measured and not rows:
        return None
    scores = measured.get("scores")
    labels = _list(measured.get("labels"))[:_MOST_LABELS]
    table = [[whole(one) or 0 for one in _list(row)] for row in _list(measured.get("confusion"))]
    is_square = len(table) == len(labels) and all(len(row) == len(labels) for row in table)
    return ModelView(
        measured_on=text(measured.get("measured_on")),
        scores={
            text(name): value
            for name, one in (scores.items() if isinstance(scores, Mapping) else ())
            if (value := number(one)) is not None
        },
        labels=tuple(text(str(one)) for one in labels) if is_square else (),
        confusion=tuple(map(tuple, table)) if is_square else (),
        by_label=_by_label(labels, table) if is_square and len(labels) > 2 else (),
        importance=tuple(
            (text(one.get("feature")), number(one.get("gain")) or 0.0, whole(one.get("splits")) or 0)
            for one in rows[:_MOST_FEATURES]
        ),
        features=len(rows),
    )


def _by_label(
    labels: Sequence[Any], table: Sequence[Sequence[int]]
) -> tuple[tuple[str, int, float, float, float], ...]:
    """What was never predicted has precision 0, as in scikit-learn."""
    rows, predicted = [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]
    return tuple(
        (
            text(str(label)),
            rows[at],
            table[at][at] / max(1, predicted[at]),
            table[at][at] / max(1, rows[at]),
            2 * table[at][at] / max(1, predicted[at] + rows[at]),
        )
        for at, label in enumerate(labels)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
