"""Which gradient lies where: parameters laid into buckets in the order in which backward reaches them.

The layout of DistributedDataParallel (Li et al., VLDB 2020): reverse registration order, a small first bucket so that
the exchange starts early, then buckets up to a cap. Pure: the same parameters give the same layout on every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyhands.memory.segment import round_up

__all__ = ["BucketLayout", "Slot", "lay_out", "padded"]

FIRST_BUCKET_BYTES = 1024 * 1024
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lies: `count` items from `offset` (in items) of its bucket."""

    parameter: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One bucket: its items are of one dtype, its slots in the order in which backward fills them."""

    dtype: torch.dtype
    count: int
    slots: tuple[Slot, ...]


def lay_out(
    parameters: Sequence[tuple[int, torch.dtype]],
    cap_bytes: int,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> tuple[BucketLayout, ...]:
    """Lay (number of items, dtype) of each parameter, in registration order, into buckets in launch order."""
    closed: list[BucketLayout] = []
    open_slots: dict[torch.dtype, list[Slot]] = {}
    open_counts: dict[torch.dtype, int] = {}

    def close(dtype: torch.dtype) -> None:
        slots = open_slots.pop(dtype)
        closed.append(BucketLayout(dtype=dtype, count=open_counts.pop(dtype), slots=tuple(slots)))

    for index in reversed(range(len(parameters))):
        count, dtype = parameters[index]
        offset = open_counts.get(dtype, 0)
        open_slots.setdefault(dtype, []).append(Slot(parameter=index, offset=offset, count=count))
        open_counts[dtype] = offset + padded(count, dtype)
        cap = cap_bytes if closed else min(first_bytes, cap_bytes)
        if open_counts[dtype] * dtype.itemsize >= cap:
            close(dtype)
    for dtype in list(open_slots):
        close(dtype)
    return tuple(closed)


def padded(count: int, dtype: torch.dtype) -> int:
    """How many items of a bucket a slot of `count` items takes, so that the next one begins on its own line."""
    return round_up(count, _ALIGN_BYTES // dtype.itemsize)
