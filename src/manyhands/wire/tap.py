"""The tap: takes each gradient from autograd the moment it is there, still warm in the cache.

Gradients of a model on a GPU are copied to their buckets in the host's memory while backward continues, and back. The
buckets' memory is pinned, so that copies run on a stream of their own beside the kernels of backward. Where pinning is
refused (a limit on locked memory) copies still work, only slower, and a warning says so once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class GradientTap:
    """Calls `taken(number, parameter)` for each gradient, which is then in `parameter.grad`; `close` is idempotent.

    `before(number)` is called when a gradient is about to be added to what the parameter has.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        taken: Callable[[int, Tensor], None],
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._hooks: list[Any] = []
        for number, parameter in enumerate(parameters):
            if before is not None:
                announce = partial(_announce, before, number)
                self._hooks.append(parameter.register_hook(announce))  # type: ignore[no-untyped-call]
            hook = parameter.register_post_accumulate_grad_hook(partial(taken, number))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def put(view: Tensor, gradient: Tensor, weight: float, *, add: bool = False) -> None:
    """Move a gradient to its place, weighted; a weight of 0 leaves nothing of it, not even a NaN."""
    if weight == 0:
        if not add:
            view.zero_()
    elif add:
        view.add_(gradient, alpha=weight)
    elif weight == 1:
        view.copy_(gradient)
    elif gradient.device == view.device:
        torch.mul(gradient, weight, out=view)
    else:
        view.copy_(gradient * weight)


def _announce(before: Callable[[int], None], number: int, _gradient: Tensor) -> None:
    before(number)  # a hook that returned something would replace the gradient


class GpuCopies:
    """Copies between one GPU and buckets in the host's memory; `close` is idempotent.

    A bucket may be used after `landed`; what `back` returns may be used by any kernel launched after it.
    """

    def __init__(self, device: torch.device, buckets: Sequence[Tensor]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = _pin(buckets)

    def into(self, view: Tensor, gradient: Tensor, weight: float, *, add: bool) -> None:
        """Begin to put a gradient, weighted, into its bucket, or to add it to what is there.

        A weight of 0 leaves nothing of it, not even a NaN.
        """
        if weight == 0:
            self._stream.synchronize()
            if not add:
                view.zero_()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            weighted = gradient if weight == 1 else gradient * weight
            if add:
                weighted = weighted + view.to(self._device, non_blocking=True)
            view.copy_(weighted, non_blocking=True)
        gradient.record_stream(self._stream)

    def landed(self) -> None:
        self._stream.synchronize()

    def back(self, view: Tensor) -> Tensor:
        return view.to(self._device, non_blocking=True)

    def close(self) -> None:
        self._stream.synchronize()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned = []


def _pin(buckets: Sequence[Tensor]) -> list[int]:
    """Pin the memory from the first bucket to the last; the addresses to unpin, none where it was refused."""
    filled = [bucket for bucket in buckets if bucket.numel()]
    if not filled:
        return []
    begin = min(bucket.data_ptr() for bucket in filled)
    end = max(bucket.data_ptr() + bucket.nbytes for bucket in filled)
    status = torch.cuda.cudart().cudaHostRegister(begin, end - begin, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        warnings.warn(
            f"{end - begin} bytes of gradients could not be pinned (CUDA error {int(status)}); copies to and from the "
            "GPU will not overlap with backward; raise the limit on locked memory (ulimit -l)",
            stacklevel=2,
        )
        return []
    return [begin]
