"""How many steps of other workers fell between a worker's read of shared memory and its write. Pure."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["overlap_summary", "overlap_told"]


def overlap_summary(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """A histogram over all workers: steps of others between read and write, and how many steps had so many."""
    overlap: collections.Counter[int] = collections.Counter()
    for counts in workers:
        overlap.update({int(number): count for number, count in counts.items()})
    steps = sum(overlap.values())
    return {
        "mean": sum(number * count for number, count in overlap.items()) / steps if steps else 0.0,
        "max": max(overlap, default=0),
        "histogram": {str(number): overlap[number] for number in sorted(overlap)},
    }


def overlap_told(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """The summary's entry; empty for one worker, or where nothing was counted."""
    return {"overlap": overlap_summary(workers)} if len(workers) > 1 and any(workers) else {}
