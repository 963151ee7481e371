"""The one copy of a model's parameters on this host: memory that every worker's model reads in place.

Trainable parameters have the layout of their gradient buckets, so that a worker's range of a bucket is also a range
of the parameters, and only that worker writes it. Frozen ones follow, and are not written again.

The shared copy is authoritative; `values` are views of it. A model on the CPU has no other parameters: each
`parameter.data` is such a view. A model on a GPU has a copy there, refreshed after every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup, slice_of
from manyhands.native.segment import CACHE_LINE, Segment
from manyhands.strategies.common.sharding.sliced_optimizer import Piece
from manyhands.wire.flat_layout import BucketLayout, LayoutSlot, bucket_of, least_loaded, padded, side_by_side

__all__ = ["CentralParameters", "Ownership", "cut", "keep_whole"]


class CentralParameters:
    """Moves the parameters of `model` into shared memory; constructed on every worker (collective).

    The values of the host's first worker are used. `close` is idempotent; the model keeps its memory while it lives.
    """

    def __init__(self, group: SharedGroup, model: nn.Module, layouts: Sequence[BucketLayout]) -> None:
        named = list(model.named_parameters())
        _require_movable(named)
        self._parameters = [parameter for _, parameter in named]
        self._segment: Segment | None = None
        places, num_bytes = _lay_out(self._parameters, layouts)
        self._segment = group.share(num_bytes, "the parameters of the model")
        views = [
            self._segment.tensor(place, parameter.numel(), parameter.dtype).view(parameter.shape)
            for place, parameter in zip(places, self._parameters, strict=True)
        ]
        if group.rank == 0:
            for view, parameter in zip(views, self._parameters, strict=True):
                view.copy_(parameter.detach())
        group.barrier()
        self.shared = views
        """The shared copy of every parameter, in the order of the model."""
        self._on_gpu = any(parameter.device.type == "cuda" for parameter in self._parameters)
        if self._on_gpu:
            self.refresh()
        else:
            for view, parameter in zip(views, self._parameters, strict=True):
                parameter.data = view
        self.values = [view for view, p in zip(views, self._parameters, strict=True) if p.requires_grad]
        """The shared copy of each trainable parameter, in registration order."""

    def refresh(self) -> None:
        """After all owners have written: copy to the GPU, or tell autograd, which cannot see others' writes."""
        if not self._on_gpu:
            torch.autograd.graph.increment_version(self._parameters)
            return
        with torch.no_grad():
            for view, parameter in zip(self.shared, self._parameters, strict=True):
                parameter.copy_(view, non_blocking=True)

    def close(self) -> None:
        self.values, self.shared = [], []
        if self._segment is not None:
            self._segment.close()


@dataclass(frozen=True, slots=True)
class _Extent:
    """The memory range of a parameter in this process."""

    begin: int
    end: int
    name: str


def _lay_out(parameters: Sequence[nn.Parameter], layouts: Sequence[BucketLayout]) -> tuple[list[int], int]:
    """Return where each parameter begins, in bytes, and the total size."""
    begins, end = side_by_side((layout.count * layout.dtype.itemsize for layout in layouts), CACHE_LINE)
    by_slot = {
        slot.parameter: begin + slot.offset * layout.dtype.itemsize
        for begin, layout in zip(begins, layouts, strict=True)
        for slot in layout.slots
    }
    frozen, end = side_by_side((one.nbytes for one in parameters if not one.requires_grad), CACHE_LINE, end)
    trained, kept = iter(sorted(by_slot)), iter(frozen)
    return [by_slot[next(trained)] if one.requires_grad else next(kept) for one in parameters], end


