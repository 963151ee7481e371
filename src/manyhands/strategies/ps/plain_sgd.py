"""SGD without momentum on a shard's float32 pieces, as one compiled call, and the check of its gradient as another.

Torch's own step of a small shard is nearly all Python. This loop gives the same bits: torch's fused step multiplies and
subtracts with one rounding (FMA) where the processor can, and so does this. `PlainSgd.of` tries both once in every
process and says None where they differ, or where the optimizer does anything else than `values -= lr * gradient`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from manyhands.native.atomics import array_at
from manyhands.native.decorators import njit
from manyhands.strategies.ps.shard_layout import ShardRange

__all__ = ["PlainSgd", "is_hooked"]

_MOST_BYTES = 1 << 20  # from here on torch's threads are worth their calls
_SETTINGS = ("momentum", "weight_decay", "nesterov", "maximize", "differentiable", "foreach", "fused")
_ITEM_BYTES = 4
_NOT_FINITE = np.uint32(0x7F800000)  # the exponent of what is infinite or no number, and all above it
_MAGNITUDE = np.uint32(0x7FFFFFFF)


class PlainSgd:
    """The step of one shard; created by `of`."""

    def __init__(self, optimizer: Optimizer, values: ShardRange) -> None:
        self._optimizer = optimizer
        self._memory = values.memory
        first = values.memory.data_ptr()
        bounds = [
            (piece.data_ptr() - first, piece.data_ptr() - first + piece.nbytes) for piece in values.pieces
        ]
        self._bounds = np.array(bounds, dtype=np.int64).reshape(-1)
        self._memory_at, self._bounds_at = first, (self._bounds.ctypes.data, len(bounds))

    @classmethod
    def of(cls, optimizer: Optimizer, values: ShardRange, *, owns_all: bool) -> PlainSgd | None:
        """The step of `optimizer` on these values; None if it does more. `owns_all`: it has every piece of them."""
        groups = optimizer.param_groups
        if type(optimizer) is not SGD or len(groups) != 1 or is_hooked(optimizer) or not owns_all:
            return None
        if any(groups[0][name] for name in _SETTINGS) or any(
            groups[0][name] is False for name in ("foreach", "fused")
        ):
            return None
        if not isinstance(groups[0]["lr"], float) or values.memory.nbytes > _MOST_BYTES:
            return None
        if any(piece.dtype != torch.float32 for piece in values.pieces) or not _is_torchs():
            return None
        return cls(optimizer, values)

    def is_finite(self, gradient: int, flags: int) -> bool:
        """Whether the flagged pieces of the gradient at that address are finite."""
        finite: bool = _is_finite(gradient, flags, *self._bounds_at)
        return finite

    def step(self, gradient: int, flags: int, rate: float) -> None:
        """Step with the gradient at that address, for the flagged pieces; the learning rate is multiplied by `rate`."""
        lr = self._optimizer.param_groups[0]["lr"]
        _step(self._memory_at, gradient, flags, *self._bounds_at, lr if rate == 1 else lr * rate)


def is_hooked(optimizer: Optimizer) -> bool:
    """Whether an optimizer's steps are observed: by a hook, or by a replaced `step`."""
    hooks = (
        vars(optimizer).get("step"),
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return any(hooks)


@njit(nogil=True, cache=True)
def _is_finite(gradient, flags, pieces, count):  # type: ignore[no-untyped-def]
    bounds, reached = array_at(pieces, 2 * count, np.int64), array_at(flags, count, np.uint8)
    most = np.uint32(0)
    for piece in range(count):
        if reached[piece]:
            begin, size = bounds[2 * piece], (bounds[2 * piece + 1] - bounds[2 * piece]) // _ITEM_BYTES
            bits = array_at(gradient + begin, size, np.uint32)
            for item in range(size):
                most = max(most, bits[item] & _MAGNITUDE)
    return most < _NOT_FINITE


@njit(nogil=True, cache=True, fastmath={"contract"})
def _step(values, gradient, flags, pieces, count, lr):  # type: ignore[no-untyped-def]
    bounds, reached = array_at(pieces, 2 * count, np.int64), array_at(flags, count, np.uint8)
    rate = np.float32(lr)
    for piece in range(count):
        if reached[piece]:
            begin, size = bounds[2 * piece], (bounds[2 * piece + 1] - bounds[2 * piece]) // _ITEM_BYTES
            own = array_at(values + begin, size, np.float32)
            given = array_at(gradient + begin, size, np.float32)
            for item in range(size):
                own[item] -= rate * given[item]


@cache
def _is_torchs() -> bool:
    """Whether torch's fused step gives the same bits, in its vector loop and in the remainder."""
    draw = np.random.default_rng(0)
    for size in (1, 7, 16, 37, 1000):
        values, gradient = (torch.from_numpy(draw.standard_normal(size, np.float32)) for _ in range(2))
        expected = torch.nn.Parameter(values.clone())
        expected.grad = gradient
        SGD([expected], lr=1 / 3, fused=True).step()
        mine, flag = ShardRange(memory=_bytes(values), pieces=(values,), runs=(values,)), np.ones(1, np.uint8)
        other: Any = torch.nn.Parameter(torch.zeros(1))
        PlainSgd(SGD([other], lr=1 / 3), mine).step(gradient.data_ptr(), flag.ctypes.data, 1.0)
        if not torch.equal(values, expected.detach()):
            return False
    return True


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
