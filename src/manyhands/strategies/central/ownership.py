"""Which worker owns which part of the parameters: it reduces their gradient and applies the optimizer to them.

The partition of ZeRO (Rajbhandari et al., SC 2020), laid over the gradient buckets. For an optimizer that treats
every item by itself the cut may fall anywhere: each bucket is divided evenly over all workers, so no worker waits for
the only owner of a bucket. Any other optimizer keeps its tensors whole: the largest goes first, to the worker with
the least (LPT, Graham 1969), and the slots of each bucket are sorted by owner, so that a worker's share of a bucket
is still one range.

    cut      a a a a b · b c c c d      both workers own a part of b
    whole    a a a a d · b b c c c      d has moved

Pure: the same layouts give the same ownership on every worker. With several hosts, the order of the slots is the same
on all of them, so that their buckets can be summed. Where tensors stay whole it is the order of the host with the
most workers; on a smaller host a worker owns what several neighbours own there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.native.group.shared_group import slice_of
from manyhands.strategies.common.sharding.sliced_optimizer import Piece
from manyhands.wire.flat_layout import BucketLayout, LayoutSlot, bucket_of, least_loaded, padded

__all__ = ["Ownership", "cut", "keep_whole"]


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
