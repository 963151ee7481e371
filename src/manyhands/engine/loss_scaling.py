"""Float16 with a scaled loss: the gradients are computed times a scale, or the smallest of them would be 0.

The rule of the scale is that of torch's GradScaler. The gradient lies with the exchange, whole or in parts: what one
worker finds counts for all, and all leave a step out or none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.clipping import clippable
from manyhands.engine.exchange import Exchange

_FIRST: Final = 2.0**16
_GROWTH_INTERVAL: Final = 2000


class LossScale:
    """The scale of a run's losses: halved by a gradient that is not finite, doubled after so many that are."""

    def __init__(self, first: float = _FIRST, growth_interval: int = _GROWTH_INTERVAL) -> None:
        self.scale, self._interval, self._finite = first, growth_interval, 0

    def update(self, *, finite: bool) -> None:
        self._finite = self._finite + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self._finite == self._interval:
            self.scale, self._finite = self.scale * 2.0, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "finite": self._finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scale, self._finite = float(state["scale"]), int(state["finite"])


@torch.no_grad()
def unscale(exchange: Exchange, model: nn.Module, scale: float) -> bool:
    """Collective, between `agree` and `apply`: divide the gradient by `scale`; whether all of it is finite."""
    held = exchange.parts.held() if exchange.parts is not None else ()
    if exchange.parts is None:
        held = [one.grad for one in clippable(model.parameters()) if one.grad is not None]
    finite = True
    for gradient in held:
        finite = finite and bool(torch.isfinite(gradient).all())
        gradient.mul_(1.0 / scale)
    return not float(exchange.total(torch.tensor([float(not finite)], dtype=torch.float64)))


@contextmanager
def left_out(optimizer: Optimizer) -> Iterator[None]:
    """While this is open, the optimizer's step does nothing, and all else about a step is done."""
    before = vars(optimizer).get("step")  # a scheduler's
    optimizer.step = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.step
        if before is not None:
            optimizer.step = before  # type: ignore[method-assign]
