"""The flat layout of tensors in buckets, for every transport.

A bucket holds tensors of one type, one after the other, each from a line of its own on; what is filled first travels
first. Gradients go into buckets as in DistributedDataParallel (Li et al., VLDB 2020): reverse registration order, a
small first bucket so that the exchange starts early, then buckets up to a cap. Unlike there, they grow to the cap by
doubling, so that the next is full before the last has been exchanged, and what backward reaches last is small again,
since nothing hides its exchange. Pure: the same tensors give the same layout on every worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from manyhands.native.segment import round_up
from manyhands.wire.parcels import Matrix, Parcel, gaps_between

FIRST_BUCKET_BYTES = 1024 * 1024
LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayoutSlot:
    """Where one tensor lies: `count` items from `offset` (in items) of its bucket."""

    parameter: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One bucket: its items are of one dtype, its slots in the order in which they are filled."""

    dtype: torch.dtype
    count: int
    slots: tuple[LayoutSlot, ...]

    def parcel(self, number: int, *, exact: bool = False, shapes: Sequence[torch.Size] = ()) -> Parcel:
        """The whole bucket as one parcel; `shapes` are those of the tensors, by their numbers.

        A tensor of more dimensions is a matrix with a row for each item of the first.
        """
        shaped = [(slot, shapes[slot.parameter]) for slot in self.slots if shapes and slot.count]
        return replace(
            Parcel.whole(number, self.count, self.dtype, exact=exact),
            matrices=tuple(
                Matrix(slot.offset, shape[0], slot.count // shape[0])
                for slot, shape in shaped
                if len(shape) > 1
            ),
            gaps=gaps_between(((slot.offset, slot.offset + slot.count) for slot in self.slots), self.count),
        )

    def views(self, bucket: Tensor) -> Iterator[tuple[int, Tensor]]:
        for slot in self.slots:
            yield slot.parameter, bucket[slot.offset : slot.offset + slot.count]


def bucket_of(dtype: torch.dtype, tensors: Iterable[tuple[int, int]]) -> BucketLayout:
    slots, end = [], 0
    for number, count in tensors:
        slots.append(LayoutSlot(parameter=number, offset=end, count=count))
        end += padded(count, dtype)
    return BucketLayout(dtype=dtype, count=end, slots=tuple(slots))


def lay_out(
    parameters: Sequence[tuple[int, torch.dtype]], cap_bytes: int, first_bytes: int = FIRST_BUCKET_BYTES
) -> tuple[BucketLayout, ...]:
    """Lay (number of items, dtype) of each parameter, in registration order, into buckets in launch order."""
    closed: list[BucketLayout] = []
    still_open: dict[torch.dtype, list[tuple[int, int]]] = {}
    open_counts: Counter[torch.dtype] = Counter()
    first_bytes = min(first_bytes, cap_bytes)
    up_to = [*accumulate(count * dtype.itemsize for count, dtype in parameters)]
    last = bisect_right(up_to, 2 * first_bytes)  # so many parameters are in the last buckets
    most_bytes = first_bytes
    for number in reversed(range(len(parameters))):
        count, dtype = parameters[number]
        still_open.setdefault(dtype, []).append((number, count))
        open_counts[dtype] += padded(count, dtype)
        if open_counts[dtype] * dtype.itemsize >= (first_bytes if number == last else most_bytes):
            closed.append(bucket_of(dtype, still_open.pop(dtype)))
            del open_counts[dtype]
            most_bytes = min(cap_bytes, 2 * most_bytes)
    return (*closed, *(bucket_of(dtype, tensors) for dtype, tensors in still_open.items()))


def padded(count: int, dtype: torch.dtype) -> int:
    """How many items of a bucket a slot of `count` items takes, so that the next one begins on its own line."""
    return round_up(count, LINE_BYTES // dtype.itemsize)


def side_by_side(sizes: Iterable[int], line_bytes: int = LINE_BYTES, begin: int = 0) -> tuple[list[int], int]:
    """Where each of so many bytes begins, every one on a line of its own, and where the last one's line ends."""
    offsets, end = [], begin
    for size in sizes:
        offsets.append(end)
        end = round_up(end + size, line_bytes)
    return offsets, end


def least_loaded(sizes: Sequence[int], owners: int, order: Sequence[int] | None = None) -> list[int]:
    """An owner for each: the largest first, to the least loaded (LPT, Graham 1969); ties in `order`, or as given."""
    loads, owner_of = [0] * owners, [0] * len(sizes)
    ranks = order if order is not None else range(len(sizes))
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], ranks[number])):
        owner_of[number] = loads.index(min(loads))
        loads[owner_of[number]] += sizes[number]
    return owner_of


def trainable(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The trainable parameters in registration order, each with all of its names: several where weights are tied."""
    named: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            named.setdefault(parameter, []).append(name)
    return named
