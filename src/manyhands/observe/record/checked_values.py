"""Values of a run's JSON files, taken for what they should be: a file that somebody was sent may hold anything.

A view shows what there is. What is of another kind, or beyond what any run writes, is as if it were not there.
"""

from __future__ import annotations

import math
from typing import Any

from manyhands.errors import printable

__all__ = ["number", "text", "whole"]

_MOST_WHOLE = 1 << 53  # what a float holds exactly, so that no division or drawing of it fails
_MOST_TEXT = 2000


def whole(value: Any) -> int | None:
    """A whole number as any run may write one, else None; `true` is none."""
    if isinstance(value, int) and not isinstance(value, bool) and -_MOST_WHOLE < value < _MOST_WHOLE:
        return value
    return None


def number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str:
    """A text as one line that can be shown: 2,000 characters at most, control characters escaped; "" for others."""
    return printable(value, _MOST_TEXT - 1) if isinstance(value, str) else ""
