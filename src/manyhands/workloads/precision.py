"""A module that computes in fewer bits: what inference does with them, unlike `data.store.exported`, which only keeps
them.

fp32   as trained
bf16   weights and activations in bfloat16: half the memory traffic, fast where the processor multiplies it
int8   linear and LSTM layers with 8-bit weights and activations quantised as they come (torch's dynamic
       quantisation); all other layers stay in single precision
"""

from __future__ import annotations

import copy
import platform
import warnings

import torch
from torch import nn

from manyhands.data.store.exported import check_precision

__all__ = ["in_precision"]

_ENGINES = {"aarch64": "qnnpack", "arm64": "qnnpack"}


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """A copy of `model` that computes so; the module itself for fp32. Called in the process that computes."""
    check_precision(precision)
    if precision == "fp32":
        return model
    warnings.filterwarnings("ignore", message=r"(?s).*mkldnn_matmul")  # it says which kernel it takes instead
    if precision == "bf16":
        return copy.deepcopy(model).to(torch.bfloat16)
    torch.backends.quantized.engine = _ENGINES.get(platform.machine(), "x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it will move to another package
        made: nn.Module = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            copy.deepcopy(model), {nn.Linear, nn.LSTM}, dtype=torch.qint8
        )
    return made
