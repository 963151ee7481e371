"""Products of small matrices on a CPU: by BLAS, where oneDNN would take longer to get ready than to multiply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["plain_products"]


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """While this is open, a client's steps of a model of linear layers are computed without oneDNN.

    Clients have small batches. On ARM oneDNN takes half a millisecond to set up each product, many times what BLAS
    takes to compute it; elsewhere the two are alike. A model with convolutions or recurrent layers, which are oneDNN's,
    keeps it.
    """
    of_onednn = (nn.modules.conv._ConvNd, nn.RNNBase)
    backend: Any = torch.backends.mkldnn
    if not backend.enabled or any(isinstance(module, of_onednn) for module in model.modules()):
        yield
        return
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = True
