"""What workers of a grid do with gradients between backward and step: sum them, clip them, agree on the loss.

A parameter that no worker reached keeps no gradient, as in one process: weight decay and momentum would move it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from manyhands.engine.exchange import LocalStep, SharedStep
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategy import MIB

__all__ = ["agree_on", "sum_gradients"]

_BUCKET_BYTES: Final = 25 * MIB


def sum_gradients(group: LinkGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Collective: each parameter's gradient becomes the sum over the members, with the same bits on all of them.

    All members give parameters of the same shapes, in the same order.
    """
    trained = [one for one in parameters if one.requires_grad]
    if group.world == 1 or not trained:
        return
    reached = group.all_reduce(torch.tensor([one.grad is not None for one in trained], dtype=torch.int32))
    anyone = [one for one, count in zip(trained, reached.tolist(), strict=True) if count]
    for bucket in _buckets(anyone):
        flat = group.all_reduce(torch.cat([_gradient(one).reshape(-1) for one in bucket]))
        for one, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
            one.grad = part.view(one.shape)


def agree_on(group: LinkGroup, local: LocalStep, *, counts: bool = True) -> SharedStep:
    """Collective over all workers: the mean loss, whose was not finite, and whether any worker wants to stop.

    Of several workers on the same samples, one `counts`.
    """
    told = torch.zeros(2 + group.world, dtype=torch.float64)
    told[1] = local.stop
    if not local.is_finite:
        told[2 + group.index] = 1
    elif counts and local.share:
        told[0] = local.loss * local.share
    told = group.all_reduce(told)
    bad = tuple(index for index, flag in enumerate(told[2:].tolist()) if flag)
    return SharedStep(loss=math.nan if bad else float(told[0]), bad_workers=bad, stop=bool(told[1]))


def _gradient(one: nn.Parameter) -> Tensor:
    if one.grad is None:
        return torch.zeros_like(one)
    return one.grad.to_dense() if one.grad.is_sparse else one.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type on one device, up to so many bytes together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for one in parameters:
        alike = not bucket or (one.dtype, one.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + one.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += one.nbytes
    if bucket:
        yield bucket
