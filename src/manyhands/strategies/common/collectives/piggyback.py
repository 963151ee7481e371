"""What piggybacks on the buckets of a collective besides gradients: totals, weights, and codec residuals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from manyhands.engine.buffers import room_for
from manyhands.errors import ManyhandsError
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.wire.codec import as_memory, as_one
from manyhands.wire.parcels import Parcel

__all__ = ["broadcast", "kept_by_codecs", "remember_kept", "room_for_buffers", "total"]

_COUNT_BYTES = 8
_SPARE_BYTES = 1 << 20  # for names and chunks that are longer than this worker's


def kept_by_codecs(collective: Collective, index: int, bucket: torch.Tensor) -> Mapping[str, Any]:
    """Collective: return all workers' codec residuals on worker 0, for a checkpoint, through bucket `index`."""
    memory = collective.memory()
    if not memory:
        return {}  # on all alike: they have sent the same buckets
    found = _gathered(collective, index, bucket, as_one(memory))
    return {"codec": {"codec": collective.codec, "workers": found}} if collective.rank == 0 else {}


def remember_kept(collective: Collective, memory: Mapping[str, Any]) -> None:
    """Restore what `kept_by_codecs` returned; with another codec or other workers, start without residuals."""
    kept = memory.get("codec")
    workers = kept["workers"] if kept is not None and kept["codec"] == collective.codec else ()
    if len(workers) == collective.world:
        collective.remember(as_memory(workers[collective.rank]))


def room_for_buffers(model: nn.Module, status: Parcel, world: int) -> list[Parcel]:
    """Return a parcel after `status` so that the buffers of `model` take few sums; none if they fit into `status`."""
    count = room_for(model, world)
    return [Parcel.whole(status.number + 1, count, torch.float64, exact=True)] if count > status.count else []


def total(collective: Collective, index: int, bucket: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Collective: the sum over workers of a vector of the bucket's type, through bucket `index`, piece by piece."""
    pieces = []
    for piece in torch.split(values, len(bucket)):
        bucket.zero_()
        bucket[: len(piece)] = piece
        collective.launch(index)
        collective.finish()
        pieces.append(bucket[: len(piece)].clone())
    return torch.cat(pieces)


@torch.no_grad()
def broadcast(
    collective: Collective, index: int, bucket: torch.Tensor, tensors: Iterable[torch.Tensor]
) -> None:
    """Collective: give every worker worker 0's values, through the bytes of bucket `index`, zeroed afterwards."""
    carrier = bucket.view(torch.uint8)
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        for piece in torch.split(flat, len(carrier)):
            carrier[: len(piece)] = piece
            collective.broadcast(index)
            piece.copy_(carrier[: len(piece)])
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    carrier.zero_()


def _gathered(
    collective: Collective, index: int, bucket: torch.Tensor, mine: torch.Tensor
) -> list[torch.Tensor]:
    """Collective: return every worker's bytes on worker 0, through bucket `index`, zeroed afterwards.

    All workers keep about as much; a size far above this worker's is rejected.
    """
    carrier = bucket.view(torch.uint8)
    room = carrier[:_COUNT_BYTES].view(torch.int64)
    most = 2 * mine.numel() + _SPARE_BYTES
    found = []
    for root in range(collective.world):
        room[0] = mine.numel()
        collective.broadcast(index, root)
        count = int(room[0])
        if not 0 <= count <= most:
            raise ManyhandsError(
                f"worker {root} says that its codecs keep {count} bytes; at most {most} would fit what this one keeps"
            )
        theirs = torch.empty(count if collective.rank == 0 else 0, dtype=torch.uint8)
        for begin in range(0, count, len(carrier)):
            end = min(count, begin + len(carrier))
            if root == collective.rank:
                carrier[: end - begin] = mine[begin:end]
            collective.broadcast(index, root)
            if collective.rank == 0:
                theirs[begin:end] = carrier[: end - begin]
        found.append(theirs)
    carrier.zero_()
    return found if collective.rank == 0 else []
