"""The one copy of a model's parameters on this host: memory that every worker's model reads in place.

Trainable parameters have the layout of their gradient buckets, so that a worker's range of a bucket is also a range
of the parameters, and only that worker writes it. Frozen ones follow, and are not written again. A model on the CPU
has no other parameters: each `parameter.data` is a view. A model on a GPU has a copy, refreshed after every step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.data.store.state_tree import Json, flatten, unflatten
from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.native.group.shared_group import SharedGroup, slice_of
from manyhands.native.segment import CACHE_LINE
from manyhands.strategies.common.collectives.collective import gradient_layouts
from manyhands.strategies.common.sharding.layer_units import require_apart
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.common.sharding.sliced_optimizer import MergedState, OwnedPiece, Piece
from manyhands.wire.flat_layout import BucketLayout, bucket_of, least_loaded, padded, side_by_side


class CentralParameters:
    """Moves the parameters of `model` into shared memory; constructed on every worker (collective).

    The values of the host's first worker are used. `close` is idempotent; the model keeps its memory while it lives.
    """

    def __init__(self, group: SharedGroup, model: nn.Module, layouts: Sequence[BucketLayout]) -> None:
        named = list(model.named_parameters())
        for name, parameter in named:
            if parameter.device.type not in ("cpu", "cuda"):
                raise UserError(f"parameter {name!r} is on {parameter.device}; central supports cpu and cuda")
        require_apart(named)
        self._parameters = [parameter for _, parameter in named]
        begins, end = side_by_side((layout.count * layout.dtype.itemsize for layout in layouts), CACHE_LINE)
        by_slot = {
            slot.parameter: begin + slot.offset * layout.dtype.itemsize
            for begin, layout in zip(begins, layouts, strict=True)
            for slot in layout.slots
        }
        frozen_bytes = (one.nbytes for one in self._parameters if not one.requires_grad)
        frozen, num_bytes = side_by_side(frozen_bytes, CACHE_LINE, end)
        trained, kept = iter(sorted(by_slot)), iter(frozen)
        places = [by_slot[next(trained)] if one.requires_grad else next(kept) for one in self._parameters]
        self._segment = group.share(num_bytes, "the parameters of the model")
        views = [
            self._segment.tensor(place, parameter.numel(), parameter.dtype).view(parameter.shape)
            for place, parameter in zip(places, self._parameters, strict=True)
        ]
        if group.rank == 0:
            for view, parameter in zip(views, self._parameters, strict=True):
                view.copy_(parameter.detach())
        group.barrier()
        self.shared = views  # the shared copy of every parameter, in the order of the model
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
        self._segment.close()


# Which worker owns which part of the parameters: it reduces their gradient and applies the optimizer to them.
# The partition of ZeRO (Rajbhandari et al., SC 2020), laid over the gradient buckets. For an optimizer that treats
# every item by itself the cut may fall anywhere: each bucket is divided evenly over all workers, so no worker waits for
# the only owner of a bucket. Any other optimizer keeps its tensors whole: the largest goes first, to the worker with
# the least (LPT, Graham 1969), and the slots of each bucket are sorted by owner, so that a worker's share of a bucket
# is still one range.
#
#     cut      a a a a b · b c c c d      both workers own a part of b
#     whole    a a a a d · b b c c c      d has moved
#
# Pure: the same layouts give the same ownership on every worker. With several hosts, the order of the slots is the same
# on all of them, so that their buckets can be summed. Where tensors stay whole it is the order of the host with the
# most workers; on a smaller host a worker owns what several neighbours own there.
@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """A partition of all parameters; every item belongs to exactly one worker."""

    layouts: tuple[BucketLayout, ...]  # the buckets, with slots possibly reordered
    ranges: tuple[tuple[range, ...], ...]  # by bucket and worker: the items that it owns
    pieces: tuple[tuple[Piece, ...], ...]  # by worker: in the order of the parameters, at most one of each


def ownership_of(
    model: nn.Module,
    optimizer: Optimizer,
    bucket_bytes: int,
    ways: Sequence[Stepping],
    world: int,
    most: int | None = None,
) -> Ownership:
    """Who owns what, where the optimizer may step in these ways; none: it is the only worker's.

    A UserError names an optimizer that cannot be partitioned. `most` is as for `keep_whole`.
    """
    layouts = gradient_layouts(model, bucket_bytes)
    if not ways or stepping_for(optimizer, ways, "central") is Stepping.IN_PIECES:
        return cut(layouts, world)
    return keep_whole(layouts, world, most)


def cut(layouts: Sequence[BucketLayout], world: int) -> Ownership:
    """Divide every bucket evenly, to the cache line, wherever the cut falls."""
    ranges = (
        tuple(slice_of(layout.count, layout.dtype.itemsize, rank, world) for rank in range(world))
        for layout in layouts
    )
    return _owned(layouts, tuple(ranges), world)


def keep_whole(layouts: Sequence[BucketLayout], world: int, most: int | None = None) -> Ownership:
    """Give every parameter to one worker, as evenly in bytes as the sizes allow.

    The slots are in the order of `most` owners (None: `world`, which is at most that); each worker stands for one or
    several neighbouring owners.
    """
    slots = [(slot, layout.dtype.itemsize) for layout in layouts for slot in layout.slots]
    numbers = [slot.parameter for slot, _ in slots]
    loads = least_loaded([slot.count * item for slot, item in slots], most or world, numbers)
    places = dict(zip(numbers, loads, strict=True))
    sorted_layouts, all_ranges = [], []
    for one in layouts:
        in_order = sorted(one.slots, key=lambda slot: places[slot.parameter])
        layout = bucket_of(one.dtype, ((slot.parameter, slot.count) for slot in in_order))
        ends = [0] * world
        for slot in layout.slots:
            owner = places[slot.parameter] * world // (most or world)
            ends[owner] = slot.offset + padded(slot.count, layout.dtype)
        borders = [0, *accumulate(ends, max)]
        sorted_layouts.append(layout)
        all_ranges.append(tuple(range(begin, end) for begin, end in pairwise(borders)))
    return _owned(sorted_layouts, tuple(all_ranges), world)


def _owned(layouts: Sequence[BucketLayout], ranges: tuple[tuple[range, ...], ...], world: int) -> Ownership:
    owned: list[list[Piece]] = [[] for _ in range(world)]
    for layout, by_rank in zip(layouts, ranges, strict=True):
        for slot in layout.slots:
            for rank, mine in enumerate(by_rank):
                begin = min(max(mine.start - slot.offset, 0), slot.count)
                end = min(max(mine.stop - slot.offset, 0), slot.count)
                if begin < end or (slot.count == 0 and rank == 0):
                    owned[rank].append(Piece(slot.parameter, begin, end))
    pieces = tuple(tuple(sorted(one, key=lambda piece: piece.parameter)) for one in owned)
    return Ownership(layouts=tuple(layouts), ranges=ranges, pieces=pieces)


OwnedStates = Mapping[int, tuple[OwnedPiece, dict[str, Any]]]
_NUMBER_BYTES: Final = 8


# The optimizer's state, gathered from all workers into one `state_dict()` at worker 0.
# State is gathered in two steps, both through the memory of a gradient bucket, of which every worker fills its part and
# worker 0 reads all: first a description as JSON, then the bytes of the tensors. Worker 0 copies these straight into
# tensors of the parameters' shapes, so there is never a second copy of them. Nothing is pickled.
def gather_state(
    group: SharedGroup, parts: Sequence[Tensor], owned: OwnedStates, shapes: Sequence[torch.Size]
) -> dict[int, Any] | None:
    """Collective: the `state` of a `state_dict()`, by parameter, on worker 0 and None on the others.

    `parts` are bytes that every worker of the host maps, equally many for each and at least 8. `owned` is what this
    worker keeps, `shapes` are those of the optimizer's parameters.
    """
    named, tree = flatten({position: state for position, (_, state) in owned.items()})
    rows = []
    for name, tensor in named.items():
        position = int(name.partition(".")[0])
        one, _ = owned[position]
        is_cut = not one.is_whole and tensor.shape == one.proxy.shape
        cut = [position, one.piece.begin, one.piece.end] if is_cut else None
        rows.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), cut))
    text = torch.frombuffer(bytearray(json.dumps([tree, rows]).encode()), dtype=torch.uint8)
    texts: list[list[Tensor]] = []
    cut_ones: dict[str, Tensor] = {}
    found: list[tuple[dict[str, Tensor], Json]] = []  # by worker: the tensors of its state, and their tree

    def text_places(sizes: Sequence[int]) -> list[list[Tensor]]:
        texts.extend([torch.empty(size, dtype=torch.uint8)] for size in sizes)
        return texts

    def tensor_places(_sizes: Sequence[int]) -> Iterator[list[Tensor]]:
        for [text] in texts:
            tree, rows = json.loads(text.numpy().tobytes())
            by_name, places = {}, []
            for name, dtype, shape, cut in rows:
                if cut is None:
                    place = by_name[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                else:
                    position, begin, end = cut
                    if name not in cut_ones:
                        cut_ones[name] = torch.empty(shapes[position], dtype=getattr(torch, dtype))
                    by_name[name], place = cut_ones[name], cut_ones[name].view(-1)[begin:end]
                places.append(_flat_bytes(place))
            found.append((by_name, tree))
            yield places

    _gather(group, parts, [text], text_places)
    _gather(group, parts, [_flat_bytes(tensor) for tensor in named.values()], tensor_places)
    if group.rank:
        return None
    merged = MergedState()
    for by_name, tree in found:
        for position, state in unflatten(by_name, tree).items():
            merged.add(position, state)
    return merged.to_dict()


def _gather(
    group: SharedGroup,
    parts: Sequence[Tensor],
    given: Sequence[Tensor],
    places: Callable[[Sequence[int]], Iterable[Sequence[Tensor]]],
) -> None:
    """Collective: copy the bytes of `given` on worker r into what number r of worker 0's `places` is.

    `places` is called there with the number of bytes of each worker. Between two barriers parts may be read by others.
    """
    numbers = [part[:_NUMBER_BYTES].view(torch.int64) for part in parts]
    numbers[group.rank][0] = sum(one.numel() for one in given)
    group.barrier()
    sizes, room = [int(number[0]) for number in numbers], parts[0].numel()
    group.barrier()
    mine, theirs = rounds(given, room), [rounds(one, room) for one in (() if group.rank else places(sizes))]
    for _ in range(-(-max(sizes) // room)):
        for offset, piece in next(mine, []):
            parts[group.rank][offset : offset + piece.numel()].copy_(piece)
        group.barrier()
        for one, part in zip(theirs, parts, strict=False):
            for offset, piece in next(one, []):
                piece.copy_(part[offset : offset + piece.numel()])
        group.barrier()


def rounds(tensors: Sequence[Tensor], room: int) -> Iterator[list[tuple[int, Tensor]]]:
    """Cut flat tensors of bytes so that each round fills `room`, the last one less: (offset in the round, piece)."""
    pieces: list[tuple[int, Tensor]] = []
    offset = 0
    for tensor in tensors:
        begin = 0
        while begin < tensor.numel():
            piece = tensor[begin : begin + room - offset]
            pieces.append((offset, piece))
            begin += piece.numel()
            offset += piece.numel()
            if offset == room:
                yield pieces
                pieces, offset = [], 0
    if pieces:
        yield pieces


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
