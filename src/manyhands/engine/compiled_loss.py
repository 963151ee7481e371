"""A task's loss, compiled together with the model that it calls.

One graph of both lets torch fuse what lies between them: the wide scores of a language model are turned into a loss
without being written in float32 first. The model itself stays as it is, with its hooks and its names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["compiled_loss", "compiles"]

Loss = Callable[[nn.Module, Any], Tensor]


def compiles(asked: bool | None, device: torch.device) -> bool:
    """Whether a run compiles that asked for it, or left it open: then on a GPU for which torch can generate code."""
    if asked is not None or device.type != "cuda":
        return bool(asked)
    from torch.utils._triton import has_triton

    return has_triton()


def compiled_loss(loss: Loss, backend: str = "inductor") -> Loss:
    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch)

    # Torch keeps what it compiled with the code of a function, and so much of one code and no more. Each run has code
    # of its own, or the ninth run of a process would not be compiled.
    code = of_batch.__code__.replace()
    own = FunctionType(code, of_batch.__globals__, of_batch.__name__, None, of_batch.__closure__)
    compiled: Loss = torch.compile(own, backend=backend)
    return compiled
