"""Products of matrices in 8 bits (Micikevicius et al. 2022), in the linear layers of a model's blocks.

    y = s_x·s_w · (q_x · q_wᵀ) + b        q = round(value / s) to 8 bits, s = largest magnitude / largest 8-bit number

Each tensor has one scale, that of its own largest magnitude. Values and weights have 4 bits of exponent and 3 of
mantissa (e4m3), gradients 5 and 2 (e5m2), for they reach wider. Products are summed in float32 by torch's `_scaled_mm`
and rounded to bfloat16. Weights, gradients and the optimizer's states stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.engine.recomputing import blocks_of
from manyhands.errors import UserError

_VALUES: Final = torch.float8_e4m3fn
_GRADIENTS: Final = torch.float8_e5m2
_MULTIPLE: Final = 16  # of each dimension of a product, as GPUs want it
_LEAST: Final = 1e-30  # magnitude that is told from 0
_CAPABILITY: Final = (8, 9)
_INSTEAD: Final = "use autocast=True, which is bfloat16"


def require_fp8(device: torch.device) -> None:
    """UserError where a device multiplies no matrices in 8 bits."""
    if device.type == "cpu":
        raise UserError(f"autocast=fp8: a CPU has no products in 8 bits; {_INSTEAD}, or device='cuda'")
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        raise UserError(
            f"autocast=fp8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, and "
            f"products in 8 bits need {_CAPABILITY[0]}.{_CAPABILITY[1]}; {_INSTEAD}"
        )


@contextmanager
def fp8_products(model: nn.Module) -> Iterator[None]:
    """While this is open, the linear layers of the blocks of `model` multiply in 8 bits; UserError where there is none.

    Embeddings, norms, attention and the layer of the scores are not in it; nor are layers whose sizes are no multiples
    of 16, or that are more than a linear layer, such as those with an adapter.
    """
    layers = [
        one
        for block in blocks_of(model)
        for one in block.modules()
        if type(one) is nn.Linear and not (one.in_features % _MULTIPLE or one.out_features % _MULTIPLE)
    ]
    if not layers:
        raise UserError(
            f"autocast=fp8: no block of the model has a torch.nn.Linear whose sizes are multiples of {_MULTIPLE}; "
            f"{_INSTEAD}, or put the blocks into an nn.ModuleList"
        )
    for layer in layers:
        layer.forward = partial(_linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in bfloat16, of an `x` with any dimensions, by products in 8 bits."""
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _ScaledProduct.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], len(weight))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return scaled_linear(x, layer.weight, layer.bias)


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight = _quantised(x, _VALUES), _quantised(weight, _VALUES)
        ctx.save_for_backward(*of_x, *of_weight)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        added = None if bias is None else bias.to(torch.bfloat16)
        return _product(*of_x, of_weight[0].t(), of_weight[1], added, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        to_x = to_weight = to_bias = None
        g, g_scale = _quantised(gradient, _GRADIENTS)
        if needs_x:
            to_x = _product(g, g_scale, _by_columns(weight), weight_scale).to(of_x)
        if needs_weight:
            if short := -len(g) % _MULTIPLE:
                g, x = F.pad(g, (0, 0, 0, short)), F.pad(x, (0, 0, 0, short))
            to_weight = _product(g.t().contiguous(), g_scale, _by_columns(x), x_scale).to(of_weight)
        if needs_bias:
            to_bias = gradient.sum(0, dtype=torch.float32).to(of_bias)
        return to_x, to_weight, to_bias


def _quantised(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`values` in 8 bits, and what these are to be multiplied with."""
    most = torch.finfo(dtype).max
    scale = values.abs().amax().float().clamp(min=_LEAST) / most
    return (values.float() / scale).clamp(-most, most).to(dtype), scale


def _by_columns(values: Tensor) -> Tensor:
    """The same, with columns one after another in memory: the only layout that a GPU takes on the right in 8 bits."""
    return values.t().contiguous().t()


def _product(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """`fast`: sums within the matrix units have fewer bits, which forward does without (as in torchao)."""
    product: Tensor = torch._scaled_mm(
        left, right, left_scale, right_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product
