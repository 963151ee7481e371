"""The user's optimizer on shared parameters and state: steps in place, without locks.

Dense parameters are stepped by the optimizer itself. The tables of `Task.sparse` are stepped by its lazy form for
rows (`strategies/common/tables/row_tables.py`), which touches only the rows that the batch names. If two workers
rarely update the same row, they rarely conflict, and the theory of HOGWILD! (Niu et al., NeurIPS 2011) rests on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.native.group.gate import Gate
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategies.common.tables.row_tables import RowGradient, RowTable
from manyhands.strategies.hogwild.shared_model import SharedModel, SharedStateSlot
from manyhands.strategies.ps.live.worker_tables import WorkerTables
from manyhands.strategies.ps.shard_layout import FlatLayout, Table
from manyhands.task import RowsOf

__all__ = ["SharedStepper"]


class SharedStepper:
    """One worker's steps on the shared memory; constructed on every worker (collective).

    The first `control_bytes` of `home.segment` belong to the caller. `close` is idempotent.
    """

    def __init__(
        self,
        group: SharedGroup,
        model: nn.Module,
        optimizer: Optimizer,
        sparse: Mapping[str, RowsOf],
        control_bytes: int,
    ) -> None:
        layout = FlatLayout.of(model, optimizer, 1, sparse) if sparse else None
        self.home = SharedModel(group, model, optimizer, control_bytes + Gate.NUM_BYTES)
        self._first = Gate(self.home.segment, control_bytes, group, "make the state of a parameter")
        self._optimizer = optimizer
        self._parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._tables = WorkerTables(model, layout, sparse) if layout is not None else None
        named = dict(model.named_parameters())
        self._rows = {
            table.name: _Table(table, named[table.name], optimizer)
            for table in (layout.tables if layout is not None else ())
        }
        if self._rows:
            _look_up_by_row(model, [table.parameter for table in self._rows.values()])

    def read(self, batch: Any) -> None:
        """Before a batch is computed: find out which rows it reads."""
        if self._tables is not None:
            self._tables.begin()
            self._tables.choose(batch)

    def step(self) -> None:
        """After backward: take the step in place, and clear the gradients."""
        rows = self._row_gradients()
        slots = [self.home.slot(p) for p in self._parameters if p.grad is not None]
        slots += [self.home.slot(self._rows[name].parameter) for name in rows]
        if all(self.home.adopt(slot) for slot in slots):
            self._step(rows, slots)
        else:
            self._make_state(rows, slots)
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict()`, with the state of all workers; only while none steps."""
        self.home.adopt_all()
        return self._optimizer.state_dict()

    def take_waits(self) -> dict[int, int]:
        """Return nanoseconds waited for each worker since the last call; waits occur only while state is created."""
        return self._first.take_waits()

    def close(self) -> None:
        """Release the shared memory; the model keeps its mapping."""
        self._rows = {}
        self.home.close()

    def _row_gradients(self) -> dict[str, RowGradient]:
        if self._tables is None:
            return {}
        self._tables.collect(1.0)
        return self._tables.gradients(0)

    def _make_state(self, rows: Mapping[str, RowGradient], slots: list[SharedStateSlot]) -> None:
        """Take a step that reaches new parameters; one worker at a time, which publishes the missing state."""
        number = self._first.draw()
        self._first.enter(number)
        try:
            missing = [slot for slot in slots if not self.home.adopt(slot)]
            self._step(rows, [slot for slot in slots if slot.adopted])
            made = {table.parameter: table.rows.state for table in self._rows.values()}
            for slot in missing:
                state = made.get(slot.parameter) or self._optimizer.state[slot.parameter]
                self.home.publish(slot, state)
        finally:
            self._first.leave(number)

    def _step(self, rows: Mapping[str, RowGradient], shared: list[SharedStateSlot]) -> None:
        for name, gradient in rows.items():
            table = self._rows[name]
            table.share(self.home.slot(table.parameter))
            table.rows.apply(gradient, table.settings)
        self._optimizer.step()
        for slot in shared:
            self.home.keep(slot)


class _Table:
    """A table's rows in the form of the lazy optimizers: two dimensions, and state of the same shape."""

    def __init__(self, table: Table, parameter: nn.Parameter, optimizer: Optimizer) -> None:
        self.parameter = parameter
        values = parameter.detach().view(len(parameter), -1)
        self.rows = RowTable(table.name, values, type(optimizer), table.placed(1))
        self.settings = next(
            group for group in optimizer.param_groups if any(one is parameter for one in group["params"])
        )
        self._is_shared = False

    def share(self, slot: SharedStateSlot) -> None:
        """Use the shared state, once it is published."""
        if self._is_shared or not slot.adopted:
            return
        self.rows.state = {
            name: view.view(self.rows.values.shape) if view.shape == self.parameter.shape else view
            for name, view in slot.views.items()
            if isinstance(view, Tensor)
        }
        self._is_shared = True


def _look_up_by_row(model: nn.Module, tables: list[nn.Parameter]) -> None:
    """Make embeddings of these tables return gradients of the rows they looked up, not of the whole table."""
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
            continue
        if any(module.weight is table for table in tables):
            module.sparse = True
