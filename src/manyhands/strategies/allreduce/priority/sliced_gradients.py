"""This worker's gradients in slices: moved from autograd into their buckets, and reported as each slice fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.wire.flat_layout import LINE_BYTES, BucketLayout, LayoutSlot, trainable
from manyhands.wire.parcels import Parcel
from manyhands.wire.tap import GradientTap, put

__all__ = ["GradientSlice", "SlicedGradients", "cut"]


class SlicedGradients:
    """Owns the gradients of `model` from construction to `close`; calls `filled(number)` for each full slice.

    Between two steps no parameter has a `grad`: the optimizer reads the sums in place, through `views`.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Sequence[BucketLayout],
        slices: Sequence[GradientSlice],
        buckets: Sequence[torch.Tensor],
        filled: Callable[[int], None],
    ) -> None:
        named = trainable(model)
        self._names = [names[0] for names in named.values()]
        self.parameters = list(named)
        self._slices, self._filled = slices, filled
        views = {
            number: items.view(self.parameters[number].shape)
            for layout, bucket in zip(layouts, buckets, strict=True)
            for number, items in layout.views(bucket)
        }
        self.views = [views[index] for index in range(len(views))]
        """By parameter: its gradient in the bucket, in the parameter's shape."""
        self.slices_of: list[list[int]] = [[] for _ in named]
        """By parameter: the slices that contain parts of it."""
        for number, one in enumerate(slices):
            for index in one.parameters:
                self.slices_of[index].append(number)
        self._held = False
        self.weight = 1.0
        self.on_next_gradient: Callable[[], None] | None = None
        self.step = 0
        """The one that is computed."""
        self.reached: list[bool] = []
        """By parameter: whether this worker's backward has reached it in this step."""
        self._missing: list[set[int]] = []
        self.begin()
        self._tap = GradientTap(self.parameters, self._on_gradient)

    def begin_step(self, step: int) -> None:
        """Gradients from here on are of step `step`; its first backward begins it, when the last one has arrived."""
        self.step = step

    def begin(self) -> None:
        self.reached = [False] * len(self.parameters)
        self._missing = [set(one.parameters) for one in self._slices]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Return a context in which backwards only add to the gradients; the first one after it fills slices."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def fill_rest(self) -> None:
        """After backward: fill what it did not reach with what was accumulated before, or zero."""
        for index, reached in enumerate(self.reached):
            if not reached:
                self.views[index].zero_()
            self._fill(index)

    def close(self) -> None:
        self._tap.close()
        for parameter in self.parameters:
            parameter.grad = None
        self.views = []

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(
                f"parameter {self._names[index]!r} has a sparse gradient, which order=priority does not slice; leave "
                "it out, or build the embedding with sparse=False"
            )
        numbers = self.slices_of[index]
        if numbers and not any(index in self._missing[number] for number in numbers):
            raise UserError(
                f"parameter {self._names[index]!r} got a second gradient after the first was sent; checkpoint with "
                "use_reentrant=False"
            )
        put(self.views[index], gradient, self.weight, add=self.reached[index])
        self.reached[index] = True
        if not self._held:
            self._fill(index)

    def _fill(self, index: int) -> None:
        for number in self.slices_of[index]:
            missing = self._missing[number]
            if index in missing:
                missing.remove(index)
                if not missing:
                    self._filled(number)


# Gradients in slices: the units that are sent, and the parameters that wait for each. Pure.
# A bucket is cut between its tensors, and a tensor that is larger than a slice is cut itself, so that nothing urgent
# waits for more than a slice (P3: Jayarajan et al., MLSys 2019). A slice is a `Parcel` whose priority is the number of
# the first parameter in it: the next forward needs that one first.
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSlice:
    """A part of a bucket that is summed as one unit."""

    parcel: Parcel
    """Which bytes of which bucket it is; a lower priority is more urgent."""
    parameters: tuple[int, ...]
    """The parameters with items in this slice."""

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"slice {self.parcel.key} belongs to no parameter")


def cut(layouts: Sequence[BucketLayout], most_bytes: int) -> tuple[GradientSlice, ...]:
    """Cut every bucket into slices of at most `most_bytes`, rounded up to a cache line; in launch order."""
    return tuple(
        piece for number, layout in enumerate(layouts) for piece in _cut_bucket(number, layout, most_bytes)
    )


def _cut_bucket(number: int, layout: BucketLayout, most_bytes: int) -> Iterator[GradientSlice]:
    line = LINE_BYTES // layout.dtype.itemsize
    most = max(line, most_bytes // layout.dtype.itemsize // line * line)
    whole = layout.parcel(number)
    slots = [slot for slot in layout.slots if slot.count]
    ends = [*(slot.offset for slot in slots[1:]), layout.count][: len(slots)]
    together: list[LayoutSlot] = []
    begin = 0
    for slot, end in zip(slots, ends, strict=True):
        if together and end - begin > most:
            yield _slice(whole, begin, slot.offset, together)
            together, begin = [], slot.offset
        together.append(slot)
        while end - begin > most:
            yield _slice(whole, begin, begin + most, together)
            begin += most
    if layout.count > begin:
        yield _slice(whole, begin, layout.count, together)


def _slice(whole: Parcel, begin: int, end: int, slots: Sequence[LayoutSlot]) -> GradientSlice:
    numbers = tuple(slot.parameter for slot in slots)
    return GradientSlice(parcel=replace(whole.part(begin, end), priority=min(numbers)), parameters=numbers)
