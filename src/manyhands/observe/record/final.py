"""What a run ended with, from the rows of its history: the one definition that every view, table and command uses.

The final loss of a run is that of its last step, the one with the greatest number, and its final metrics are those of
the evaluation after the most steps. Where workers do not wait for each other, rows arrive in another order than that of
their steps; the row that happened to arrive last says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["final_loss", "final_metrics", "last_row"]


def last_row(rows: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Return the row with `name` of the greatest step; the last such row where there are several."""
    last = None
    for row in rows:
        if row.get(name) is not None and (last is None or row["step"] >= last["step"]):
            last = row
    return last


def final_loss(rows: Iterable[Mapping[str, Any]]) -> float | None:
    last = last_row(rows, "loss")
    return None if last is None else float(last["loss"])


def final_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    last = last_row(rows, "metrics")
    return {} if last is None else dict(last["metrics"])
