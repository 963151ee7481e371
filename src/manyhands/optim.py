"""Optimizers that torch lacks: two with an L1 penalty, for sparse linear models and their tables, and LAMB.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import UserError

__all__ = ["FTRL", "LAMB", "ProximalSGD"]


class _EachAlone(Optimizer, ABC):
    """Updates one parameter after another, by its gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; a closure is called first, with gradients, and its loss returned."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one weight and its state, with the settings of its group."""


class FTRL(_EachAlone):
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


class ProximalSGD(_EachAlone):
    """`lr` and `l1` are α and l1 above; there is no state."""

    def __init__(self, params: Any, lr: float = 0.1, l1: float = 0.0) -> None:
        if not lr > 0:
            raise UserError(f"lr is {lr!r}; it must be a number above 0")
        _require_penalty("l1", l1)
        super().__init__(params, {"lr": lr, "l1": l1})

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        moved = weight - group["lr"] * gradient
        weight.copy_(torch.nn.functional.softshrink(moved, float(group["lr"]) * group["l1"]))


class LAMB(Optimizer):
    """LAMB (You et al., ICLR 2020) by the rules of NVIDIA's kernel, with bias correction.

    A tensor p whose step, weight decay included, is u moves by lr·‖p‖/‖u‖·u; by lr·u where one of the norms is 0, and
    where it has no weight decay, unless `always_adapt`. The gradient is not clipped here: `Task(clip_norm=1.0)` does
    that by the norm of all parameters, as the kernel does. State: `step`, `exp_avg` and `exp_avg_sq`, as Adam's.
    """

    # Where tensors are cut: from parameters and the squared norms of what is here of them (one column each) to the
    # squared norms of the whole tensors
    whole_squares: Callable[[Sequence[Tensor], Tensor], Tensor] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        always_adapt: bool = False,
    ) -> None:
        if not lr > 0:
            raise UserError(f"lr is {lr!r}; it must be a number above 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas are {betas!r}; both must be at least 0 and below 1")
        if not eps > 0:
            raise UserError(f"eps is {eps!r}; it must be a number above 0")
        _require_penalty("weight_decay", weight_decay)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "always_adapt": always_adapt})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; a closure is called first, with gradients, and its loss returned."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            reached = [one for one in group["params"] if one.grad is not None]
            if not reached:
                continue
            steps = self._directions(reached, group)
            if group["weight_decay"] or group["always_adapt"]:
                torch._foreach_mul_(steps, self._ratios(reached, steps))
            torch._foreach_add_(reached, steps, alpha=-float(group["lr"]))
        return loss

    def _directions(self, parameters: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """The step of each parameter before its rate: Adam's, and the weight decay."""
        for one in parameters:
            if not self.state[one]:
                zeros = {name: torch.zeros_like(one) for name in ("exp_avg", "exp_avg_sq")}
                self.state[one].update(step=torch.tensor(0.0), **zeros)
        states = [self.state[one] for one in parameters]
        first, second = group["betas"]
        gradients = [one.grad for one in parameters if one.grad is not None]
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        for state in states:
            state["step"] += 1
        taken = [float(state["step"]) for state in states]
        roots = torch._foreach_div(squares, [1 - second**count for count in taken])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        steps = list(torch._foreach_div(means, [1 - first**count for count in taken]))
        torch._foreach_div_(steps, roots)
        if group["weight_decay"]:
            torch._foreach_add_(steps, parameters, alpha=group["weight_decay"])
        return steps

    def _ratios(self, parameters: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
        """‖p‖/‖u‖ of each whole tensor, 1 where one of them is 0; on the device, without waiting for it."""
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        norms = [torch.stack(torch._foreach_norm(list(one), 2, wide)) for one in (parameters, steps)]
        squares = torch.stack(norms).square()
        if self.whole_squares is not None:
            squares = self.whole_squares(parameters, squares)
        of_parameters, of_steps = squares
        both = (of_parameters > 0) & (of_steps > 0)
        return list(torch.where(both, (of_parameters / of_steps).sqrt(), 1.0).unbind())


def _require_penalty(name: str, value: float) -> None:
    if not value >= 0:
        raise UserError(f"{name} is {value!r}; it must be a number of at least 0")


def _loss_of(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
