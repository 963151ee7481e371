"""Checked access to values of a run's JSON files, which may be damaged or come from elsewhere.

A value of the wrong type, or beyond what any run writes, is treated as missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from manyhands.errors import printable

_MOST_WHOLE = 1 << 53  # floats hold integers up to this exactly, so arithmetic and drawing cannot fail
_MOST_TEXT = 2000


def whole(value: Any) -> int | None:
    """Return an integer that a run may write, else None; booleans are not integers here."""
    if isinstance(value, int) and not isinstance(value, bool) and -_MOST_WHOLE < value < _MOST_WHOLE:
        return value
    return None


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str:
    """Return the text on one line: at most 2,000 characters, control characters escaped; "" for other types."""
    return printable(value, _MOST_TEXT - 1) if isinstance(value, str) else ""


def last_row(rows: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """Return the row with `name` of the greatest step; the last such row where there are several.

    The one definition of what a run ended with. Where workers do not wait for each other, rows arrive in another order
    than that of their steps: the row that arrived last says nothing.
    """
    last = None
    for row in rows:
        if row.get(name) is not None and (last is None or row["step"] >= last["step"]):
            last = row
    return last


_LOGGED = re.compile(r"lr(_[0-9]{1,2})?|grad_norm")


def final_loss(rows: Iterable[Mapping[str, Any]]) -> float | None:
    last = last_row(rows, "loss")
    return None if last is None else float(last["loss"])


def logged_values(row: Mapping[str, Any]) -> dict[str, float]:
    """The learning rates and the gradient's norm in a step's row, where the run logs them."""
    named = ((name, number(value)) for name, value in row.items() if _LOGGED.fullmatch(str(name)))
    return {name: value for name, value in named if value is not None}


def final_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    last = last_row(rows, "metrics")
    return {} if last is None else dict(last["metrics"])
