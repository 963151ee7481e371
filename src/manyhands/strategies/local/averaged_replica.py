"""What the workers of local SGD average: parameters and optimizer state, in one bucket per type.

Only parameters that some worker's backward has reached since the last average take part: any other is equal on all
workers, and an average would change its last bits. State without dimensions, such as Adam's count of steps, is
averaged in double precision and sent unencoded, so that equal counts stay exact.

If a codec rounds, or one that rounds may be chosen, each worker sends its change since the last average: a change is
small, and so is what is lost of it, while parameters themselves would never leave the codec's coarse grid. A codec
that sends parts of a change and keeps the rest as a residual encodes parameters only. The optimizer's state is then
sent unencoded, because a second moment with a residual could become negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UserError
from manyhands.strategies.common.collectives.collective import (
    Collective,
    broadcast,
    kept_by_codecs,
    room_for_buffers,
    total,
)
from manyhands.strategies.common.sharding.optimizers import kept_by
from manyhands.strategies.local.outer import Mean, OuterStep
from manyhands.wire.flat_layout import BucketLayout, bucket_of, trainable
from manyhands.wire.names import rounds_hops
from manyhands.wire.parcels import Parcel
from manyhands.wire.tap import GradientTap

__all__ = ["Replica"]

_SMALLEST_STATUS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One tensor: a parameter, or, if `state` is set, a tensor that the optimizer keeps for it."""

    number: int
    """The parameter's number among the trainable ones."""
    state: str | None
    shape: torch.Size
    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether it is sent unencoded, in double precision."""
        return self.state is not None and not self.shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where one tensor lies in a bucket, flat; and its value at the last average, if changes are sent."""

    held: _Held
    room: Tensor
    before: Tensor | None


