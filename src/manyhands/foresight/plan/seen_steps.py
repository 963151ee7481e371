"""How long the steps of a run took, from its history."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["seen_step_s"]

_WARM = 4  # steps that do not count: memory is taken, links are opened
_WINDOW = 5


def seen_step_s(rows: Iterable[Mapping[str, Any]], workers: int) -> float | None:
    """The median time of a global batch, over windows of a few; None where too few were done to tell.

    Windows, since workers that do not wait for each other end their batches in bunches.
    """
    ends: list[float] = sorted(row["at_s"] for row in rows if "seconds" in row and "at_s" in row)[_WARM:]
    window = max(_WINDOW, 2 * workers)
    if len(ends) > 2 * window:
        return statistics.median(
            (late - early) / window for early, late in zip(ends, ends[window:], strict=False)
        )
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None
