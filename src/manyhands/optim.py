"""Optimizers with an L1 penalty, for sparse linear models and their tables.

**FTRL-proximal** (McMahan et al., KDD 2013, Algorithm 1). Every item has its own rate α / (β + √Σg²), and an L1 term
that sets items to exactly 0. With q for the reciprocal of the rate, a step with gradient g takes the weight w to

    z ← z + g − (q − q_before)·w         w ← 0 where |z| ≤ l1, else −(z − sign(z)·l1) / (q + l2)

Two things go beyond the paper and change nothing where it speaks. Training may start elsewhere than at 0: z begins as
that which the formula turns into the weights that are there. And α may change from step to step, as schedulers and
staleness-aware rates change it: the state is kept as it would be for the first α, so that no q_before is stored.

**Proximal gradient descent** (ISTA; Beck and Teboulle, 2009). A step of rate α goes along the gradient and then l1·α
towards 0, where it stops:

    v ← w − α·g         w ← sign(v)·max(|v| − α·l1, 0)

With the gradient of all data and α below 2/L it converges to the minimum of loss + l1·|w|.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import UserError

__all__ = ["FTRL", "ProximalSGD"]


class FTRL(Optimizer):
    """`lr`, `beta`, `l1` and `l2` are the paper's α, β, λ1 and λ2. State: `z` and `n` (Σg²).

    A group keeps the lr that it was made with as `alpha`, for which its state is kept.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0
    ) -> None:
        if not lr > 0:
            raise UserError(f"lr is {lr!r}; it must be a number above 0")
        for name, value in (("beta", beta), ("l1", l1), ("l2", l2)):
            _require_penalty(name, value)
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("alpha", float(group["lr"]))  # the first lr

    @staticmethod
    def begin(weight: Tensor, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first step; `settings` are those of its group."""
        nearness = settings["beta"] / settings["alpha"] + settings["l2"]
        z = -weight * nearness - weight.sign() * settings["l1"]
        return {"z": z, "n": torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; a closure is called first, with gradients, and its loss returned."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        beta, l1, l2 = group["beta"], group["l1"], group["l2"]
        state = self.state[weight]
        if not state:
            state.update(self.begin(weight, group))
        alpha, first_alpha = float(group["lr"]), group["alpha"]
        z, n = state["z"], state["n"]
        before = n.sqrt().add_(beta).div_(first_alpha)
        n.addcmul_(gradient, gradient)
        root = n.sqrt().add_(beta)
        now = root / alpha
        z.add_(gradient).addcmul_(now - before, weight, value=-1)
        shrunk = z.sign().mul_(-l1).add_(z)
        moved = torch.where(z.abs() <= l1, 0.0, shrunk.div_(now + l2).neg_())
        # Where the gradient is 0 the formula stays too, but for rounding and 0/0.
        weight.copy_(torch.where(gradient == 0, weight, moved))
        if alpha != first_alpha:
            z.addcmul_(now - root / first_alpha, weight)


class ProximalSGD(Optimizer):
    """`lr` and `l1` are α and l1 above; there is no state."""

    def __init__(self, params: Any, lr: float = 0.1, l1: float = 0.0) -> None:
        if not lr > 0:
            raise UserError(f"lr is {lr!r}; it must be a number above 0")
        _require_penalty("l1", l1)
        super().__init__(params, {"lr": lr, "l1": l1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; a closure is called first, with gradients, and its loss returned."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moved = parameter - group["lr"] * parameter.grad
                    parameter.copy_(torch.nn.functional.softshrink(moved, float(group["lr"]) * group["l1"]))
        return loss


def _require_penalty(name: str, value: float) -> None:
    if not value >= 0:
        raise UserError(f"{name} is {value!r}; it must be a number of at least 0")


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