def _require_movable(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise UserError for parameters that one shared copy cannot represent."""
    for name, parameter in named:
        if parameter.device.type not in ("cpu", "cuda"):
            raise UserError(f"parameter {name!r} is on {parameter.device}; central trains on cpu and cuda")
    extents = sorted(
        (
            _Extent(parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
            for name, parameter in named
            if parameter.numel()
        ),
        key=lambda extent: extent.begin,
    )
    for one, next_one in pairwise(extents):
        if next_one.begin < one.end:
            raise UserError(
                f"parameters {one.name!r} and {next_one.name!r} are different parameters in the same memory, which "
                "would come apart; tie them by assigning one Parameter to both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """A partition of all parameters; every item belongs to exactly one worker."""

    layouts: tuple[BucketLayout, ...]
    """The buckets, with slots possibly reordered."""

    ranges: tuple[tuple[range, ...], ...]
    """By bucket and worker: the items of the bucket that the worker owns."""

    pieces: tuple[tuple[Piece, ...], ...]
    """By worker: what it owns, in the order of the parameters; at most one piece of each."""


def cut(layouts: Sequence[BucketLayout], world: int) -> Ownership:
    """Divide every bucket evenly, to the cache line, wherever the cut falls."""
    ranges = tuple(
        tuple(slice_of(layout.count, layout.dtype.itemsize, rank, world) for rank in range(world))
        for layout in layouts
    )
    return Ownership(layouts=tuple(layouts), ranges=ranges, pieces=_pieces(layouts, ranges, world))


def keep_whole(layouts: Sequence[BucketLayout], world: int, most: int | None = None) -> Ownership:
    """Give every parameter to one worker, as evenly in bytes as the sizes allow.

    The slots are in the order of `most` owners (None: `world`, which is at most that); each worker stands for one or
    several neighbouring owners.
    """
    places = _owners(layouts, most or world)
    sorted_layouts = tuple(_sorted(layout, places) for layout in layouts)
    owners = {number: place * world // (most or world) for number, place in places.items()}
    ranges = tuple(_ranges(layout, owners, world) for layout in sorted_layouts)
    return Ownership(layouts=sorted_layouts, ranges=ranges, pieces=_pieces(sorted_layouts, ranges, world))


def _owners(layouts: Sequence[BucketLayout], world: int) -> dict[int, int]:
    slots = [(slot, layout.dtype.itemsize) for layout in layouts for slot in layout.slots]
    numbers = [slot.parameter for slot, _ in slots]
    owners = least_loaded([slot.count * item for slot, item in slots], world, numbers)
    return dict(zip(numbers, owners, strict=True))


def _sorted(layout: BucketLayout, owners: dict[int, int]) -> BucketLayout:
    slots = sorted(layout.slots, key=lambda slot: owners[slot.parameter])
    return bucket_of(layout.dtype, ((slot.parameter, slot.count) for slot in slots))


def _ranges(layout: BucketLayout, owners: dict[int, int], world: int) -> tuple[range, ...]:
    ends = [0] * world
    for slot in layout.slots:
        ends[owners[slot.parameter]] = slot.offset + padded(slot.count, layout.dtype)
    begin, ranges = 0, []
    for end in ends:
        ranges.append(range(begin, max(begin, end)))
        begin = ranges[-1].stop
    return tuple(ranges)


def _pieces(
    layouts: Sequence[BucketLayout], ranges: Sequence[Sequence[range]], world: int
) -> tuple[tuple[Piece, ...], ...]:
    owned: list[list[Piece]] = [[] for _ in range(world)]
    for layout, by_rank in zip(layouts, ranges, strict=True):
        for slot in layout.slots:
            for rank, mine in enumerate(by_rank):
                piece = _overlap(slot, mine)
                if piece.begin < piece.end or (slot.count == 0 and rank == 0):
                    owned[rank].append(piece)
    return tuple(tuple(sorted(pieces, key=lambda piece: piece.parameter)) for pieces in owned)


def _overlap(slot: LayoutSlot, mine: range) -> Piece:
    begin = min(max(mine.start - slot.offset, 0), slot.count)
    end = min(max(mine.stop - slot.offset, 0), slot.count)
    return Piece(slot.parameter, begin, end)
