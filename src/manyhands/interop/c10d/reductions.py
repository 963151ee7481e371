"""How values of several ranks become one: by compiled code where there is some, else by torch.

Compiled (see `allreduce.kernels`): sum, mean and maximum of the float types. By torch: everything else that torch can
do with two tensors; halves are combined in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import torch

from manyhands.errors import UserError
from manyhands.interop.c10d.collective_calls import Reduction
from manyhands.interop.c10d.layout_rounds import RoundReducer
from manyhands.native.dtypes import HALVES, SUMMED
from manyhands.native.group import reduction_kernels

__all__ = ["check_reduction", "combine", "compiled_reducer"]

_OPERATIONS: Final = {
    Reduction.SUM: reduction_kernels.SUM,
    Reduction.AVG: reduction_kernels.MEAN,
    Reduction.MAX: reduction_kernels.MAX,
}
_BY_TORCH: Final[dict[Reduction, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}
_BITWISE: Final = (Reduction.BAND, Reduction.BOR, Reduction.BXOR)


@cache
def compiled_reducer(dtype: torch.dtype, reduction: Reduction) -> RoundReducer | None:
    """The compiled reduction, compiled when it is first asked for; None where torch must do it."""
    kind, operation = SUMMED.get(dtype), _OPERATIONS.get(reduction)
    if kind is None or operation is None:
        return None
    return RoundReducer(reduction_kernels.reducer_address(kind), operation, dtype.itemsize)


def check_reduction(dtype: torch.dtype, reduction: Reduction) -> None:
    """Raise a UserError for a reduction that a dtype does not have, before anything is exchanged."""
    reason = _refusal(dtype, reduction)
    if reason:
        raise UserError(f"reduction {reduction.name} of {dtype}: {reason}")


@cache
def _refusal(dtype: torch.dtype, reduction: Reduction) -> str:
    """Why a reduction cannot be done, or nothing; asked of torch itself, on tensors of one item."""
    if reduction in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return "only whole numbers have bits to combine"
    if reduction is Reduction.AVG and dtype is torch.bool:
        return "truth values have no mean; sum them as int64"
    if compiled_reducer(dtype, reduction) is not None:
        return ""
    one = torch.zeros(1, dtype=dtype)
    try:
        combine([one, one], reduction)
    except RuntimeError as error:
        return f"torch has none on the CPU ({str(error).splitlines()[0]})"
    return ""


def combine(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The parts of all ranks, combined in rank order; a mean of integers is truncated towards zero."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total = _BY_TORCH[reduction](total, part.to(wide))
    if reduction is Reduction.AVG:
        fractions = dtype.is_floating_point or dtype.is_complex
        total = torch.div(total, len(parts), rounding_mode=None if fractions else "trunc")
    return total.to(dtype)
