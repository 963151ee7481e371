"""The gradient of a step over all workers of a grid: summed over replicas and over the stages that share a parameter.

A parameter that nobody reached keeps no gradient, as in one process: weight decay and momentum would move it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from manyhands.grid.group import LinkGroup

__all__ = ["scale_to", "squared_norm", "sum_gradients"]

_BUCKET_BYTES: Final = 25 << 20


def sum_gradients(group: LinkGroup, parameters: Sequence[nn.Parameter]) -> None:
    """Collective: each parameter's gradient becomes the sum over the members, with the same bits on all of them."""
    trained = [one for one in parameters if one.requires_grad]
    if group.world == 1 or not trained:
        return
    reached = torch.tensor([float(one.grad is not None) for one in trained])
    group.all_reduce(reached)
    anyone = [one for one, count in zip(trained, reached.tolist(), strict=True) if count]
    for bucket in _buckets(anyone):
        flat = torch.cat([_gradient(one).reshape(-1) for one in bucket])
        group.all_reduce(flat)
        for one, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
            one.grad = part.view(one.shape)


def squared_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Of their gradients together."""
    norms = [torch.linalg.vector_norm(one.grad) for one in parameters if one.grad is not None]
    return sum(float(norm) ** 2 for norm in norms)


def scale_to(max_norm: float, norm: float, parameters: Sequence[nn.Parameter]) -> None:
    """Scale gradients, whose norm over all workers is `norm`, down to `max_norm`, as torch does."""
    factor = min(1.0, max_norm / (norm + 1e-6))
    for one in parameters:
        if one.grad is not None:
            one.grad.mul_(factor)


def _gradient(one: nn.Parameter) -> Tensor:
    if one.grad is None:
        return torch.zeros_like(one)
    return one.grad.to_dense() if one.grad.is_sparse else one.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one type, up to so many bytes together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for one in parameters:
        if bucket and (one.dtype != bucket[0].dtype or size + one.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += one.nbytes
    if bucket:
        yield bucket
