"""How many steps of others came between a worker's reading of one memory and its writing, over all workers. Pure."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["overlap_summary", "overlap_told"]


def overlap_summary(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """Steps of others between reading and writing: their number, by how many steps had so many, over all workers."""
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
    """What a summary says of it: nothing of one worker, or where it was not counted."""
    return {"overlap": overlap_summary(workers)} if len(workers) > 1 and any(workers) else {}
