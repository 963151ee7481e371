"""The operators of a task's forward and backward, with the arithmetic of each and what it needs, found by tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from manyhands.data.randomness import seed_all
from manyhands.facts import TracedModel
from manyhands.foresight.work_depth import Op

__all__ = ["trace_ops"]


def trace_ops(traced: TracedModel, samples: int) -> tuple[Op, ...]:
    """The operators of the loss of so many samples and of its backward; nothing is computed where shapes suffice."""
    batch = traced.batch(samples)
    for parameter in traced.model.parameters():
        parameter.grad = None
    seed_all(0)
    with traced.tracing(), _plain_operators(), _Recorder() as recorder:
        loss = traced.task.loss(traced.model, batch)
        recorder.is_backward = True
        (loss if loss.dim() == 0 else loss.sum()).backward()
    for parameter in traced.model.parameters():
        parameter.grad = None
    return tuple(recorder.ops)


@contextmanager
def _plain_operators() -> Iterator[None]:
    """While this lasts, attention and recurrent layers are made of operators whose arithmetic is known."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(
        False
    )  # alone: torch.backends.mkldnn.flags warns of settings of GPUs besides
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


_ATEN: Final = torch.ops.aten
_MADE_OF_OTHERS: Final[Mapping[Any, Callable[..., Any]]] = get_decompositions(
    [
        _ATEN._softmax,
        _ATEN._softmax_backward_data,
        _ATEN._log_softmax,
        _ATEN._log_softmax_backward_data,
        _ATEN.native_layer_norm,
        _ATEN.native_layer_norm_backward,
        _ATEN.native_group_norm,
        _ATEN.native_group_norm_backward,
        _ATEN.native_batch_norm,
        _ATEN.native_batch_norm_backward,
        _ATEN.mse_loss,
    ]
)
"""Several operations over rows, one after another, which one operator computes: they are counted one by one."""
_READ_FEW: Final = frozenset(
    {_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN.index_select, _ATEN.nll_loss_forward}
)
"""They read as many numbers as they return, of many more."""
_COMPUTE_NOTHING: Final = frozenset(
    {
        *(_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty),
        *(_ATEN._unsafe_view, _ATEN.unsafe_split),
    }
)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operator; what reads a storage needs the operator that wrote it last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.is_backward = False
        self._writers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # otherwise the address of a freed storage could be reused by another

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of each of its operators."""
        del types
        given = dict(kwargs or {})
        if func in _MADE_OF_OTHERS:
            with self:
                return _MADE_OF_OTHERS[func](*args, **given)
        if func is _ATEN.convolution_backward.default and sum(args[-1]) > 1:
            with self:  # of input, weight and bias, independently
                return tuple(
                    func(*args[:-1], [one == place for one in range(3)])[place] if wanted else None
                    for place, wanted in enumerate(args[-1])
                )
        result = func(*args, **given)
        self._record(func, args, given, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], given: Mapping[str, Any], result: Any) -> None:
        read, made = _tensors((args, given)), _tensors(result)
        if not made or _is_view(func):
            return
        flops = (
            0 if func.overloadpacket in _COMPUTE_NOTHING else _flops_of(func, args, given, result, read, made)
        )
        needs = {self._writers[key] for key in map(_storage, read) if key in self._writers}
        op = Op(
            name=str(func.overloadpacket).rpartition(".")[2],
            is_backward=self.is_backward,
            flops=flops,
            outputs=sum(one.numel() for one in made),
            needs=tuple(sorted(needs)),
        )
        for one in made:
            self._writers[_storage(one)] = len(self.ops)
        self._kept += made
        self.ops.append(op)


def _flops_of(
    func: Any,
    args: tuple[Any, ...],
    given: Mapping[str, Any],
    result: Any,
    read: list[Tensor],
    made: list[Tensor],
) -> int:
    known = flop_registry.get(func.overloadpacket)
    counted = int(known(*args, **given, out_val=result)) if known is not None else 0
    if counted:
        return counted
    sizes = [one.numel() for one in (made if func.overloadpacket in _READ_FEW else [*made, *read])]
    return max(sizes, default=0)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def _storage(one: Tensor) -> int:
    return int(one.untyped_storage()._cdata)


def _is_view(func: Any) -> bool:
    """Whether it returns what it was given, seen otherwise, and writes nothing."""
    aliases = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return bool(aliases) and not any(one.is_write for one in aliases)
