"""The optimizer's state, gathered from all workers into one `state_dict()` at worker 0.

State is gathered in two steps, both through the memory of a gradient bucket, of which every worker fills its part and
worker 0 reads all: first a description as JSON, then the bytes of the tensors. Worker 0 copies these straight into
tensors of the parameters' shapes, so there is never a second copy of them. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from manyhands.data.store.state_tree import Json, flatten, unflatten
from manyhands.strategies.common.sharding.sliced_optimizer import MergedState, OwnedState, Part

__all__ = ["Carrier", "gather_state"]

_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """Memory that every worker of a host maps: one part each, read by the others between two barriers."""

    rank: int
    parts: Sequence[Tensor]
    """The parts as bytes, equally many for each worker, and at least 8."""

    barrier: Callable[[], None]

    def sizes(self, num_bytes: int) -> list[int]:
        """Collective: return how many bytes each worker has to send."""
        numbers = [part[:_NUMBER_BYTES].view(torch.int64) for part in self.parts]
        numbers[self.rank][0] = num_bytes
        self.barrier()
        sizes = [int(number[0]) for number in numbers]
        self.barrier()
        return sizes

    def gather(
        self, sizes: Sequence[int], given: Sequence[Tensor], wanted: Sequence[Sequence[Tensor]]
    ) -> None:
        """Collective: copy the bytes of `given` on worker r into `wanted[r]` on worker 0.

        `sizes` are those of all workers; `wanted` is empty on all workers but 0.
        """
        room = self.parts[0].numel()
        mine, theirs = rounds(given, room), [rounds(tensors, room) for tensors in wanted]
        for _ in range(-(-max(sizes) // room)):
            _move(next(mine, []), self.parts[self.rank], out=False)
            self.barrier()
            for one, part in zip(theirs, self.parts, strict=False):
                _move(next(one, []), part, out=True)
            self.barrier()


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


def gather_state(
    carrier: Carrier, owned: Sequence[OwnedState], shapes: Sequence[torch.Size]
) -> dict[int, Any] | None:
    """Collective: the `state` of a `state_dict()`, by parameter, on worker 0 and None on the others.

    `owned` is what this worker keeps, `shapes` are those of the optimizer's parameters.
    """
    tensors, description = _describe(owned)
    text = _as_bytes(json.dumps(description).encode())
    text_sizes = carrier.sizes(text.numel())
    is_root = carrier.rank == 0
    texts = [[torch.empty(size, dtype=torch.uint8)] for size in text_sizes] if is_root else []
    carrier.gather(text_sizes, [text], texts)
    sizes = carrier.sizes(sum(tensor.numel() for tensor in tensors))
    plan = _Assembly([json.loads(text.numpy().tobytes()) for [text] in texts], shapes)
    carrier.gather(sizes, tensors, plan.wanted)
    return plan.state() if is_root else None


class _Assembly:
    """On worker 0: where the bytes of every worker go, and the state that they form."""

    def __init__(self, descriptions: Sequence[dict[str, Any]], shapes: Sequence[torch.Size]) -> None:
        self._shapes = shapes
        self._whole: dict[str, Tensor] = {}
        self._trees: list[Json] = [one["tree"] for one in descriptions]
        self._tensors: list[dict[str, Tensor]] = []
        self.wanted: list[list[Tensor]] = []
        """By worker: flat tensors for its bytes, in the order in which it sends them."""
        for one in descriptions:
            by_name, places = {}, []
            for tensor in one["tensors"]:
                by_name[tensor["name"]], place = self._place(**tensor)
                places.append(_flat_bytes(place))
            self._tensors.append(by_name)
            self.wanted.append(places)

    def state(self) -> dict[int, Any]:
        """Return the state by parameter, once all bytes are in place."""
        merged = MergedState()
        for tensors, tree in zip(self._tensors, self._trees, strict=True):
            for position, state in unflatten(tensors, tree).items():
                merged.add(position, state)
        return merged.to_dict()

    def _place(self, name: str, dtype: str, shape: list[int], cut: list[int] | None) -> tuple[Tensor, Tensor]:
        """Return the tensor that the state will hold under `name`, and the part of it that these bytes are."""
        kind = getattr(torch, dtype)
        if cut is None:
            whole = torch.empty(shape, dtype=kind)
            return whole, whole
        position, begin, end = cut
        part = Part(self._shapes[position], slice(begin, end), end - begin)
        if name not in self._whole:
            self._whole[name] = torch.empty(part.shape, dtype=kind)
        whole = self._whole[name]
        return whole, part.room_in(whole)


def _describe(owned: Sequence[OwnedState]) -> tuple[list[Tensor], dict[str, Any]]:
    """Return this worker's tensors as flat bytes, and their description."""
    named, tree = flatten({one.position: one.state for one in owned})
    by_position = {one.position: one for one in owned}
    rows, flat = [], []
    for name, tensor in named.items():
        one = by_position[int(name.partition(".")[0])]
        is_cut = not one.is_whole and tensor.shape == one.shape
        rows.append(
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "cut": [one.position, one.begin, one.end] if is_cut else None,
            }
        )
        flat.append(_flat_bytes(tensor))
    return flat, {"tree": tree, "tensors": rows}


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _as_bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _move(pieces: Sequence[tuple[int, Tensor]], part: Tensor, *, out: bool) -> None:
    for offset, piece in pieces:
        window = part[offset : offset + piece.numel()]
        if out:
            piece.copy_(window)
        else:
            window.copy_(piece)
