"""What the workers of local SGD average: parameters and the optimizer's state, in one bucket for each type.

Only parameters that some worker's backward has reached since the last average take part: any other is the same on all,
and an average would change its last bits. State of no dimension, such as Adam's count of steps, is averaged in double
precision and travels as it is, so that equal counts stay what they are.

Where a codec rounds what travels, that is how far each worker has come since the last average: a change is small, and
so is what is lost of it, while parameters themselves would never leave the codec's coarse grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.allreduce.collective import Collective, broadcast, total
from manyhands.errors import UserError
from manyhands.sharding.kept import kept_by
from manyhands.wire.parcels import Parcel

__all__ = ["Replica"]

_SMALLEST_STATUS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one tensor lies: a parameter, or, with a name, a state that the optimizer keeps for it."""

    number: int
    """Of the parameter, among the trainable ones."""

    state: str | None
    bucket: int
    span: slice
    shape: torch.Size
    dtype: torch.dtype


class Replica:
    """One worker's, from construction (collective) to `close`; `on_gradient` is called at every gradient."""

    def __init__(self, collective: Collective, model: nn.Module, optimizer: Optimizer) -> None:
        self._collective = collective
        self._model = model
        self._optimizer = optimizer
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._reached = [False] * len(self._parameters)
        self._kinds: list[tuple[torch.dtype, bool]] = []  # by bucket: its type, and whether it is exact
        self._places = self._lay_out()
        ends = [0] * len(self._kinds)
        for place in self._places:
            ends[place.bucket] = max(ends[place.bucket], place.span.stop)
        parcels = [
            Parcel.whole(number, end, dtype, exact=exact)
            for number, (end, (dtype, exact)) in enumerate(zip(ends, self._kinds, strict=True))
        ]
        count = max(_SMALLEST_STATUS, 2 * len(self._parameters))
        status = Parcel.whole(len(parcels), count, torch.float64, exact=True)
        *self._buckets, self._status = collective.allocate([*parcels, status])
        self._before = {
            parcel.number: torch.zeros(parcel.count, dtype=parcel.dtype)
            for parcel in parcels
            if collective.rounds(parcel)
        }
        """By bucket of which changes travel: what all had at the last average."""
        self.on_gradient: Callable[[], None] = lambda: None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    def broadcast(self) -> None:
        """Collective: worker 0's parameters and buffers to all."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        broadcast(self._collective, len(self._buckets), self._status, tensors)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step since the last average: keep what all have, where changes travel."""
        for place in self._places:
            before, tensor = self._before.get(place.bucket), self._tensor(place)
            if before is not None and tensor is not None:
                before[place.span].copy_(tensor.reshape(-1))

    @torch.no_grad()
    def average(self, weight: float) -> None:
        """Collective: the sum of `weight` times each worker's replica becomes everyone's."""
        reached, kept = self._agree_on_parts()
        for place in self._places:
            room = self._buckets[place.bucket][place.span]
            tensor = self._tensor(place)
            if tensor is None:
                room.zero_()  # this worker has no such state yet
            else:
                room.copy_(tensor.reshape(-1))
                if place.bucket in self._before:
                    room.sub_(self._before[place.bucket][place.span])
                room.mul_(weight)
        for number in range(len(self._buckets)):
            self._collective.launch(number)
        self._collective.finish()
        for number, before in self._before.items():
            self._buckets[number].add_(before)
        for place in self._places:
            if place.state is None and reached[place.number]:
                self._parameters[place.number].copy_(self._mean(place))
            elif place.state is not None and reached[place.number] and kept[place.number]:
                self._keep(place)
        self._reached = [False] * len(self._parameters)

    def total(self, values: Tensor) -> Tensor:
        """Collective: the sum over workers of a float64 vector."""
        return total(self._collective, len(self._buckets), self._status, values)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _lay_out(self) -> list[_Place]:
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        kept = kept_by(self._optimizer)
        tensors: list[tuple[int, str | None, torch.Size, torch.dtype]] = [
            (number, None, parameter.shape, parameter.dtype)
            for number, parameter in enumerate(self._parameters)
        ]
        for parameter, states in kept.items():
            tensors += [
                (numbers[parameter], one.name, one.shape, one.dtype)
                for one in states
                if one.dtype is not None and parameter in numbers
            ]
        ends: dict[tuple[torch.dtype, bool], int] = {}
        places = []
        for number, state, shape, dtype in tensors:
            if not dtype.is_floating_point:
                raise UserError(
                    f"local averages what the optimizer keeps, but {type(self._optimizer).__name__} keeps {state!r} as "
                    f"{dtype}; use an optimizer with floating-point state, or strategy=mirrored"
                )
            exact = state is not None and not shape
            kind = (torch.float64 if exact else dtype, exact)
            begin = ends.get(kind, 0)
            ends[kind] = begin + shape.numel()
            if kind not in self._kinds:
                self._kinds.append(kind)
            places.append(
                _Place(
                    number=number,
                    state=state,
                    bucket=self._kinds.index(kind),
                    span=slice(begin, ends[kind]),
                    shape=shape,
                    dtype=dtype,
                )
            )
        return places

    def _make_hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            self._reached[number] = True
            self.on_gradient()

        return hook

    def _agree_on_parts(self) -> tuple[list[bool], list[bool]]:
        """Collective: which parameters any worker has reached, and which have state on any worker."""
        kept = [bool(self._optimizer.state.get(parameter)) for parameter in self._parameters]
        said = self.total(torch.tensor([*self._reached, *kept], dtype=torch.float64)).bool().tolist()
        return said[: len(kept)], said[len(kept) :]

    def _tensor(self, place: _Place) -> Tensor | None:
        parameter = self._parameters[place.number]
        if place.state is None:
            return parameter
        value = self._optimizer.state.get(parameter, {}).get(place.state)
        return value if isinstance(value, Tensor) else None

    def _mean(self, place: _Place) -> Tensor:
        return self._buckets[place.bucket][place.span].view(place.shape)

    def _keep(self, place: _Place) -> None:
        """Take the mean of a state; who has none yet, because its parts were empty, begins with it."""
        tensor = self._tensor(place)
        if tensor is not None:
            tensor.copy_(self._mean(place))
            return
        parameter = self._parameters[place.number]
        assert place.state is not None, "parameters are always there"
        device = parameter.device if place.shape else torch.device("cpu")
        self._optimizer.state[parameter][place.state] = self._mean(place).to(device, place.dtype, copy=True)