class Replica:
    """One worker's replica, from construction (collective) to `close`; the hooks of its gradients."""

    weight = 1.0
    """Of no effect: each worker steps with the mean over its own part."""

    def __init__(
        self, collective: Collective, model: nn.Module, optimizer: Optimizer, outer: OuterStep | None = None
    ) -> None:
        self._collective, self._outer = collective, outer or Mean()
        self._model, self._optimizer = model, optimizer
        self.parameters = list(trainable(model))
        self._reached = [False] * len(self.parameters)
        held = self._held()
        layouts = _lay_out(held, state_as_is=not rounds_hops(collective.codec))
        parcels = [layout.parcel(number, exact=exact) for number, (layout, exact) in enumerate(layouts)]
        count = max(_SMALLEST_STATUS, 2 * len(self.parameters))
        status = Parcel.whole(len(parcels), count, torch.float64, exact=True)
        rooms = collective.allocate([*parcels, status, *room_for_buffers(model, status, collective.world)])
        self._buckets, self._status = rooms[: len(parcels)], rooms[len(parcels)]
        self._totals, self._totals_index = rooms[-1], len(rooms) - 1  # for what is too long for the status
        self._before = {
            parcel.number: torch.zeros(parcel.count, dtype=parcel.dtype)
            for parcel in parcels
            if collective.rounds(parcel)
        }
        self._places = [
            place
            for number, (layout, _) in enumerate(layouts)
            for place in _places(held, layout, self._buckets[number], self._before.get(number))
        ]
        self.on_next_gradient: Callable[[], None] | None = None
        """Called once, at the next gradient."""
        self._tap = GradientTap(self.parameters, self._note)

    def broadcast(self) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers()]
        broadcast(self._collective, len(self._buckets), self._status, tensors)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step since the last average: save the common values, if changes are sent."""
        self._outer.begin(self.parameters)
        for place in self._places:
            tensor = self._tensor(place.held)
            if place.before is not None and tensor is not None:
                place.before.copy_(tensor.reshape(-1))

    @torch.no_grad()
    def average(self, weight: float, *, plainly: bool = False) -> None:
        """Collective: sum `weight` times each worker's replica, and give that mean to the outer step.

        With `plainly`, every replica becomes the mean, whatever the outer step.
        """
        take = self._outer.plainly if plainly else self._outer.take
        has_state = [bool(self._optimizer.state.get(parameter)) for parameter in self.parameters]
        # Which parameters any worker has reached, and which have state on any worker.
        flags = self.total(torch.tensor([*self._reached, *has_state], dtype=torch.float64)).bool().tolist()
        reached, kept = flags[: len(has_state)], flags[len(has_state) :]
        for place in self._places:
            tensor = self._tensor(place.held)
            if tensor is None:
                place.room.zero_()  # this worker has no such state yet
                continue
            place.room.copy_(tensor.reshape(-1))
            if place.before is not None:
                place.room.sub_(place.before)
            place.room.mul_(weight)
        for number in range(len(self._buckets)):
            self._collective.launch(number)
        self._collective.finish()
        for number, before in self._before.items():
            self._buckets[number].add_(before)
        for place in self._places:
            held, mean = place.held, place.room.view(place.held.shape)
            parameter, tensor = self.parameters[held.number], self._tensor(held)
            if not reached[held.number]:
                continue
            if held.state is None:
                take(held.number, parameter, mean)
            elif kept[held.number] and tensor is not None:
                tensor.copy_(mean)
            elif kept[held.number]:  # this worker has no such state yet
                device = parameter.device if held.shape else torch.device("cpu")
                self._optimizer.state[parameter][held.state] = mean.to(device, held.dtype, copy=True)
        self._reached = [False] * len(self.parameters)

    def total(self, values: Tensor) -> Tensor:
        if len(values) > len(self._status):
            return total(self._collective, self._totals_index, self._totals, values)
        return total(self._collective, len(self._buckets), self._status, values)

    def begin_step(self, step: int) -> None:
        """Nothing is sent before an average."""

    def holding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def residuals(self) -> Mapping[str, Any]:
        return kept_by_codecs(self._collective, len(self._buckets), self._status)

    def close(self) -> None:
        self._tap.close()

    def _held(self) -> list[_Held]:
        """Return everything that is averaged; UserError for state that cannot be."""
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        held = [
            _Held(number=number, state=None, shape=parameter.shape, dtype=parameter.dtype)
            for number, parameter in enumerate(self.parameters)
        ]
        kept = {} if self._outer.keeps_apart else kept_by(self._optimizer)
        for parameter, states in kept.items():
            held += [
                _Held(number=numbers[parameter], state=one.name, shape=one.shape, dtype=one.dtype)
                for one in states
                if one.dtype is not None and parameter in numbers
            ]
        for one in held:
            if not one.dtype.is_floating_point:
                kind = type(self._optimizer).__name__
                raise UserError(
                    f"local averages what the optimizer keeps, but {kind} keeps {one.state!r} as {one.dtype}; use an "
                    "optimizer with floating-point state, or strategy=mirrored"
                )
        return held

    def _note(self, number: int, _parameter: Tensor) -> None:
        self._reached[number] = True
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()

    def _tensor(self, held: _Held) -> Tensor | None:
        parameter = self.parameters[held.number]
        if held.state is None:
            return parameter
        value = self._optimizer.state.get(parameter, {}).get(held.state)
        return value if isinstance(value, Tensor) else None


def _lay_out(held: Sequence[_Held], *, state_as_is: bool) -> list[tuple[BucketLayout, bool]]:
    """Return a bucket for each type, and whether it is sent unencoded; slots are indices into `held`."""
    kinds: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
    for index, one in enumerate(held):
        as_is = one.exact or (state_as_is and one.state is not None)
        kind = (torch.float64 if one.exact else one.dtype, as_is)
        kinds.setdefault(kind, []).append((index, one.shape.numel()))
    return [(bucket_of(dtype, tensors), exact) for (dtype, exact), tensors in kinds.items()]


def _places(
    held: Sequence[_Held], layout: BucketLayout, bucket: Tensor, before: Tensor | None
) -> Iterator[_Place]:
    kept = dict(layout.views(before)) if before is not None else {}
    for index, room in layout.views(bucket):
        yield _Place(held=held[index], room=room, before=kept.get(index))
