"""Optimizers whose parameters several owners step: which way fits one, and when torch's fused step does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.strategies.common.sharding.probe import cannot_step

__all__ = ["is_elementwise", "may_fuse", "positions", "stepping_for"]

_FUSED = frozenset({SGD, Adagrad, Adam, AdamW})
_FUSED_DTYPES = (
    torch.float32,
    torch.float64,
)  # 16-bit weights would be rounded once where torch rounds often


def stepping_for(optimizer: Optimizer, ways: Sequence[Stepping], who: str) -> Stepping:
    """The first of `ways`, those of the strategy or setting `who`, in which the optimizer steps as it does together.

    UserError says why there is none.
    """
    why = ""
    for way in ways:
        why = cannot_step(optimizer, way)
        if not why:
            return way
    raise UserError(
        f"optimizer {type(optimizer).__name__} would train another model under {who} than in one process: {why}; use "
        "strategy=mirrored or allreduce, or another optimizer, such as AdamW"
    )


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether parameters may be cut anywhere: each item is stepped by its own gradient and state."""
    return not cannot_step(optimizer, Stepping.IN_PIECES)


def positions(optimizer: Optimizer) -> dict[int, int]:
    """By the identity of a parameter: its number in the optimizer's `state_dict()`."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {id(parameter): position for position, parameter in enumerate(parameters)}


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
    if any(parameter.dtype not in _FUSED_DTYPES for parameter in reached):
        return False
    if any("step" in one and one["step"].dtype != torch.float32 for one in states):
        return False  # counted in float64, as torch does where that is the default type
    # Fused SGD takes momentum for either all or none of its parameters: one that is reached late is the odd one out.
    return not group.get("momentum") or all(states) or not any(states)
