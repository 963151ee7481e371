"""Five published optimizers, written from the formulas of their papers, as compactly as a test needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.optim import Optimizer


class Lamb(Optimizer):
    """You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020.

    As its authors' code has it: the gradient of all parameters is first scaled down to a norm of 1.
    """

    def __init__(self, params: Any, lr: float = 0.01, clip: float | None = 1.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "decay": 0.01, "clip": clip})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        reached = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([vector_norm(p.grad) for _, p in reached]).norm() if reached else torch.ones(())
        for group, p in reached:
            gradient = p.grad / max(1.0, float(norm) / group["clip"]) if group["clip"] else p.grad
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            first, second = group["betas"]
            state["m"].lerp_(gradient, 1 - first)
            state["v"].lerp_(gradient**2, 1 - second)
            m, v = (
                state[key] / (1 - beta ** float(state["step"])) for key, beta in (("m", first), ("v", second))
            )
            update = m / (v.sqrt() + group["eps"]) + group["decay"] * p
            length, size = vector_norm(update), vector_norm(p)
            trust = float(size / length) if size > 0 and length > 0 else 1.0
            p.sub_(update, alpha=group["lr"] * trust)


class Prodigy(Optimizer):
    """Mishchenko and Defazio, "Prodigy: an expeditiously adaptive parameter-free learner", ICML 2024, Algorithm 4."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "d": d0, "d0": d0, "r": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        d, first = self.param_groups[0]["d"], self.param_groups[0]
        decay = first["betas"][1] ** 0.5
        top, bottom = decay * first["r"], 0.0
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(x0=p.clone(), **{key: torch.zeros_like(p) for key in "smv"})
                one, two = group["betas"]
                top += (1 - decay) * d**2 * group["lr"] * float((p.grad * (state["x0"] - p)).sum())
                state["s"].mul_(decay).add_(p.grad, alpha=(1 - decay) * d**2 * group["lr"])
                bottom += float(state["s"].abs().sum())
                state["m"].mul_(one).add_(p.grad, alpha=(1 - one) * d)
                state["v"].mul_(two).addcmul_(p.grad, p.grad, value=(1 - two) * d**2)
        if not bottom:
            return
        for group in self.param_groups:
            group["r"], group["d"] = top, max(d, top / bottom)
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                p.addcdiv_(state["m"], state["v"].sqrt() + d * group["eps"], value=-group["lr"] * d)


class Muon(Optimizer):
    """Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; AdamW's role is SGD's here."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = p.grad + group["momentum"] * buffer
                p.sub_(_orthogonal(update) if p.dim() == 2 else update, alpha=group["lr"])


def _orthogonal(matrix: Tensor) -> Tensor:
    """Newton and Schulz's iteration with the paper's coefficients."""
    x = matrix / (vector_norm(matrix) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


class Shampoo(Optimizer):
    """Gupta, Koren and Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018, Algorithm 2."""

    def __init__(self, params: Any, lr: float = 0.05, eps: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update, state = p.grad, self.state[p]
                for axis, size in enumerate(p.shape):
                    start = group["eps"] * torch.eye(size, dtype=p.dtype, device=p.device)
                    square = state.setdefault(f"axis{axis}", start)
                    flat = p.grad.movedim(axis, 0).reshape(size, -1)
                    square.add_(flat @ flat.T)
                    values, vectors = torch.linalg.eigh(square)
                    root = vectors * values.clamp_min(1e-30) ** (-0.5 / p.dim()) @ vectors.T
                    update = torch.tensordot(update, root, dims=([0], [0]))  # the axes come round in order
                p.sub_(update, alpha=group["lr"])


class ClippedByAll(torch.optim.Adam):
    """Adam whose step first clips by the norm of all its parameters (Pascanu, Mikolov and Bengio, ICML 2013)."""

    def __init__(self, params: Any, lr: float = 0.05, clip: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.clip = clip

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.clip)
        super().step(closure)


PUBLISHED = {kind.__name__: kind for kind in (Lamb, Prodigy, Muon, Shampoo, ClippedByAll)}
