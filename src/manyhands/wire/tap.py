"""The tap: takes each gradient from autograd the moment it is there, still warm in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GradientTap", "put"]


class GradientTap:
    """Calls `taken(number, parameter)` for each gradient, which is then in `parameter.grad`; `close` is idempotent.

    `before(number)` is called when a gradient is about to be added to what the parameter has.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        taken: Callable[[int, Tensor], None],
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._hooks: list[Any] = []
        for number, parameter in enumerate(parameters):
            if before is not None:
                announce = partial(_announce, before, number)
                self._hooks.append(parameter.register_hook(announce))  # type: ignore[no-untyped-call]
            hook = parameter.register_post_accumulate_grad_hook(partial(taken, number))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def put(view: Tensor, gradient: Tensor, weight: float, *, add: bool = False) -> None:
    """Move a gradient to its place, weighted; a weight of 0 leaves nothing of it, not even a NaN."""
    if weight == 0:
        if not add:
            view.zero_()
    elif add:
        view.add_(gradient, alpha=weight)
    elif weight == 1:
        view.copy_(gradient)
    elif gradient.device == view.device:
        torch.mul(gradient, weight, out=view)
    else:
        view.copy_(gradient * weight)


def _announce(before: Callable[[int], None], number: int, _gradient: Tensor) -> None:
    before(number)  # a hook that returned something would replace the gradient
