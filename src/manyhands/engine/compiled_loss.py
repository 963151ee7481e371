"""A task's loss, compiled together with the model that it calls.

One graph of both lets torch fuse what lies between them: the wide scores of a language model are turned into a loss
without being written in float32 first. The model itself stays as it is, with its hooks and its names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]

# Over wide rows of scores two passes are faster than one that keeps a running maximum, which costs two exponentials.
_TWO_PASSES: dict[str, Any] = {"online_softmax": False}


def compiles(asked: bool | None, device: torch.device) -> bool:
    """Whether a run compiles that asked for it, or left it open: then on a GPU for which torch can generate code."""
    if asked is not None or device.type != "cuda":
        return bool(asked)
    from torch.utils._triton import has_triton

    return has_triton()


def compiled_loss(loss: Loss, backend: str = "inductor") -> Loss:
    if not _stands_in_its_module(loss):
        return _with_compiled_model(loss, backend)

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch)

    # Torch keeps what it compiled with the code of a function, and so much of one code and no more. Each run has code
    # of its own, or the ninth run of a process would not be compiled.
    code = of_batch.__code__.replace()
    own = FunctionType(code, of_batch.__globals__, of_batch.__name__, None, of_batch.__closure__)
    compiled: Loss = torch.compile(
        own, backend=backend, options=_TWO_PASSES if backend == "inductor" else None
    )
    return compiled


def _stands_in_its_module(loss: Loss) -> bool:
    """Not so in a worker to which a function of a script was sent: torch looks up its names in another `__main__`."""
    names = getattr(loss, "__globals__", None)
    module = sys.modules.get(getattr(loss, "__module__", None) or "")
    return names is None or (module is not None and names is vars(module))


def _with_compiled_model(loss: Loss, backend: str) -> Loss:
    compiled: dict[nn.Module, Callable[..., Any]] = {}

    def of_batch(model: nn.Module, batch: Any) -> Tensor:
        if model not in compiled:
            compiled[model] = torch.compile(model, backend=backend)
        return loss(cast(nn.Module, compiled[model]), batch)

    return of_batch
