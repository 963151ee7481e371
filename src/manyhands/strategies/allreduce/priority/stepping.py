"""The optimizer, parameter by parameter: each is stepped when its sum arrives, with the settings of its step.

A schedule may have advanced to the next step by then, so the settings of each group are saved when the step is
allowed. The optimizer is given a few parameters at a time. For an optimizer that treats parameters one by one this
gives the same bits as all at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.facts import Stepping
from manyhands.strategies.common.sharding.optimizers import stepping_for

__all__ = ["LateOptimizer"]


class LateOptimizer:
    """Steps some parameters of `optimizer` at a time; UserError for one that needs all gradients at once."""

    def __init__(self, optimizer: Optimizer) -> None:
        stepping_for(optimizer, (Stepping.IN_TURN,), "allreduce order=priority")
        self._optimizer = optimizer
        self._settings: list[dict[str, Any]] = []

    def allow(self) -> None:
        """Allow a step, with the settings of this moment."""
        self._settings = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def step(self, sums: Mapping[Tensor, Tensor]) -> None:
        """Step these parameters by the given gradients; afterwards they have no `grad`."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        try:
            for group, settings in zip(groups, self._settings, strict=True):
                group.update(settings, params=_among(group["params"], sums))
            for parameter, gradient in sums.items():
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for group, before in zip(groups, now, strict=True):
                group.update(before)
            for parameter in sums:
                parameter.grad = None


def _among(parameters: Collection[Tensor], sums: Mapping[Tensor, Tensor]) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter in sums]


def _kept(value: Any) -> Any:
    """Return a copy of a setting as it is now: a schedule writes in place if it is a tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else value
