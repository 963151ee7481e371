"""Gradients that lie in parts, under a strategy that steps by itself: who may change them between backward and step.

`grad` then holds this worker's own gradient, of which one part is the sum over workers. Torch's `clip_grad_norm_` would
take a norm of that, another one on each worker, and the weights would be wrong without a word. What torch changes in
place it counts, and what is put in place of a gradient lies elsewhere: so a change that the group did not make shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from manyhands.errors import UserError

__all__ = ["GradientWatch", "unscale"]


class GradientWatch:
    """Tells whether the gradients of `model` are what they were when last remembered; keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._known = self._look()

    def remember(self) -> None:
        """The gradients are as they should be."""
        self._known = self._look()

    def require_untouched(self) -> None:
        """Raise UserError if a gradient is another one than was remembered; to drop one is allowed."""
        pairs = zip(self._look(), self._known, strict=True)
        if any(now is not None and now != known for now, known in pairs):
            raise UserError(
                "a gradient was changed between backward() and optimizer.step(), and under central grad is only this "
                "worker's part: clip with group.clip_grad_norm_ instead of torch's own, and train under mirrored what "
                "changes gradients in another way"
            )

    def _look(self) -> list[tuple[int, int] | None]:
        """Where each gradient lies, and autograd's count of its changes."""
        gradients = (parameter.grad for parameter in self._parameters)
        return [(one.data_ptr(), one._version) if one is not None else None for one in gradients]


def unscale(parts: Sequence[torch.Tensor], factor: torch.Tensor) -> bool:
    """Multiply this worker's parts by `factor`; whether any item was not finite. In one pass, that of GradScaler."""
    if any(part.dtype == torch.float16 for part in parts):
        raise UserError(
            "GradScaler is for parameters of float32 under autocast, but the model holds float16; leave out "
            "model.half()"
        )
    found = torch.zeros(())
    for part in parts:
        torch._amp_foreach_non_finite_check_and_unscale_([part], found, factor.cpu())
    return bool(found)
