"""What is known about optimizers in pieces: which may be cut anywhere, which need whole tensors, which cannot work.

Torch's own are known by their exact type, because a subclass may do anything. An optimizer of your own says so itself,
with a class attribute `elementwise = True`, if each item of a parameter is updated from that item of the gradient and
of the state alone, and every tensor of its state has the parameter's shape or no dimension at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from manyhands.errors import UserError

__all__ = ["check_sharing", "is_elementwise", "may_fuse", "positions", "require_elementwise"]

_ELEMENTWISE = frozenset(
    {SGD, Adagrad, Adam, AdamW, RMSprop, Adamax, NAdam, RAdam, Adadelta, Rprop, ASGD},
)
_FUSED = frozenset({SGD, Adagrad, Adam, AdamW})
_FUSED_DTYPES = (
    torch.float32,
    torch.float64,
)  # 16-bit weights would be rounded once where torch rounds often

_ONE_RATE = "it estimates one step size from all parameters together; use strategy=mirrored"
_REFUSED = {
    "LBFGS": "it searches along one direction through all parameters and asks for the loss again and again; use "
    "another optimizer, such as AdamW",
    "SparseAdam": "it takes sparse gradients only; build embeddings with sparse=False and use Adam",
    "Prodigy": _ONE_RATE,
    "DAdaptAdaGrad": _ONE_RATE,
    "DAdaptAdam": _ONE_RATE,
    "DAdaptAdan": _ONE_RATE,
    "DAdaptLion": _ONE_RATE,
    "DAdaptSGD": _ONE_RATE,
}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether parameters may be cut anywhere; a UserError names an optimizer that cannot be shared out at all."""
    kind = type(optimizer)
    for base in kind.__mro__:
        if base.__name__ in _REFUSED:
            raise UserError(
                f"optimizer {kind.__name__} cannot be shared out among several owners: {_REFUSED[base.__name__]}"
            )
    return kind in _ELEMENTWISE or getattr(kind, "elementwise", False) is True


def require_elementwise(optimizer: Optimizer, who: str) -> None:
    """UserError for an optimizer that `who`, who has it step parts of parameters, cannot use."""
    if not is_elementwise(optimizer):
        kind = type(optimizer).__name__
        raise UserError(
            f"optimizer {kind} is not known to treat each item of a parameter by itself, as {who} needs; use another "
            f"such as SGD or Adagrad, or, if it does so, give class {kind} the attribute elementwise = True"
        )


def check_sharing(optimizer: Optimizer, *, sliced: bool) -> None:
    """UserError for an optimizer that cannot step some parameters alone, or slices of them where they are `sliced`."""
    if sliced:
        require_elementwise(optimizer, "a slice of a layer")
    else:
        is_elementwise(optimizer)


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
