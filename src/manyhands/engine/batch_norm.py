"""Batch norm over the global batch: what `Options.buffers` calls `synchronize`, on CPUs as on GPUs.

Every worker normalises its part of a batch by the mean and the variance of all parts together, so a run of several
workers computes what one process computes on the whole batch. In forward the workers tell each other the size, the mean
and the squares about the mean of their parts, channel by channel, and put them together as Chan, Golub and LeVeque do
("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). Backward follows by autograd: what
is summed in forward has its gradient summed in backward.

Every worker must call the same layers in the same order, in forward and in backward, with at least one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["synchronize_batch_norms"]


def synchronize_batch_norms(
    model: nn.Module, total: Callable[[Tensor], Tensor], part: int, parts: int
) -> None:
    """Have every batch norm of `model` train with the statistics of all `parts` of a batch, of which this is `part`.

    `total` is collective: the sum over the parts of a float64 vector, inside forward and backward.
    """
    gather = partial(_gathered, total=total, part=part, parts=parts)
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
    told = gather(torch.cat([size, mean.double(), squares.double()]))
    sizes, (means, variances) = told[:, :1].detach(), told[:, 1:].chunk(2, dim=1)
    count = float(sizes.sum())
    if count < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {count:.0f} in all parts"
        )
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
    """Update the running statistics as torch's batch norm does."""
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    rate = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        rate = 1 / float(module.num_batches_tracked) if rate is None else rate
    for running, found in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - (rate or 0.0)).add_(found.to(running.dtype), alpha=rate or 0.0)


def _gathered(mine: Tensor, total: Callable[[Tensor], Tensor], part: int, parts: int) -> Tensor:
    """Collective: the statistics of each part, one row per part; a gradient returns to the part whose row it is."""
    rows = [mine if number == part else torch.zeros_like(mine) for number in range(parts)]
    summed: Tensor = _Summed.apply(torch.cat(rows), total)  # type: ignore[no-untyped-call]
    return summed.view(parts, -1)


class _Summed(torch.autograd.Function):
    """Collective, in forward and in backward: the sum over workers as an autograd function."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.total = total
        return _summed(values, total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.total), None


def _summed(values: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    return total(values.detach().to("cpu", copy=True)).to(values.device)
