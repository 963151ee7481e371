"""The one copy of a model and of its optimizer's state: shared memory that every worker computes on in place.

Parameters and buffers of each worker's model are views of it from the start. The state of a parameter is created by
the first step that reaches the parameter: one worker takes that step alone and publishes the state for the others. So
the state begins as the optimizer itself initializes it, and no worker waits afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UserError
from manyhands.native.counters import Counter
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.sharding.optimizers import KeptState, kept_by, stepping_for
from manyhands.strategies.hogwild.strategy import Hogwild

__all__ = ["SharedModel", "SharedStateSlot"]


@dataclass(slots=True, kw_only=True, eq=False)
class SharedStateSlot:
    """The state of one parameter in shared memory; empty until `ready` is set."""

    parameter: nn.Parameter
    views: dict[str, Tensor | None]
    ready: Counter
    adopted: bool = False
    """Whether this worker's optimizer uses the views."""


class SharedModel:
    """Moves `model` and the state of `optimizer` into shared memory; constructed on every worker (collective).

    Worker 0's values are used. `control_bytes` bytes, initially zero, precede them at the start of `segment`. `group`
    must not have shared anything yet.
    """

    def __init__(
        self, group: SharedGroup, model: nn.Module, optimizer: Optimizer, control_bytes: int
    ) -> None:
        stepping_for(optimizer, Hogwild().facts.stepping, Hogwild.word)
        tensors = _tensors(model)
        kept = kept_by(optimizer)
        _require_known(kept, model)
        end = round_up(control_bytes, CACHE_LINE)
        places = []
        for tensor in tensors:
            places.append(end)
            end = round_up(end + tensor.numel() * tensor.element_size(), CACHE_LINE)
        flags, end = end, end + Counter.NUM_BYTES * len(kept)
        num_bytes = end + sum(round_up(one.nbytes, CACHE_LINE) for row in kept.values() for one in row)
        self.segment = group.share(num_bytes, "the model and the optimizer's state")
        self._optimizer = optimizer
        self._move(group, tensors, places)
        self._slots = self._lay_out(kept, flags, end)
        if group.rank == 0:
            for slot in self._slots.values():
                if optimizer.state.get(slot.parameter, {}).keys() >= slot.views.keys():
                    self.publish(slot, optimizer.state[slot.parameter])
        group.barrier()

    def slot(self, parameter: nn.Parameter) -> SharedStateSlot:
        """Return the slot of `parameter`; KeyError if the optimizer does not have it."""
        return self._slots[parameter]

    def adopt(self, slot: SharedStateSlot) -> bool:
        """Use the shared state from now on, if it was published; return whether this worker does."""
        if not slot.adopted and (not slot.views or slot.ready.get()):
            if slot.views:
                self._optimizer.state[slot.parameter] = dict(slot.views)
            slot.adopted = True
        return slot.adopted

    def adopt_all(self) -> None:
        """Use all published state; the optimizer's `state_dict()` is then complete."""
        for slot in self._slots.values():
            self.adopt(slot)

    def publish(self, slot: SharedStateSlot, state: Mapping[str, Any]) -> None:
        """Publish the state of a parameter to all workers; called once, by one worker."""
        self._copy(slot, state)
        slot.ready.set(1)
        self.adopt(slot)

    def keep(self, slot: SharedStateSlot) -> None:
        """After a step: copy state that the optimizer replaced instead of updating in place to shared memory."""
        state = self._optimizer.state.get(slot.parameter, {})
        if all(state.get(name) is view for name, view in slot.views.items()) and len(state) == len(
            slot.views
        ):
            return
        self._copy(slot, state)
        self._optimizer.state[slot.parameter] = dict(slot.views)

    def close(self) -> None:
        """Close the descriptor; the model keeps the memory while it lives."""
        self._slots = {}
        self.segment.close()

    def _copy(self, slot: SharedStateSlot, state: Mapping[str, Any]) -> None:
        other = state.keys() ^ slot.views.keys()
        if other:
            raise UserError(
                f"optimizer {type(self._optimizer).__name__} keeps a state {min(other)!r} after some steps and not "
                "after others, so it has no place in the workers' memory; make all state in the first step"
            )
        for name, view in slot.views.items():
            if view is not None:
                view.copy_(state[name].reshape(view.shape))

    def _move(self, group: SharedGroup, tensors: Sequence[Tensor], places: Sequence[int]) -> None:
        views = [
            self.segment.tensor(place, tensor.numel(), tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        if group.rank == 0:
            for view, tensor in zip(views, tensors, strict=True):
                view.copy_(tensor.detach())
        group.barrier()
        for view, tensor in zip(views, tensors, strict=True):
            tensor.data = view

    def _lay_out(
        self, kept: Mapping[nn.Parameter, Sequence[KeptState]], flags: int, begin: int
    ) -> dict[nn.Parameter, SharedStateSlot]:
        slots = {}
        for number, (parameter, row) in enumerate(kept.items()):
            views: dict[str, Tensor | None] = {}
            for one in row:
                if one.dtype is None:
                    views[one.name] = None
                    continue
                views[one.name] = self.segment.tensor(begin, one.shape.numel(), one.dtype).view(one.shape)
                begin += round_up(one.nbytes, CACHE_LINE)
            ready = Counter.within(self.segment, flags + number * Counter.NUM_BYTES)
            slots[parameter] = SharedStateSlot(parameter=parameter, views=views, ready=ready)
        return slots


def _require_known(parameters: Iterable[nn.Parameter], model: nn.Module) -> None:
    known = set(model.parameters())
    for parameter in parameters:
        if parameter not in known:
            raise UserError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of the model's, so "
                "each worker would have one of its own; make it a parameter of the model"
            )


def _tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers to share; a UserError names parameters that one copy cannot represent."""
    named = list(model.named_parameters())
    extents = []
    for name, parameter in named:
        if parameter.device.type != "cpu":
            raise UserError(f"parameter {name!r} is on {parameter.device}; hogwild trains on the cpu")
        if parameter.numel():
            extents.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name))
    for (_, end, one), (begin, _, other) in pairwise(sorted(extents)):
        if begin < end:
            raise UserError(
                f"parameters {one!r} and {other!r} are different parameters in the same memory, which would come "
                "apart; tie them by assigning one Parameter to both"
            )
    buffers = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]
    return [*(parameter for _, parameter in named), *buffers]
