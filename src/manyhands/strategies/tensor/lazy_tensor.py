"""A tensor of which every slice has a part, gathered when its value is used.

A sliced output layer returns one. The user's loss may do anything with the scores; most operations gather them first.
The exceptions work without the whole tensor: shape and type, reshaping that leaves the last dimension alone, and
`torch.nn.functional.cross_entropy`, which sends three numbers a sample instead of all scores (Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from manyhands.errors import UserError
from manyhands.native.dtypes import HALVES
from manyhands.strategies.tensor.moves import Port, gathered

_ABOUT = (
    *("shape", "dtype", "device", "ndim", "layout"),
    *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested"),
)
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in _ABOUT),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_CASTS = {Tensor.float, Tensor.double, Tensor.contiguous}
_SHAPES = {Tensor.flatten, torch.flatten, Tensor.view, Tensor.reshape, torch.reshape}


class LazyWhole(Tensor):
    """A stand-in for a whole tensor of this shape, of which this slice has `part`; `gather` is collective.

    `port` is given where the parts are scores, concatenated along the last dimension: then `cross_entropy` works
    without the whole tensor.
    """

    _part: Tensor
    _gather: Callable[[], Tensor]
    _port: Port | None
    _sizes: tuple[int, ...]
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls,
        part: Tensor,
        shape: Sequence[int],
        gather: Callable[[], Tensor],
        port: Port | None = None,
        sizes: Sequence[int] = (),
    ) -> LazyWhole:
        kind: Any = {"dtype": part.dtype, "device": part.device}
        made: LazyWhole = Tensor._make_wrapper_subclass(cls, tuple(shape), **kind)
        made._part, made._gather, made._port, made._sizes = part, gather, port, tuple(sizes)
        made._whole = None
        return made

    @staticmethod
    def scores(part: Tensor, port: Port, sizes: Sequence[int]) -> LazyWhole:
        """Make a stand-in for scores of which the slices have these sizes of the last dimension."""
        shape = (*part.shape[:-1], sum(sizes))
        return LazyWhole(part, shape, lambda: gathered(part, port, -1, sizes), port, sizes)

    def whole(self) -> Tensor:
        """Return the whole tensor; collective the first time."""
        if self._whole is None:
            self._whole = self._gather()
        return self._whole

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer metadata queries directly, apply some functions to the part; all others get the whole tensor."""
        kwargs = kwargs or {}
        if function in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyWhole):
            if getattr(function, "__self__", None) is Tensor.requires_grad:
                return first._part.requires_grad
            name = getattr(function, "__name__", "")
            if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__"):
                raise UserError(
                    f"strategy tensor: {name} would change a sliced tensor; make a new one "
                    "instead, or use 'whole' for that layer in tensor_plan"
                )
            on_part = first._on_part(function, args, kwargs)
            if on_part is not None:
                return on_part
        args, kwargs = tree_map(as_whole, (tuple(args), dict(kwargs)))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is not a method
        cls, function: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Gather for operations that reach the dispatcher without passing through `__torch_function__`."""
        args, kwargs = tree_map(as_whole, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)

    def _on_part(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        if self._port is None or self._whole is not None:
            return None
        if function is F.cross_entropy:
            return _loss_of(self, *args[1:], **kwargs)
        if function in _CASTS and len(args) == 1 and not kwargs:
            return LazyWhole.scores(function(self._part), self._port, self._sizes)
        if function in _SHAPES and not kwargs:
            try:
                shape = function(torch.empty(self.shape, device="meta"), *args[1:]).shape
            except (RuntimeError, TypeError, IndexError):
                return None  # torch reports the error
            if shape[-1] == self.shape[-1]:
                own = self._part.reshape(*shape[:-1], self._part.shape[-1])
                return LazyWhole.scores(own, self._port, self._sizes)
        return None


def as_whole(value: Any) -> Any:
    """Collective for a stand-in: return the tensor that it stands for; return any other value unchanged."""
    return value.whole() if isinstance(value, LazyWhole) else value


def cross_entropy(part: Tensor, target: Tensor, port: Port, first: int, ignore_index: int = -100) -> Tensor:
    """Collective: the loss of each sample, given this slice's scores (samples, classes from `first` on).

    Each slice sends three numbers a sample to all others: its largest score, its sum of exponentials, and the
    target's score, or 0 where another slice has it. The backward pass needs no communication.
    """
    port.trains = torch.is_grad_enabled()
    losses: Tensor = _CrossEntropy.apply(part, target, port, first)  # type: ignore[no-untyped-call]
    return losses.masked_fill(target == ignore_index, 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, port: Port, first: int) -> Tensor:
        mine = (target >= first) & (target < first + part.shape[1])
        column = (target - first).where(mine, 0)
        largest = part.amax(1)
        target_score = part.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0)
        own = torch.stack([largest, (part - largest[:, None]).exp().sum(1), target_score])
        of_all = port.counted(lambda: port.group.all_gather(own), backward=False)
        highest, exponentials, picked = torch.stack(of_all).unbind(1)
        top = highest.amax(0)
        logarithm = top + (exponentials * (highest - top).exp()).sum(0).log()
        ctx.save_for_backward(part, logarithm, mine, column)
        return logarithm - picked.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        part, logarithm, mine, column = ctx.saved_tensors
        probabilities = (part - logarithm[:, None]).exp_()
        probabilities.scatter_add_(1, column[:, None], -mine.to(part.dtype)[:, None])
        return probabilities.mul_(gradient[:, None]), None, None, None


def _loss_of(
    scores: LazyWhole,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Like `torch.nn.functional.cross_entropy`; None where the whole tensor is needed."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or scores.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    port, sizes = scores._port, scores._sizes
    assert port is not None, "stand-ins of scores have a port"
    if port.world == 1 or min(sizes) < 1 or len(target) != len(scores):
        return None
    valid = target[target != ignore_index]
    if len(valid) and not 0 <= int(valid.min()) <= int(valid.max()) < sum(sizes):
        return None  # the whole tensor lets torch report what is wrong
    # In 32 bits, as torch's: 16 bits lose the sum.
    part = scores._part.float() if scores.dtype in HALVES else scores._part
    losses = cross_entropy(part, target, port, sum(sizes[: port.index]), ignore_index)
    if not torch.is_autocast_enabled(scores.device.type):
        losses = losses.to(scores.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / len(valid)
