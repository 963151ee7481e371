"""What workers of a grid do with gradients between backward and step: sum them, clip them, agree on the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.grid.group import LinkGroup
from manyhands.settings import MIB
from manyhands.training.exchange import LocalStep, SharedStep

__all__ = ["agree_on", "clip_norm", "sum_gradients"]

_BUCKET_BYTES = 25 * MIB


def sum_gradients(
    parameters: Sequence[nn.Parameter], group: LinkGroup, bucket_bytes: int = _BUCKET_BYTES
) -> None:
    """Collective: each parameter's gradient becomes the sum over the members, in their order.

    All members give the same parameters. One that no member has a gradient of keeps none; a member that has none where
    another has one counts as zero.
    """
    if group.world == 1 or not parameters:
        return
    reached = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32)
    reached = group.all_reduce(reached)
    summed = [one for one, count in zip(parameters, reached.tolist(), strict=True) if count]
    for bucket in _buckets(summed, bucket_bytes):
        _sum_bucket(bucket, group)


def clip_norm(
    parameters: Sequence[nn.Parameter], counted: Sequence[bool], group: LinkGroup, max_norm: float
) -> float:
    """Collective: as `torch.nn.utils.clip_grad_norm_` on a model that the members hold together; the norm that it had.

    `counted` says which parameters count in this member's sum: of what several members hold, one counts it.
    """
    squares = [
        one.grad.detach().double().square().sum().cpu()
        for one, counts in zip(parameters, counted, strict=True)
        if counts and one.grad is not None
    ]
    own = torch.stack(squares).sum().view(1) if squares else torch.zeros(1, dtype=torch.float64)
    norm = math.sqrt(float(group.all_reduce(own)))
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # not a number, too: then torch makes all gradients so
        for one in parameters:
            if one.grad is not None:
                one.grad.mul_(factor)
    return norm


def agree_on(group: LinkGroup, local: LocalStep, *, counts: bool = True) -> SharedStep:
    """Collective over all workers: the mean loss, whose was not finite, and whether somebody wants to stop.

    Where several workers work on the same samples, one of them `counts`.
    """
    told = torch.zeros(2 + group.world, dtype=torch.float64)
    if local.is_finite:
        told[0] = local.loss * local.share if counts and local.share else 0.0
    else:
        told[2 + group.index] = 1
    told[1] = local.stop
    told = group.all_reduce(told)
    bad = tuple(index for index, flag in enumerate(told[2:].tolist()) if flag)
    return SharedStep(loss=float("nan") if bad else float(told[0]), bad_workers=bad, stop=bool(told[1]))


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """In their order, each of one type and device."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for one in parameters:
        last = buckets[-1][0] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (one.dtype, one.device)
        if not alike or size + one.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(one)
        size += one.nbytes
    return buckets


def _sum_bucket(bucket: Sequence[nn.Parameter], group: LinkGroup) -> None:
    for one in bucket:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
    gradients: list[Tensor] = [one.grad for one in bucket if one.grad is not None]
    if len(gradients) == 1:
        group.all_reduce(gradients[0])
        return
    flat = group.all_reduce(torch.cat([one.reshape(-1) for one in gradients]))
    for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))
