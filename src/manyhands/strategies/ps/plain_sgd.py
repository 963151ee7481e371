"""Plain SGD of a shard: one compiled loop, and steps begun before their gradients are here completely.

Torch's own step of a small shard is nearly all Python. This loop gives the same bits: torch's fused step multiplies and
subtracts with one rounding (FMA) where the processor can, and so does this. `PlainSgd.of` tries both once in every
process and says None where they differ, or where the optimizer does more than `values -= lr * gradient`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        if not isinstance(groups[0]["lr"], float):
            return None
        if any(piece.dtype != torch.float32 for piece in values.pieces) or not _is_torchs():
            return None
        return cls(optimizer, values)

    def is_finite(self, gradient: int, flags: int) -> bool:
        """Whether the flagged pieces of the gradient at that address are finite."""
        finite: bool = _all_finite(gradient, flags, *self._bounds_at)
        return finite

    def step(self, gradient: int, flags: int, rate: float) -> None:
        """Step with the gradient at that address, for the flagged pieces; the learning rate is multiplied by `rate`."""
        lr = self.lr
        _step(self._memory_at, gradient, flags, *self._bounds_at, lr if rate == 1 else lr * rate)

    @property
    def lr(self) -> float:
        lr: float = self._optimizer.param_groups[0]["lr"]
        return lr

    @property
    def is_small(self) -> bool:
        """Whether this is faster than torch's own threads."""
        return self._memory.nbytes <= _MOST_BYTES

    def step_between(self, begin: int, until: int, gradient: Tensor, values: Tensor) -> None:
        """Step these bytes of `values`, laid out like the shard's, with a gradient that reached all pieces."""
        bounds = self._bounds.clip(begin, until)
        count = len(bounds) // 2
        flags = np.ones(count, np.uint8)
        at = (values.data_ptr(), gradient.data_ptr(), flags.ctypes.data, bounds.ctypes.data)
        _step(*at, count, self.lr)


class NextValues:
    """The values after the next step, as far as its gradients have come; the shard's own do not change before it."""

    def __init__(self, values: ShardRange, sgd: PlainSgd) -> None:
        self._values, self._sgd = values.memory, sgd
        self._memory = torch.empty_like(values.memory)
        self.view = memoryview(self._memory.numpy())  # type: ignore[arg-type]
        self._sum: Tensor | None = None
        self._gradients: tuple[Tensor, ...] = ()
        self._until, self._lr = 0, 0.0

    def begin(self, gradients: Sequence[Tensor]) -> None:
        """The gradients of the step, in the order of their sum; every one reaches all pieces."""
        self._gradients = tuple(gradients)
        self._until, self._lr = 0, self._sgd.lr
        if len(gradients) > 1 and self._sum is None:
            self._sum = torch.empty_like(self._values)

    def advance(self, until: int) -> None:
        """Take the step for what lies before this byte, which all gradients have."""
        here = slice(self._until, until)
        terms = [one[here].view(torch.float32) for one in self._gradients]
        total = self._gradients[0]
        if len(terms) > 1 and self._sum is not None:
            total, out = self._sum, self._sum[here].view(torch.float32)
            torch.add(terms[0], terms[1], out=out)
            for term in terms[2:]:
                out.add_(term)
        self._memory[here] = self._values[here]
        self._sgd.step_between(self._until, until, total, self._memory)
        self._until = until

    def take(self, gradients: Sequence[Tensor]) -> bool:
        """Whether the step of these gradients was begun here; then the shard's values become those after it.

        Whatever the answer, nothing is begun any more.
        """
        begun = [one.data_ptr() for one in self._gradients]
        is_it = bool(begun) and begun == [one.data_ptr() for one in gradients] and self._lr == self._sgd.lr
        if is_it:
            self.advance(self._values.numel())
            self._values.copy_(self._memory)
        self._gradients = ()
        return is_it


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
def _all_finite(gradient, flags, pieces, count):  # type: ignore[no-untyped-def]
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
        flag = np.ones(1, np.uint8)
        mine = ShardRange(memory=values.view(torch.uint8), pieces=(values,), runs=(values,))
        other: Any = torch.nn.Parameter(torch.zeros(1))
        PlainSgd(SGD([other], lr=1 / 3), mine).step(gradient.data_ptr(), flag.ctypes.data, 1.0)
        if not torch.equal(values, expected.detach()):
            return False
    return True
