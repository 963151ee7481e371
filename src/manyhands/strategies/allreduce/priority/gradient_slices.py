"""Gradients in slices: the units that are sent, and the parameters that wait for each. Pure.

A bucket is cut between its tensors, and a tensor that is larger than a slice is cut itself, so that nothing urgent
waits for more than a slice (P3: Jayarajan et al., MLSys 2019). A slice is a `Parcel` whose priority is the number of
the first parameter in it: the next forward needs that one first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from manyhands.wire.flat_layout import LINE_BYTES, BucketLayout, LayoutSlot
from manyhands.wire.parcels import Parcel

__all__ = ["GradientSlice", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSlice:
    """A part of a bucket that is summed as one unit."""

    parcel: Parcel
    """Which bytes of which bucket it is; a lower priority is more urgent."""

    parameters: tuple[int, ...]
    """The parameters with items in this slice."""

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"slice {self.parcel.key} belongs to no parameter")


def cut(layouts: Sequence[BucketLayout], most_bytes: int) -> tuple[GradientSlice, ...]:
    """Cut every bucket into slices of at most `most_bytes`, rounded up to a cache line; in launch order."""
    return tuple(
        piece for number, layout in enumerate(layouts) for piece in _cut_bucket(number, layout, most_bytes)
    )


def _cut_bucket(number: int, layout: BucketLayout, most_bytes: int) -> Iterator[GradientSlice]:
    line = LINE_BYTES // layout.dtype.itemsize
    most = max(line, most_bytes // layout.dtype.itemsize // line * line)
    whole = layout.parcel(number)
    slots = [slot for slot in layout.slots if slot.count]
    ends = [*(slot.offset for slot in slots[1:]), layout.count][: len(slots)]
    together: list[LayoutSlot] = []
    begin = 0
    for slot, end in zip(slots, ends, strict=True):
        if together and end - begin > most:
            yield _slice(whole, begin, slot.offset, together)
            together, begin = [], slot.offset
        together.append(slot)
        while end - begin > most:
            yield _slice(whole, begin, begin + most, together)
            begin += most
    if layout.count > begin:
        yield _slice(whole, begin, layout.count, together)


def _slice(whole: Parcel, begin: int, end: int, slots: Sequence[LayoutSlot]) -> GradientSlice:
    numbers = tuple(slot.parameter for slot in slots)
    return GradientSlice(parcel=replace(whole.part(begin, end), priority=min(numbers)), parameters=numbers)
