"""How much memory a step takes at its peak, counted tensor by tensor as torch computes, with memory or without.

Every storage counts from the operation that makes it until it is freed. It works on torch's fake tensors, so a model
that does not fit can be counted as well. Of what operations take inside, the copies of a convolution's tensors count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """The most bytes that forward and backward of a batch take beside the model and the batch."""

    together: int = 0  # gradients, activations and temporary values, of a step that begins without gradients
    beside: int = 0  # the same where gradients have memory of their own, into which each is moved as it comes


class CountedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts what is new while it is open; `known` storages are not."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, Any] = {one.untyped_storage()._cdata: None for one in known}
        self._gradients: dict[int, int] = {}
        self.now = self.peak = self.peak_beside = 0

    def __torch_dispatch__(
        self,
        function: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is _DEVICE:  # which autograd asks of every tensor without memory, most of all calls
            return made
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.layout is torch.strided:
                self._add(one.untyped_storage())
        if function in _COPYING:
            self._reach(self.now + _COPYING[function](made, args))
        return made

    @contextmanager
    def of_gradients(self, model: nn.Module) -> Iterator[None]:
        """While it is open, gradients that have come are known to be those of parameters."""
        trained: list[Any] = [one for one in model.parameters() if one.requires_grad]
        hooks = [one.register_post_accumulate_grad_hook(self._gradient) for one in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            storage = parameter.grad.untyped_storage()
            self._gradients[storage._cdata] = storage.nbytes()

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self.now += size
        self._reach(self.now)
        self._seen[key] = weakref.ref(storage, partial(self._free, key, size))

    def _reach(self, size: int) -> None:
        self.peak = max(self.peak, size)
        self.peak_beside = max(self.peak_beside, size - sum(self._gradients.values()))

    def _free(self, key: int, size: int, _reference: object) -> None:
        self.now -= size
        self._seen.pop(key, None)
        self._gradients.pop(key, None)


def _copied_forward(output: Tensor, args: Sequence[Any]) -> int:
    return max(int(args[0].nbytes), output.nbytes)


def _copied_backward(_made: object, args: Sequence[Any]) -> int:
    gradient, x = args[:2]
    return int(gradient.nbytes + x.nbytes)


_DEVICE: Final = torch.ops.prim.device.default

# oneDNN, which computes convolutions on a CPU, copies tensors into a layout of its own: in forward the input until the
# output is there, which is then copied back; for the gradient of the weights the output's gradient and the input.
_COPYING: Final[Mapping[Any, Callable[[Any, Sequence[Any]], int]]] = {
    torch.ops.aten.convolution.default: _copied_forward,
    torch.ops.aten.convolution_backward.default: _copied_backward,
}


def peaks_of_step(model: nn.Module, batch: Any, loss: Callable[[], Tensor]) -> StepPeaks:
    """Of a step whose loss is computed by `loss`; the model has its gradients afterwards."""
    given = (one for one in tree_leaves(batch) if isinstance(one, Tensor))
    counted = CountedMemory([*model.parameters(), *model.buffers(), *given])
    with counted.of_gradients(model), counted:
        loss().backward()  # type: ignore[no-untyped-call]
    return StepPeaks(together=counted.peak, beside=counted.peak_beside)


def new_memory(known: Iterable[Tensor], work: Callable[[], object]) -> int:
    """The most bytes that `work` takes at once, of tensors that are not `known`."""
    counted = CountedMemory(known)
    with counted:
        work()
    return counted.peak
