"""Synchronizes a model's buffers, such as the running statistics of batch norm, before they are used.

Gradients are summed, so parameters stay the same by themselves. Buffers are written by each worker's own forward, and
differ from worker to worker. `Options.buffers` says how they become the same before an evaluation, before a checkpoint
and at the end of a run, so that a metric, a checkpoint and the trained model are of one and the same model:

    broadcast     everyone takes those of worker 0
    mean          everyone takes the mean, each worker weighted by what it has computed since the last time; buffers
                  that are not floating-point are taken from worker 0
    synchronize   batch norm computes with the statistics of the whole global batch (`batch_norm.py`), so that its
                  buffers never differ; all other buffers as under broadcast

Only buffers that differ travel: hashes are compared first. A buffer that all have alike keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.engine.desync_check import parameter_hashes
from manyhands.engine.options import MEAN

__all__ = ["WorkerBuffers", "make_alike", "room_for"]

_MOST_ITEMS = 1 << 17

Total = Callable[[Tensor], Tensor]
"""Collective: the sum over workers of a float64 vector."""


def room_for(model: nn.Module, world: int) -> int:
    """How many float64 items `total` should sum at once, so that the buffers of `model` take few exchanges.

    This is also enough for the batch norm statistics that `world` workers exchange in one forward. A model without
    buffers gives 0.
    """
    items = sum(one.numel() if one.is_floating_point() else one.nbytes for one in model.buffers())
    return min(items * world, _MOST_ITEMS)


class WorkerBuffers:
    """One worker's side: weighs what was computed since the last synchronization, and synchronizes the buffers."""

    def __init__(self, mode: str) -> None:
        self._averages = mode == MEAN
        self._weight = 0.0

    def computed(self, share: float) -> None:
        """Count a share of a global batch that this worker has computed."""
        self._weight += share

    def make_alike(self, buffers: Sequence[Tensor], total: Total, *, first: bool) -> None:
        """Collective: synchronize as the mode says; changes nothing before the last exchange is over."""
        make_alike(buffers, total, first=first, weight=self._weight if self._averages else None)
        self._weight = 0.0


@torch.no_grad()
def make_alike(buffers: Sequence[Tensor], total: Total, *, first: bool, weight: float | None = None) -> None:
    """Collective: every worker's `buffers` become those of the `first`, or with a `weight` the mean by weight.

    All bring buffers of the same shapes and types in one order. Of a mean, those that are not floating-point are the
    first's; where all weights are 0, all are.
    """
    strided = [buffer for buffer in buffers if buffer.layout == torch.strided and buffer.numel()]
    if not strided:
        return
    unlike = _unlike(strided, total, first=first)
    if not unlike:
        return
    flat = torch.cat([_values(buffer) for buffer in unlike])
    if weight is None:
        found = total(flat if first else torch.zeros_like(flat))
    else:
        averaged = torch.cat(
            [torch.full_like(_values(one), one.is_floating_point()) for one in unlike]
        ).bool()
        weights = float(total(torch.tensor([weight], dtype=torch.float64)))
        mine = weight / weights if weights > 0 else float(first)
        found = total(torch.where(averaged, flat * mine, flat if first else torch.zeros_like(flat)))
    sizes = [_values(buffer).numel() for buffer in unlike]
    for buffer, values in zip(unlike, torch.split(found, sizes), strict=True):
        _put(values, buffer)


def _unlike(buffers: Sequence[Tensor], total: Total, *, first: bool) -> list[Tensor]:
    """Collective: the buffers that differ between workers; every worker gets the same list."""
    hashes = parameter_hashes(("", buffer) for buffer in buffers)
    halves = np.concatenate([hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)]).astype(np.float64)
    mine = torch.from_numpy(halves)  # which a float64 holds exactly
    firsts = total(mine if first else torch.zeros_like(mine))
    differs = (mine != firsts).view(2, -1).any(dim=0)
    said = total(differs.double())
    return [buffer for buffer, others in zip(buffers, said.tolist(), strict=True) if others]


def _values(buffer: Tensor) -> Tensor:
    """A buffer's contents as float64, exactly: the numbers, or the bytes where it is not floating-point."""
    flat = buffer.detach().cpu().contiguous().view(-1)
    return (flat if flat.is_floating_point() else flat.view(torch.uint8)).double()


def _put(values: Tensor, buffer: Tensor) -> None:
    if not buffer.is_floating_point():
        values = values.to(torch.uint8).view(buffer.dtype)
    buffer.copy_(values.view(buffer.shape))
