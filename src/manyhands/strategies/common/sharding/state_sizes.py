"""What an optimizer keeps for each parameter, known before it is made, so that it can be shared.

Torch's optimizers make their state in the first step that reaches a parameter. To lay it out beforehand, one step is
taken on stand-ins of a few items and as many dimensions: an optimizer that can be shared keeps tensors of the
parameter's shape or of no dimension, so these tell the names, types and shapes of the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UserError
from manyhands.strategies.common.sharding.probe import double_of, step_plainly

__all__ = ["KeptState", "kept_by"]

_SIZES = (3, 2, 4, 5)  # of the first dimensions of a stand-in; all others have 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """One tensor of the state of a parameter; `dtype` None for a value that is always None."""

    name: str
    shape: torch.Size
    dtype: torch.dtype | None

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return self.shape.numel() * self.dtype.itemsize if self.dtype is not None else 0


def kept_by(optimizer: Optimizer) -> dict[nn.Parameter, list[KeptState]]:
    """By trainable parameter of `optimizer`: the state that it will have after its first step.

    What it has already, from the constructor or from a checkpoint, counts as it is. The optimizer itself is left alone.
    """
    made = _try_out(optimizer)
    kept: dict[nn.Parameter, list[KeptState]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            known = {
                name: _kept(optimizer, name, value, _shape(parameter), parameter.shape)
                for name, value in made[number, parameter.dtype, parameter.dim()].items()
            }
            known |= {
                name: _kept(optimizer, name, value, parameter.shape, parameter.shape)
                for name, value in optimizer.state.get(parameter, {}).items()
            }
            kept[parameter] = list(known.values())
    return kept


def _shape(parameter: Tensor) -> torch.Size:
    return torch.Size((*_SIZES, *[1] * parameter.dim())[: parameter.dim()])


def _try_out(optimizer: Optimizer) -> dict[tuple[int, torch.dtype, int], dict[str, Any]]:
    """The state of stand-ins after one step, by parameter group, type and number of dimensions."""
    stand_ins: dict[tuple[int, torch.dtype, int], nn.Parameter] = {}
    groups: dict[int, list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        groups[number] = []
        for parameter in (one for one in group["params"] if one.requires_grad):
            key = number, parameter.dtype, parameter.dim()
            if key not in stand_ins:
                stand_ins[key] = nn.Parameter(torch.zeros(_shape(parameter), dtype=parameter.dtype))
                stand_ins[key].grad = torch.ones_like(stand_ins[key])
                groups[number].append(stand_ins[key])
    double = double_of(optimizer, groups, {})
    try:
        with torch.no_grad():
            step_plainly(double)
    except Exception as error:  # whatever the user's class raises
        raise UserError(
            f"optimizer {type(optimizer).__name__} takes no step by itself ({error}); use one whose step() needs no "
            "closure and takes dense gradients, such as SGD or Adam"
        ) from error
    return {key: double.state.get(stand_in, {}) for key, stand_in in stand_ins.items()}


def _kept(optimizer: Optimizer, name: str, value: Any, like: torch.Size, shape: torch.Size) -> KeptState:
    if value is None:
        return KeptState(name=name, shape=torch.Size(), dtype=None)
    kind = type(optimizer).__name__
    if not isinstance(value, Tensor):
        raise UserError(
            f"optimizer {kind} keeps its state {name!r} as a {type(value).__name__}, which workers cannot share; keep "
            "it as a tensor, as in torch.zeros(())"
        )
    if value.shape not in (like, torch.Size()):
        raise UserError(
            f"optimizer {kind} keeps a state {name!r} of shape {tuple(value.shape)}, which workers cannot share; it "
            "must have the shape of its parameter, or none"
        )
    return KeptState(name=name, shape=shape if value.shape == like else torch.Size(), dtype=value.dtype)
