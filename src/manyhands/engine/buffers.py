"""Synchronizes a model's buffers, such as the running statistics of batch norm, before they are used.

Gradients are summed, so parameters stay the same by themselves. Buffers are written by each worker's own forward, and
differ from worker to worker. `Options.buffers` says how they become the same before an evaluation, before a checkpoint
and at the end of a run, so that a metric, a checkpoint and the trained model are of one and the same model:

    broadcast     everyone takes those of worker 0
    mean          everyone takes the mean, each worker weighted by what it has computed since the last time; buffers
                  that are not floating-point are taken from worker 0
    synchronize   batch norm computes with the statistics of the whole global batch, so that its
                  buffers never differ; all other buffers as under broadcast

Only buffers that differ travel: hashes are compared first. A buffer that all have alike keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.engine.desync_check import parameter_hashes

_MOST_ITEMS = 1 << 17

Total = Callable[[Tensor], Tensor]  # Collective: the sum over workers of a float64 vector


def room_for(model: nn.Module, world: int) -> int:
    """How many float64 items `total` should sum at once, for the buffers of `model` or the statistics of a forward."""
    items = sum(one.numel() if one.is_floating_point() else one.nbytes for one in model.buffers())
    return min(items * world, _MOST_ITEMS)


@torch.no_grad()
def make_alike(buffers: Sequence[Tensor], total: Total, *, first: bool, weight: float | None = None) -> None:
    """Collective: every worker's `buffers` become those of the `first`, or with a `weight` the mean by weight.

    All bring buffers of the same shapes and types in one order. Of a mean, those that are not floating-point are the
    first's; where all weights are 0, all are.
    """
    strided = [buffer for buffer in buffers if buffer.layout == torch.strided and buffer.numel()]
    if not strided:
        return
    # Collective: the buffers that differ between workers, the same list on each.
    hashes = parameter_hashes(("", buffer) for buffer in strided)
    halves = np.concatenate([hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)]).astype(np.float64)
    mine = torch.from_numpy(halves)  # which a float64 holds exactly
    firsts = total(mine if first else torch.zeros_like(mine))
    differs = total((mine != firsts).view(2, -1).any(dim=0).double())
    unlike = [buffer for buffer, others in zip(strided, differs.tolist(), strict=True) if others]
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
        own = weight / weights if weights > 0 else float(first)
        found = total(torch.where(averaged, flat * own, flat if first else torch.zeros_like(flat)))
    sizes = [_values(buffer).numel() for buffer in unlike]
    for buffer, values in zip(unlike, torch.split(found, sizes), strict=True):
        exact = values if buffer.is_floating_point() else values.to(torch.uint8).view(buffer.dtype)
        buffer.copy_(exact.view(buffer.shape))


def _values(buffer: Tensor) -> Tensor:
    """A buffer's contents as float64, exactly: the numbers, or the bytes where it is not floating-point."""
    flat = buffer.detach().cpu().contiguous().view(-1)
    return (flat if flat.is_floating_point() else flat.view(torch.uint8)).double()


def synchronize_batch_norms(model: nn.Module, total: Total, part: int, parts: int) -> None:
    """Have every batch norm of `model` train with the statistics of all `parts` of a batch, of which this is `part`.

    In forward the workers exchange size, mean and squares about the mean of their parts, channel by channel,
    and combine them as Chan, Golub and LeVeque do ("Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979). Backward follows by autograd: what is summed in forward has its gradient summed in backward.
    Every worker must call the same layers in the same order, in forward and in backward, with at least one sample.
    """

    def gather(mine: Tensor) -> Tensor:
        # Collective: the statistics of each part in a row; a gradient returns to the part whose row it is.
        rows = [mine if number == part else torch.zeros_like(mine) for number in range(parts)]
        summed: Tensor = _Summed.apply(torch.cat(rows), total)  # type: ignore[no-untyped-call]
        return summed.view(parts, -1)

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = partial(_forward, module, module.forward, gather)  # type: ignore[method-assign]


def _forward(
    module: _BatchNorm, alone: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    if not module.training:
        return alone(x)
    module._check_input_dim(x)  # type: ignore[no-untyped-call]
    dims = [0, *range(2, x.dim())]
    precise = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    squares, mean = torch.var_mean(precise, dims, correction=0)
    size = torch.full((1,), x.numel() / x.shape[1], dtype=torch.float64, device=x.device)
    gathered = gather(torch.cat([size, mean.double(), squares.double()]))
    sizes, (means, variances) = gathered[:, :1].detach(), gathered[:, 1:].chunk(2, dim=1)
    count = float(sizes.sum())
    if count < 2:
        raise ValueError(f"Expected more than 1 value per channel in training, got {count:.0f} in all parts")
    mean = (sizes * means).sum(0) / count
    variance = (sizes * (variances + (means - mean) ** 2)).sum(0) / count
    _track(module, mean.detach(), variance.detach() * (count / (count - 1)))
    shape = [1, -1, *[1] * (x.dim() - 2)]
    center, scale = (one.to(precise.dtype).view(shape) for one in (mean, torch.rsqrt(variance + module.eps)))
    found = (precise - center) * scale
    if module.affine:
        found = found * module.weight.view(shape) + module.bias.view(shape)
    return found.to(x.dtype)


@torch.no_grad()
def _track(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    rate = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        rate = 1 / float(module.num_batches_tracked) if rate is None else rate
    for running, found in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - (rate or 0.0)).add_(found.to(running.dtype), alpha=rate or 0.0)


class _Summed(torch.autograd.Function):
    """Collective, in forward and in backward: the sum over workers as an autograd function."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, total: Total) -> Tensor:
        ctx.total = total
        return total(values.detach().to("cpu", copy=True)).to(values.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.total(gradient.detach().to("cpu", copy=True)).to(gradient.device), None
