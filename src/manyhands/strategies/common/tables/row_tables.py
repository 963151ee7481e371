"""A shard's rows of a row-sparse table: values and lazy optimizers that touch nothing but the rows of a gradient.

The table of an embedding has a gradient in the rows that a batch looked up and nowhere else. Torch's dense optimizers
walk over all of it; these walk over the rows that came. Their settings are those of the user's torch optimizer, their
state has its names and shapes, and where every row comes in every step they are that optimizer. Rows that do not come:

* **SGD, Adagrad, FTRL**: nothing would happen to them (without weight decay), so lazy is equal to dense, always.
* **SGD with momentum**: the buffer of a row does not decay, and does not move it, while the row stays away.
* **Adam, AdamW**: the moments of a row do not decay while it stays away; the bias correction uses the number of steps
  of the whole table, as torch's SparseAdam does, not that of the row.
* **Weight decay**, of either kind, reaches a row when it comes.

A row that is named twice in a gradient has the sum of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from manyhands.errors import UserError
from manyhands.optim import FTRL
from manyhands.strategies.common.tables.placement import Placement
from manyhands.strategies.common.tables.row_kernels import (
    adagrad_rows,
    adam_rows,
    ftrl_rows,
    number_rows,
    sgd_rows,
    sum_rows,
    take_rows,
)

__all__ = ["RowGradient", "RowTable", "require_lazy"]

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGradient:
    """The gradient of some rows of a table: `values[i]` belongs to row `rows[i]` of the whole table (int64)."""

    rows: Tensor
    values: Tensor
    is_vetted: bool = False
    """Whether the rows are known to ascend and to belong to the receiving shard, so that checks can be skipped."""

    @staticmethod
    def total(terms: Sequence[tuple[RowGradient, float]]) -> RowGradient:
        """The sum of gradients times factors, with rows that may be named twice."""
        if len(terms) == 1 and terms[0][1] == 1:
            return terms[0][0]
        return RowGradient(
            rows=torch.cat([one.rows for one, _ in terms]),
            values=torch.cat([one.values * factor for one, factor in terms]),
        )


class RowTable:
    """The rows of table `name` that `shard` has, with the optimizer's state for them.

    `values` has these rows in their order, contiguous, and is updated in place. `kind` is that of the optimizer.
    """

    def __init__(
        self, name: str, values: Tensor, kind: type[Optimizer], placement: Placement, shard: int = 0
    ) -> None:
        self.name = name
        self.values = values
        self.state: State = {}
        """By torch's names; what belongs to single items has the shape of `values`."""
        self._placement, self._shard = placement, shard
        self._rule = _RULES[kind]

    @property
    def nbytes(self) -> int:
        """The memory of values and state."""
        kept = (value for value in self.state.values() if isinstance(value, Tensor))
        return self.values.nbytes + sum(value.nbytes for value in kept)

    def copy_rows(self, rows: Tensor, address: int) -> None:
        """Copy the values of these rows of the whole table, which are known to be this shard's, to an address."""
        local = self._placement.local(rows)
        row_bytes = self.values.shape[1] * self.values.itemsize
        take_rows(self.values.data_ptr(), local.data_ptr(), address, local.numel(), row_bytes)

    def gather(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The values of these rows of the whole table, in a new tensor or in `out`; IndexError names a wrong one."""
        self._require_inside(rows)
        return torch.index_select(self.values, 0, self._placement.local(rows), out=out)

    def apply(self, gradient: RowGradient, settings: Mapping[str, Any], rate: float = 1.0) -> None:
        """Take one step, with learning rate times `rate`; `settings` is the parameter group of the optimizer.

        A gradient without rows is a step too: it counts. One that does not fit is refused as by `require_fit`.
        """
        rows, gradients = self._summed(gradient)
        self._rule(self.values, self.state, rows, gradients, {**settings, "lr": float(settings["lr"]) * rate})

    def require_fit(self, gradient: RowGradient) -> None:
        """IndexError names a row that is not here, ValueError a gradient of another form than the table's."""
        shape = (gradient.rows.numel(), self.values.shape[1])
        if gradient.rows.dtype != torch.int64 or gradient.rows.dim() != 1:
            raise ValueError(f"rows of table {self.name!r} come as one dimension of int64")
        if gradient.values.shape != shape or gradient.values.dtype != self.values.dtype:
            raise ValueError(
                f"the gradient of {shape[0]} rows of table {self.name!r} is {tuple(gradient.values.shape)} of "
                f"{gradient.values.dtype}; it must be {shape} of {self.values.dtype}"
            )
        if not gradient.is_vetted:
            self._require_inside(gradient.rows)

    def _summed(self, gradient: RowGradient) -> tuple[Any, Any]:
        """Rows of this part, each named once, and their gradients."""
        self.require_fit(gradient)
        rows = self._placement.local(gradient.rows).contiguous().numpy()
        values = gradient.values.contiguous().numpy()
        if gradient.is_vetted:
            return rows, values
        numbers, local = np.empty_like(rows), np.empty_like(rows)
        count = number_rows(rows, numbers, local)
        if count < rows.size:
            values = sum_rows(values, numbers, count)
        return local[:count], values

    def _require_inside(self, rows: Tensor) -> None:
        bad = self._placement.foreign_row(rows, self._shard)
        if bad is not None:
            raise IndexError(
                f"row {bad} of table {self.name!r} is not here; shard {self._shard} has {len(self.values)} of "
                f"{self._placement.num_rows} rows"
            )


def require_lazy(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has no lazy form for tables, with a UserError that says which have."""
    kind = type(optimizer)
    if kind not in _RULES:
        raise UserError(
            f"sparse tables are updated lazily, which optimizer {kind.__name__} is not known to allow; allowed: "
            f"{', '.join(sorted(one.__name__ for one in _RULES))}; or leave sparse out"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise UserError("sparse tables are updated lazily, which amsgrad does not allow; use amsgrad=False")


def _sgd(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    momentum = settings["momentum"]
    is_first = bool(momentum) and "momentum_buffer" not in state
    if is_first:
        state["momentum_buffer"] = torch.zeros_like(values)
    sgd_rows(
        values.numpy(),
        state["momentum_buffer"].numpy() if momentum else np.empty((0, 0), dtype=values.numpy().dtype),
        rows,
        gradients,
        _numbers(
            values,
            settings["lr"],
            settings["weight_decay"],
            momentum,
            1.0 if is_first else 1.0 - settings["dampening"],  # as torch: the first gradient is not dampened
        ),
        bool(settings["nesterov"]),
        bool(settings["maximize"]),
    )


def _adagrad(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    if not state:
        state["step"] = _zero()
        state["sum"] = torch.full_like(values, settings["initial_accumulator_value"])
    state["step"] += 1
    rate = settings["lr"] / (1 + (state["step"].item() - 1) * settings["lr_decay"])
    adagrad_rows(
        values.numpy(),
        state["sum"].numpy(),
        rows,
        gradients,
        _numbers(values, rate, settings["weight_decay"], settings["eps"]),
        bool(settings["maximize"]),
    )


def _adam(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    if not state:
        state["step"] = _zero()
        state["exp_avg"] = torch.zeros_like(values)
        state["exp_avg_sq"] = torch.zeros_like(values)
    state["step"] += 1
    step = state["step"].item()
    beta1, beta2 = (float(beta) for beta in settings["betas"])
    decay, decoupled = settings["weight_decay"], settings.get("decoupled_weight_decay", False)
    adam_rows(
        values.numpy(),
        state["exp_avg"].numpy(),
        state["exp_avg_sq"].numpy(),
        rows,
        gradients,
        _numbers(
            values,
            settings["lr"] / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
            0.0 if decoupled else decay,
            1.0 - settings["lr"] * decay if decoupled else 1.0,
            beta1,
            beta2,
            settings["eps"],
        ),
        bool(settings["maximize"]),
    )


def _ftrl(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    beta, l1, l2 = settings["beta"], settings["l1"], settings["l2"]
    if not state:
        state.update(FTRL.begin(values, settings))
    ftrl_rows(
        values.numpy(),
        state["z"].numpy(),
        state["n"].numpy(),
        rows,
        gradients,
        _numbers(values, settings["lr"], settings["alpha"], beta, l1, l2),
    )


Rule = Callable[[Tensor, State, Any, Any, Mapping[str, Any]], None]
_RULES: dict[type[Optimizer], Rule] = {SGD: _sgd, Adagrad: _adagrad, Adam: _adam, AdamW: _adam, FTRL: _ftrl}


def _zero() -> Tensor:
    """A count of steps, of the type that torch counts in."""
    is_double = torch.get_default_dtype() == torch.float64
    return torch.tensor(0.0, dtype=torch.float64 if is_double else torch.float32)


def _numbers(values: Tensor, *numbers: float) -> Any:
    """Settings in the table's own type, so that compiled loops do not widen their items."""
    return np.array(numbers, dtype=values.numpy().dtype)
