"""Gradients of one model, summed over workers while backward is still running.

The algorithm of DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020): buckets in reverse registration order, launched in order as they fill. A gradient moves into its
bucket in the hook that sees it first, still warm in the cache, and stays there: the optimizer reads it in place.

One more bucket carries what the workers must agree on besides gradients, so that it costs no round of its own:

    loss · stop · one flag per worker whose loss is not finite · one flag per parameter that backward reached
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from manyhands.allreduce.buckets import BucketLayout, Slot, lay_out
from manyhands.allreduce.collective import Collective
from manyhands.errors import UserError
from manyhands.exchange import LocalStep, SharedStep

__all__ = ["Reducer"]

_LOSS, _STOP, _FLAGS = 0, 1, 2
_SMALLEST_STATUS = 64  # room for evaluation totals, which ride the same bucket
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Reducer:
    """Owns the gradients of `model` from construction (collective) to `close`.

    A step is: backward (hooks fill and launch buckets), then `finish` on every worker. Afterwards each parameter's
    `grad` is the sum over workers, or None where no worker reached it: weight decay and momentum leave that one alone.
    """

    def __init__(self, model: nn.Module, collective: Collective, cap_bytes: int) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype not in _DTYPES:
                raise UserError(
                    f"parameter {name!r} is {parameter.dtype}; all-reduce sums float32, float64, bfloat16 and float16"
                )
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._collective = collective
        self._layouts = lay_out([(p.numel(), p.dtype) for p in self._parameters], cap_bytes)
        status_size = max(_SMALLEST_STATUS, _FLAGS + collective.world + len(named))
        sizes = [(layout.count, layout.dtype) for layout in self._layouts]
        *self._buckets, self._status = collective.allocate([*sizes, (status_size, torch.float64)])
        self._status_index = len(self._layouts)
        self._views = self._make_views()
        self._bucket_of = {
            slot.parameter: index for index, layout in enumerate(self._layouts) for slot in layout.slots
        }
        self._reached = [False] * len(named)
        self._unfilled: list[int] = []
        self._next_launch = 0
        self._pending = False
        self._start_step()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]

    def finish(self, local: LocalStep) -> SharedStep:
        """Collective: sum what is left, agree on the step, and put the sums where the optimizer reads them."""
        self._zero_unreached()
        self._launch_filled()
        status = self._status
        status.zero_()
        status[_LOSS] = local.loss * local.share if local.is_finite and local.share else 0.0
        status[_STOP] = float(local.stop)
        status[_FLAGS + self._collective.rank] = float(not local.is_finite)
        flags = _FLAGS + self._collective.world
        status[flags : flags + len(self._reached)] = torch.tensor(self._reached, dtype=torch.float64)
        self._collective.launch(self._status_index)
        self._collective.finish()
        return self._read_status(status.tolist())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers of a float64 vector, through the status bucket, piece by piece."""
        pieces = []
        for piece in torch.split(values, len(self._status)):
            self._status.zero_()
            self._status[: len(piece)] = piece
            self._collective.launch(self._status_index)
            self._collective.finish()
            pieces.append(self._status[: len(piece)].clone())
        return torch.cat(pieces)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Collective: give every worker worker 0's values; they ride in the bytes of the largest bucket."""
        carriers = [*self._buckets, self._status]
        index = max(range(len(carriers)), key=lambda i: carriers[i].nbytes)
        carrier = carriers[index].view(torch.uint8)
        with torch.no_grad():
            for tensor in tensors:
                flat = tensor.detach().contiguous().flatten().view(torch.uint8)
                for piece in torch.split(flat, len(carrier)):
                    carrier[: len(piece)] = piece
                    self._collective.broadcast(index)
                    piece.copy_(carrier[: len(piece)])
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
        carrier.zero_()

    def close(self) -> None:
        """Take the hooks off and let go of the buckets."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
        self._hooks, self._views, self._buckets = [], [], []
        self._status = torch.empty(0)

    def _make_views(self) -> list[torch.Tensor]:
        views: dict[int, torch.Tensor] = {}
        for layout, bucket in zip(self._layouts, self._buckets, strict=True):
            for slot in layout.slots:
                shape = self._parameters[slot.parameter].shape
                views[slot.parameter] = bucket[slot.offset : slot.offset + slot.count].view(shape)
        return [views[index] for index in range(len(views))]

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        view, bucket = self._views[index], self._bucket_of[index]
        place = view.data_ptr()

        def on_gradient(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.data_ptr() != place or view.numel() == 0:
                if gradient.is_sparse:
                    raise UserError(
                        f"parameter {self._names[index]!r} has a sparse gradient; all-reduce sums dense ones, so "
                        "build it with sparse=False"
                    )
                view.copy_(gradient)
                parameter.grad = view
            if not self._reached[index]:
                self._reached[index] = True
                self._unfilled[bucket] -= 1
            if self._next_launch == bucket and self._unfilled[bucket] == 0:
                self._launch_filled()
            elif self._pending:
                self._pending = self._collective.poll()

        return on_gradient

    def _start_step(self) -> None:
        self._reached = [False] * len(self._parameters)
        self._unfilled = [len(layout.slots) for layout in self._layouts]
        self._next_launch = 0
        self._pending = False

    def _launch_filled(self) -> None:
        while self._next_launch < len(self._layouts) and self._unfilled[self._next_launch] == 0:
            self._collective.launch(self._next_launch)
            self._next_launch += 1
        self._pending = self._collective.poll()

    def _zero_unreached(self) -> None:
        for index, layout in enumerate(self._layouts[self._next_launch :], self._next_launch):
            for slot in _unreached(layout, self._reached):
                self._views[slot.parameter].zero_()
            self._unfilled[index] = 0

    def _read_status(self, status: list[float]) -> SharedStep:
        world = self._collective.world
        reached_by = status[_FLAGS + world :]
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._views[index] if reached_by[index] else None
        self._start_step()
        bad = tuple(rank for rank in range(world) if status[_FLAGS + rank])
        loss = float("nan") if bad else status[_LOSS]
        return SharedStep(loss=loss, bad_workers=bad, stop=status[_STOP] > 0)


def _unreached(layout: BucketLayout, reached: Sequence[bool]) -> list[Slot]:
    return [slot for slot in layout.slots if not reached[slot.parameter]]
