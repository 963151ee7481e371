"""The one copy of a model and of its optimizer's state: shared memory that every worker computes on in place.

Parameters and buffers of each worker's model are views of it from the start. The state of a parameter is created by
the first step that reaches the parameter: one worker takes that step alone and publishes the state for the others. So
the state begins as the optimizer itself initializes it, and no worker waits afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import UserError
from manyhands.native.counters import Counter
from manyhands.native.group.gate import Gate
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.sharding.layer_units import require_apart
from manyhands.strategies.common.sharding.optimizers import kept_by, stepping_for
from manyhands.strategies.common.tables.row_tables import RowGradient, RowTable
from manyhands.strategies.hogwild.strategy import Hogwild
from manyhands.strategies.ps.live.worker_tables import WorkerTables
from manyhands.strategies.ps.shard_layout import FlatLayout, Table
from manyhands.task import RowsOf


@dataclass(slots=True, kw_only=True, eq=False)
class SharedStateSlot:
    """The state of one parameter in shared memory; empty until `ready` is set."""

    parameter: nn.Parameter
    views: dict[str, Tensor | None]
    ready: Counter
    adopted: bool = False  # whether this worker's optimizer uses the views


class SharedModel:
    """Moves `model` and the state of `optimizer` into shared memory; constructed on every worker (collective).

    Worker 0's values are used. `control_bytes` bytes, initially zero, precede them at the start of `segment`. `group`
    must not have shared anything yet.
    """

    def __init__(
        self, group: SharedGroup, model: nn.Module, optimizer: Optimizer, control_bytes: int
    ) -> None:
        stepping_for(optimizer, Hogwild().facts.stepping, Hogwild.word)
        for name, parameter in model.named_parameters():
            if parameter.device.type != "cpu":
                raise UserError(f"parameter {name!r} is on {parameter.device}; hogwild supports only cpu")
        require_apart(model.named_parameters())
        buffers = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]
        tensors = [*model.parameters(), *buffers]
        kept = kept_by(optimizer)
        known = set(model.parameters())
        for parameter in kept:
            if parameter not in known:
                raise UserError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "model, so each worker would have its own copy; make it a parameter of the model"
                )
        end = round_up(control_bytes, CACHE_LINE)
        places = []
        for tensor in tensors:
            places.append(end)
            end = round_up(end + tensor.numel() * tensor.element_size(), CACHE_LINE)
        flags, end = end, end + Counter.NUM_BYTES * len(kept)
        num_bytes = end + sum(round_up(one.nbytes, CACHE_LINE) for row in kept.values() for one in row)
        self.segment = group.share(num_bytes, "the model and the optimizer's state")
        self._optimizer = optimizer
        copies = [
            self.segment.tensor(place, tensor.numel(), tensor.dtype).view(tensor.shape)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        if group.rank == 0:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor.detach())
        group.barrier()
        for copy, tensor in zip(copies, tensors, strict=True):
            tensor.data = copy
        self.slots: dict[nn.Parameter, SharedStateSlot] = {}
        for number, (parameter, row) in enumerate(kept.items()):
            views: dict[str, Tensor | None] = {}
            for one in row:
                views[one.name] = None
                if one.dtype is not None:
                    views[one.name] = self.segment.tensor(end, one.shape.numel(), one.dtype).view(one.shape)
                    end += round_up(one.nbytes, CACHE_LINE)
            ready = Counter.within(self.segment, flags + number * Counter.NUM_BYTES)
            self.slots[parameter] = SharedStateSlot(parameter=parameter, views=views, ready=ready)
        if group.rank == 0:
            for slot in self.slots.values():
                if optimizer.state.get(slot.parameter, {}).keys() >= slot.views.keys():
                    self.publish(slot, optimizer.state[slot.parameter])
        group.barrier()

    def adopt(self, slot: SharedStateSlot) -> bool:
        """Use the shared state from now on, if it was published; return whether this worker does."""
        if not slot.adopted and (not slot.views or slot.ready.get()):
            if slot.views:
                self._optimizer.state[slot.parameter] = dict(slot.views)
            slot.adopted = True
        return slot.adopted

    def publish(self, slot: SharedStateSlot, state: Mapping[str, Any]) -> None:
        """Publish the state of a parameter to all workers; called once, by one worker."""
        self._copy(slot, state)
        slot.ready.set(1)
        self.adopt(slot)

    def keep(self, slot: SharedStateSlot) -> None:
        """After a step: copy state that the optimizer replaced instead of updating in place to shared memory."""
        state = self._optimizer.state.get(slot.parameter, {})
        replaced = any(state.get(name) is not view for name, view in slot.views.items())
        if replaced or len(state) != len(slot.views):
            self._copy(slot, state)
            self._optimizer.state[slot.parameter] = dict(slot.views)

    def close(self) -> None:
        self.slots = {}
        self.segment.close()

    def _copy(self, slot: SharedStateSlot, state: Mapping[str, Any]) -> None:
        other = state.keys() ^ slot.views.keys()
        if other:
            raise UserError(
                f"optimizer {type(self._optimizer).__name__} has state {min(other)!r} after some steps and not "
                "after others, so it cannot be kept in shared memory; create all state in the first step"
            )
        for name, view in slot.views.items():
            if view is not None:
                view.copy_(state[name].reshape(view.shape))


# The user's optimizer on shared parameters and state: steps in place, without locks.
# Dense parameters are stepped by the optimizer itself. The tables of `Task.sparse` are stepped by its lazy form for
# rows (`strategies/common/tables/row_tables.py`), which touches only the rows that the batch names. If two workers
# rarely update the same row, they rarely conflict, and the theory of HOGWILD! (Niu et al., NeurIPS 2011) rests on that.
class SharedStepper:
    """One worker's steps on the shared memory, whose first `control_bytes` are the caller's; all construct it."""

    def __init__(
        self,
        group: SharedGroup,
        model: nn.Module,
        optimizer: Optimizer,
        sparse: Mapping[str, RowsOf],
        control_bytes: int,
    ) -> None:
        layout = FlatLayout.of(model, optimizer, 1, sparse) if sparse else None
        self.shared = SharedModel(group, model, optimizer, control_bytes + Gate.NUM_BYTES)
        self._first = Gate(self.shared.segment, control_bytes, group, "make the state of a parameter")
        self.take_waits = self._first.take_waits
        self._optimizer = optimizer
        every = (parameter for settings in optimizer.param_groups for parameter in settings["params"])
        self._parameters = [parameter for parameter in every if parameter.requires_grad]
        self._tables = WorkerTables(model, layout, sparse) if layout is not None else None
        named = dict(model.named_parameters())
        self._rows = {
            table.name: _Table(table, named[table.name], optimizer)
            for table in (layout.tables if layout is not None else ())
        }
        tables = [table.parameter for table in self._rows.values()]
        lookups = (one for one in model.modules() if isinstance(one, nn.Embedding))
        for module in lookups:  # gradients of the rows that were looked up, not of the whole table
            plain = module.max_norm is None and not module.scale_grad_by_freq
            if plain and any(module.weight is table for table in tables):
                module.sparse = True

    def read(self, batch: Any) -> None:
        if self._tables is not None:
            self._tables.begin()
            self._tables.choose(batch)

    def step(self) -> None:
        rows = {}
        if self._tables is not None:
            self._tables.collect(1.0)
            rows = self._tables.gradients(0)
        slots = [self.shared.slots[p] for p in self._parameters if p.grad is not None]
        slots += [self.shared.slots[self._rows[name].parameter] for name in rows]
        if all(self.shared.adopt(slot) for slot in slots):
            self._step(rows, slots)
        else:  # it reaches new parameters: one worker at a time, which publishes the missing state
            number = self._first.draw()
            self._first.enter(number)
            try:
                missing = [slot for slot in slots if not self.shared.adopt(slot)]
                self._step(rows, [slot for slot in slots if slot.adopted])
                made = {table.parameter: table.rows.state for table in self._rows.values()}
                for slot in missing:
                    state = made.get(slot.parameter) or self._optimizer.state[slot.parameter]
                    self.shared.publish(slot, state)
            finally:
                self._first.leave(number)
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any]:
        for slot in self.shared.slots.values():
            self.shared.adopt(slot)  # all that is published; the optimizer's `state_dict()` is then complete
        return self._optimizer.state_dict()

    def close(self) -> None:
        self._rows = {}
        self.shared.close()

    def _step(self, rows: Mapping[str, RowGradient], shared: list[SharedStateSlot]) -> None:
        for name, gradient in rows.items():
            table = self._rows[name]
            table.share(self.shared.slots[table.parameter])
            table.rows.apply(gradient, table.settings)
        self._optimizer.step()
        for slot in shared:
            self.shared.keep(slot)


class _Table:
    """A table's rows in the form of the lazy optimizers: two dimensions, and state of the same shape."""

    def __init__(self, table: Table, parameter: nn.Parameter, optimizer: Optimizer) -> None:
        self.parameter = parameter
        values = parameter.detach().view(len(parameter), -1)
        self.rows = RowTable(table.name, values, type(optimizer), table.placed(1))
        groups = optimizer.param_groups
        self.settings = next(one for one in groups if any(it is parameter for it in one["params"]))
        self._is_shared = False

    def share(self, slot: SharedStateSlot) -> None:
        if self._is_shared or not slot.adopted:
            return
        self.rows.state = {
            name: view.view(self.rows.values.shape) if view.shape == self.parameter.shape else view
            for name, view in slot.views.items()
            if isinstance(view, Tensor)
        }
        self._is_shared = True
