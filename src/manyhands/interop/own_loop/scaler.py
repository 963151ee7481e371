"""Mixed precision by loss scaling where the strategy steps by itself: a GradScaler for a gradient that lies in parts.

Torch's GradScaler divides each `grad` by the scale, looks for infinities in it, and leaves the step out where it finds
one. Where each worker holds its part of the gradient (`central`), both belong to the parts, and what one worker finds
must count for all: the step is left out and the scale goes down everywhere alike. So `prepare` gives the script a
scaler that differs from torch's in this only, as torch's own ShardedGradScaler does for FSDP.

A scaler that was not prepared would see this worker's part and decide for itself. It is refused through what torch has
for optimizers that handle scales: where one says that it does, the scaler lays `found_inf` on it before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.amp.grad_scaler import GradScaler
from torch.cpu.amp.grad_scaler import GradScaler as CpuGradScaler
from torch.cuda.amp.grad_scaler import GradScaler as CudaGradScaler
from torch.optim import Optimizer

from manyhands.errors import UserError

__all__ = ["PartsScaler", "declaring", "require_prepared_scaler"]

_HANDLES_SCALES: Final = "_step_supports_amp_scaling"
_OWN_KINDS: Final = (GradScaler, CpuGradScaler, CudaGradScaler)  # the latter two are older names of it

# Collective: multiply the gradient by a factor; whether any of it, on any worker, was not finite
Unscale = Callable[[Optimizer, torch.Tensor], bool]


class PartsScaler(GradScaler):
    """A GradScaler that continues from `given`, which must be enabled; its `unscale_` and `step` are collective."""

    def __init__(self, given: GradScaler, unscale: Unscale) -> None:
        if type(given) not in _OWN_KINDS:
            raise UserError(
                f"prepare got a {type(given).__name__}; where each worker holds its part of the gradient, the scaler "
                "must be torch's own GradScaler"
            )
        super().__init__(given._device)
        self.load_state_dict(given.state_dict())
        self._unscale = unscale

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """All workers step, or none; an optimizer that could unscale by itself (`fused=True`) is not asked to."""
        with declaring(optimizer, handles_scales=False):
            return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: ARG002 - true only for optimizers that handle scales
    ) -> dict[torch.device, torch.Tensor]:
        found_inf.fill_(float(self._unscale(optimizer, inv_scale)))
        return {found_inf.device: found_inf}


def require_prepared_scaler(optimizer: Optimizer) -> None:
    """In a step of `optimizer`: raise UserError if a GradScaler that was not prepared has brought it about."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise UserError(
            "a GradScaler that was not prepared sees only this worker's part of the gradient; give it to group.prepare "
            "with the others, and use the one that comes back"
        )


@contextmanager
def declaring(optimizer: Optimizer, *, handles_scales: bool) -> Iterator[None]:
    """While this is open, torch's scalers take the optimizer for one that handles scales, or for one that does not."""
    before = vars(optimizer).get(_HANDLES_SCALES)
    setattr(optimizer, _HANDLES_SCALES, handles_scales)
    try:
        yield
    finally:
        if before is None:
            delattr(optimizer, _HANDLES_SCALES)
        else:
            setattr(optimizer, _HANDLES_SCALES, before)
