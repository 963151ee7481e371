"""Torch's one-pass ("fused") implementation of an optimizer's step, where it fits and the user left the choice open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_FUSED: Final = frozenset({SGD, Adagrad, Adam, AdamW})
# 16-bit ones would be rounded once where torch rounds often
_FUSED_DTYPES: Final = (torch.float32, torch.float64)


def may_fuse(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    state: Mapping[Any, Mapping[str, Any]],
) -> bool:
    """Whether torch's one-pass implementation gives this step of `group`, where the user left the choice open."""
    if type(optimizer) not in _FUSED or group["fused"] is not None or group["foreach"] is not None:
        return False
    if group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    reached = [parameter for parameter in parameters if parameter.grad is not None]
    states = [state.get(parameter) or {} for parameter in reached]
    wide = any("step" in one and one["step"].dtype != torch.float32 for one in states)
    if wide or any(parameter.dtype not in _FUSED_DTYPES for parameter in reached):
        return False  # steps are counted in float64, as torch does where that is the default type
    # Fused SGD takes momentum for either all or none of its parameters: one that is reached late is the odd one out.
    return not group.get("momentum") or all(states) or not any(states)


def take_step(optimizer: Optimizer, *, on_cpu: bool = False) -> None:
    """The optimizer's step; of parameters on a GPU the fused one, as a loop of single operations waits for launches.

    With `on_cpu` also of parameters on the CPU, as owners of pieces take it.
    """
    with _fused(optimizer, on_cpu):
        optimizer.step()


@contextmanager
def _fused(optimizer: Optimizer, on_cpu: bool) -> Iterator[None]:
    changed = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        on_gpu = bool(parameters) and all(one.device.type == "cuda" for one in parameters)
        if not (on_gpu or on_cpu) or (on_gpu and type(optimizer) is Adagrad):
            continue  # torch has fused Adagrad on the CPU only
        sparse = any(one.grad is not None and one.grad.is_sparse for one in parameters)
        if sparse or not may_fuse(optimizer, group, parameters, optimizer.state):
            continue
        for parameter in parameters:
            count = optimizer.state.get(parameter, {}).get("step")
            if count is not None and count.device != parameter.device:  # of a checkpoint, or of a step before
                optimizer.state[parameter]["step"] = count.to(parameter.device)
        group["fused"] = True
        changed.append(group)
    try:
        yield
    finally:
        for group in changed:
            group["fused"] = None
