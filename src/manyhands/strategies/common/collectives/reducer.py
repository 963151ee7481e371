"""Gradients of one model, summed over workers while backward is still running.

The algorithm of DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020): buckets in reverse registration order, launched in order as they fill. A gradient moves into its
bucket in the hook that sees it first, still warm in the cache, and stays there: the optimizer reads it in place.

One more bucket carries what the workers must agree on besides gradients, so that it costs no round of its own:

    loss · stop · pause · one flag per worker whose loss is not finite · one flag per parameter that backward reached

A gradient of some rows (`nn.Embedding(sparse=True)`) takes no room in a bucket: its rows are summed by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from manyhands.engine.exchange import LocalStep, SharedStep
from manyhands.errors import UserError
from manyhands.native.dtypes import SUMMED
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.piggyback import (
    broadcast,
    kept_by_codecs,
    room_for_buffers,
    total,
)
from manyhands.strategies.common.collectives.row_sums import GradientRows, row_sparse
from manyhands.wire.flat_layout import BucketLayout, lay_out, trainable
from manyhands.wire.parcels import Parcel
from manyhands.wire.tap import GpuCopies, GradientTap, put

__all__ = ["Reducer", "gradient_layouts"]

_LOSS, _STOP, _PAUSE, _FLAGS = 0, 1, 2, 3
_SMALLEST_STATUS = 64  # capacity for evaluation totals, which piggyback on the same bucket


class Reducer:
    """Owns the gradients of `model` from construction (collective) to `close`.

    A step is: backward (hooks fill and launch buckets), then `finish` on every worker. Afterwards the sum over workers
    has been added to each parameter's `grad`, as one backward would. Where no worker reached it, it stays what it was:
    if that is None, weight decay and momentum leave the parameter alone.
    Slots of `layouts` number the trainable parameters of `model`, in registration order.
    """

    def __init__(
        self,
        model: nn.Module,
        collective: Collective,
        layouts: Sequence[BucketLayout],
        *,
        bring_back: bool = True,
    ) -> None:
        named = trainable(model)
        self._names = [names[0] for names in named.values()]
        self._parameters = list(named)
        self._collective, self._layouts = collective, layouts
        status_size = max(_SMALLEST_STATUS, _FLAGS + collective.world + len(named))
        shapes = [parameter.shape for parameter in self._parameters]
        parcels = [layout.parcel(number, shapes=shapes) for number, layout in enumerate(self._layouts)]
        status = Parcel.whole(len(parcels), status_size, torch.float64, exact=True)
        rooms = collective.allocate([*parcels, status, *room_for_buffers(model, status, collective.world)])
        self._buckets, self._status = rooms[: len(parcels)], rooms[len(parcels)]
        self._status_index = len(self._layouts)
        self._totals, self._totals_index = rooms[-1], len(rooms) - 1  # for what is too long for the status
        self._gpu = _gpu_copies(self._parameters, self._buckets)
        self._bring_back = bring_back
        self._rows = {
            slot.parameter: GradientRows.none(self._parameters[slot.parameter])
            for layout in layouts
            for slot in layout.slots
            if not slot.count and self._parameters[slot.parameter].numel()
        }
        """By number of a parameter without a bucket slot: this worker's part of its gradient, then the sum."""
        views: dict[int, torch.Tensor] = {}
        for layout, bucket in zip(self._layouts, self._buckets, strict=True):
            for number, items in layout.views(bucket):
                views[number] = items if number in self._rows else items.view(self._parameters[number].shape)
        self.gradients = [views[index] for index in range(len(views))]
        """This worker's part of every trainable parameter's gradient, in its bucket."""
        self._bucket_of = {
            slot.parameter: index for index, layout in enumerate(self._layouts) for slot in layout.slots
        }
        self._next_launch, self._pending = 0, False
        self._held = False
        self._earlier: dict[int, torch.Tensor] = {}
        self.weight = 1.0
        """The factor for every gradient on its way into its bucket; set it before a backward."""
        self.on_next_gradient: Callable[[], None] | None = None
        """Called once, at the next gradient; set it again for the next backward."""
        self._start_step()
        self._tap = GradientTap(self._parameters, self._on_gradient, self._make_room)

    @property
    def is_idle(self) -> bool:
        """Whether the buckets are free for other use: the last step was taken and no other has begun."""
        return all(parameter.grad is None for parameter in self._parameters)

    @property
    def carrier(self) -> int:
        sizes = [bucket.nbytes for bucket in (*self._buckets, self._status)]
        return sizes.index(max(sizes))

    def begin_step(self, step: int) -> None:
        """Begin a step: from here on buckets may be sent as soon as they are full."""
        self._collective.begin(step)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Return a context in which backwards only accumulate; the first one after it launches full buckets."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def finish(self, local: LocalStep) -> SharedStep:
        """Collective: sum what is left, agree on the step, and put the sums where the optimizer reads them."""
        self._collective.step = local.step
        for index, layout in enumerate(self._layouts[self._next_launch :], self._next_launch):
            for slot in layout.slots:
                if not self._filled[slot.parameter]:
                    self._fill_unreached(slot.parameter)
            self._unfilled[index] = 0
        self._launch_filled()
        status = self._status
        status.zero_()
        status[_LOSS] = local.loss * local.share if local.is_finite and local.share else 0.0
        status[_STOP] = float(local.stop)
        status[_PAUSE] = float(local.pause)
        status[_FLAGS + self._collective.rank] = float(not local.is_finite)
        flags = _FLAGS + self._collective.world
        status[flags : flags + len(self._reached)] = torch.tensor(self._reached, dtype=torch.float64)
        self._collective.launch(self._status_index)
        self._collective.finish()
        for index in sorted(self._rows):
            mine = self._rows[index] if self._reached[index] else GradientRows.none(self._parameters[index])
            self._rows[index] = self._collective.sum_rows(mine, self._parameters[index].shape[0])
        return self._read_status(status.tolist())

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers of a float64 vector, through a bucket that is exact, piece by piece."""
        if len(values) > len(self._status):
            return total(self._collective, self._totals_index, self._totals, values)
        return total(self._collective, self._status_index, self._status, values)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Collective: give every worker worker 0's values, through the largest bucket if necessary."""
        if self._collective.spread(tensors):
            return
        index = self.carrier
        broadcast(self._collective, index, [*self._buckets, self._status][index], tensors)

    def residuals(self) -> Mapping[str, Any]:
        """Collective, between steps: return the codec residuals of all workers, on worker 0."""
        index = self.carrier if self.is_idle else self._status_index
        return kept_by_codecs(self._collective, index, [*self._buckets, self._status][index])

    def _sum(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        """The summed gradient where the optimizer reads it; on a GPU that does not step, any tensor in its place."""
        if index in self._rows:
            return self._rows[index].as_gradient(parameter)
        if self._gpu is None:
            return self.gradients[index]
        if self._bring_back:
            return self._gpu.back(self.gradients[index])
        return parameter.grad if parameter.grad is not None else torch.empty_like(parameter)

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        self._tap.close()
        for parameter in self._parameters:
            parameter.grad = None
        self.gradients, self._buckets = [], []
        self._status = self._totals = torch.empty(0)

    def _make_room(self, index: int) -> None:
        if self._parameters[index].grad is None:
            self._reached[index] = False  # what was held, if anything, has been dropped by zero_grad
        else:
            self._lay_aside(index)

    def _lay_aside(self, index: int) -> None:
        """Make autograd hand over a gradient separately; earlier summed gradients are added once the sum is there."""
        parameter, view = self._parameters[index], self.gradients[index]
        earlier, parameter.grad = parameter.grad, None
        if earlier is not None and not self._reached[index]:
            is_here = not earlier.is_sparse and earlier.data_ptr() == view.data_ptr()
            self._earlier[index] = earlier.clone() if is_here else earlier

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()
        gradient, bucket = parameter.grad, self._bucket_of[index]
        assert gradient is not None
        if bucket < self._next_launch:
            raise UserError(
                f"parameter {self._names[index]!r} got a second gradient after the first was sent; run every "
                "backward of a step but the last inside accumulate(), and checkpoint with use_reentrant=False"
            )
        if gradient.is_sparse != (index in self._rows):
            name = repr(self._names[index])
            raise UserError(
                f"parameter {name} is of an embedding built with sparse=True and has a dense gradient as well"
                if index in self._rows
                else f"parameter {name} has a sparse gradient; {self._collective.instead_of_rows}"
            )
        if index in self._rows:
            rows = GradientRows.of(gradient).times(self.weight)
            self._rows[index] = self._rows[index].plus(rows) if self._reached[index] else rows
        elif self._gpu is None:
            put(self.gradients[index], gradient, self.weight, add=self._reached[index])
            parameter.grad = self.gradients[index]
        else:
            self._gpu.into(self.gradients[index], gradient, self.weight, add=self._reached[index])
        self._reached[index] = True
        if self._held:
            return
        if not self._filled[index]:
            self._filled[index] = True
            self._unfilled[bucket] -= 1
        if self._gpu is not None:
            return  # copies are still on their way: `finish` launches what has landed by then
        if self._next_launch == bucket and self._unfilled[bucket] == 0:
            self._launch_filled()
        elif self._pending:
            self._pending = self._collective.poll()

    def _start_step(self) -> None:
        self._reached = [False] * len(self._parameters)
        self._filled = [False] * len(self._parameters)
        self._unfilled = [len(layout.slots) for layout in self._layouts]
        self._next_launch, self._pending = 0, False

    def _launch_filled(self) -> None:
        if self._gpu is not None:
            self._gpu.landed()
        while self._next_launch < len(self._layouts) and self._unfilled[self._next_launch] == 0:
            self._collective.launch(self._next_launch)
            self._next_launch += 1
        self._pending = self._collective.poll()

    def _fill_unreached(self, index: int) -> None:
        if self._parameters[index].grad is None:
            self._reached[index] = False
        elif not self._reached[index]:
            self._lay_aside(index)
        if not self._reached[index]:
            self.gradients[index].zero_()

    def _read_status(self, status: list[float]) -> SharedStep:
        world = self._collective.world
        reached_by = status[_FLAGS + world :]
        for index, parameter in enumerate(self._parameters):
            earlier = self._earlier.get(index)
            if reached_by[index]:
                total = self._sum(index, parameter)
                parameter.grad = total if earlier is None else total.add_(earlier)
            elif earlier is not None:
                parameter.grad = earlier if earlier.is_sparse else self._sum(index, parameter).copy_(earlier)
        self._earlier = {}
        self._start_step()
        bad = tuple(rank for rank in range(world) if status[_FLAGS + rank])
        loss = float("nan") if bad else status[_LOSS]
        return SharedStep(loss=loss, bad_workers=bad, stop=status[_STOP] > 0, pause=status[_PAUSE] > 0)


def gradient_layouts(model: nn.Module, cap_bytes: int, *, rows: bool = False) -> tuple[BucketLayout, ...]:
    """Return buckets for the gradients of `model`; a UserError names a parameter of an unsupported type.

    With `rows`, embeddings with sparse gradients have slots of no items.
    """
    named = trainable(model)
    for parameter, names in named.items():
        if parameter.dtype not in SUMMED:
            raise UserError(
                f"parameter {names[0]!r} is {parameter.dtype}; all-reduce sums float32, float64, bfloat16 and float16"
            )
    sparse = row_sparse(model) if rows else set()
    counts = [0 if parameter in sparse else parameter.numel() for parameter in named]
    return lay_out([(count, one.dtype) for count, one in zip(counts, named, strict=True)], cap_bytes)


def _gpu_copies(parameters: Sequence[nn.Parameter], buckets: Sequence[torch.Tensor]) -> GpuCopies | None:
    """What copies gradients from a GPU to buckets of the host; None where buckets are where the model is."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise UserError(f"the model is on {', '.join(sorted(map(str, devices)))}; put it on one device")
    device = devices.pop() if devices else torch.device("cpu")
    here = all(bucket.device.type == device.type for bucket in buckets)
    return None if here else GpuCopies(device, buckets)
