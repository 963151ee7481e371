"""The residual stream of a transformer under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def residual_stream(x: Tensor) -> Tensor:
    """`x` in bfloat16 where autocast computes in that, as in Megatron-LM and llm.c.

    Autocast itself leaves embeddings and layer norms in float32, and so all sums of a residual stream: between two
    products of matrices twice the bytes move.
    """
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.bfloat16) if torch.get_autocast_dtype(device) == torch.bfloat16 else x
