"""How many steps of others came between a hogwild worker's reading and its writing, over all workers. Pure."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["overlap_summary"]


def overlap_summary(workers: Sequence[Mapping[str, int]]) -> dict[str, Any]:
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
