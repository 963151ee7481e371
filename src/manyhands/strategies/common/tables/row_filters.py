"""Which rows of a gradient a worker sends: the filters of the parameter-server papers (Li et al., OSDI and NIPS 2014).

**kkt**, under an L1 penalty. A weight of 0 stays 0 as long as nothing pulls at it harder than l1. The shard, which has
the sum over all workers, marks the rows that rest: all items are 0, and what pulls at them is at most (1 - slack)·l1.
The mark is the sign of the zero, so it is read, copied, saved and replayed with the value. Gradients of such rows stay
with the worker. What pulls at a weight is under FTRL the sum of its gradients, so what stays is kept and added to what
is sent next, and of n workers each keeps at most slack·l1/n: so no weight leaves 0 later than it would. Under
ProximalSGD it is the gradient of the step, and what stays is dropped, as the step would drop it.

**significant**: a row is sent if an item of it, with what was kept of it before, is larger than a fraction of the
largest item of all rows of this gradient. Otherwise it is kept.

Every row is sent regardless in about one of 16 batches, which follow from its number and the batch's: in the same ones
by all workers, so that a shard sees a row of a batch from all of them or from none (but for what is insignificant).

Pure: no sockets and no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import UserError
from manyhands.optim import FTRL, ProximalSGD
from manyhands.strategies.common.tables.filter_setting import RowFilters
from manyhands.strategies.common.tables.row_tables import mixed

_EVERY = 16
_ADDS_UP: dict[type[Optimizer], bool] = {FTRL: True, ProximalSGD: False}
"""The optimizers that have an l1, and whether a gradient may come later, in one sum with others."""


def rests(values: Tensor) -> Tensor:
    """By row: whether it is marked as one that stays 0, so that all of its items are -0."""
    return ((values == 0) & values.signbit()).all(dim=1)


def is_due(rows: Tensor, batch: int) -> Tensor:
    """By row: whether it is sent in this batch whatever the filters say."""
    drawn = mixed(rows.numpy().astype(np.uint64) ^ mixed(np.full(1, batch + 1, np.uint64)))
    return torch.from_numpy(drawn % np.uint64(_EVERY) == 0)


class HeldRows:
    """What one of so many workers has kept of the gradients of one table, with rows of `shape`.

    `position` is the table's number in the optimizer.
    """

    def __init__(
        self,
        filters: RowFilters,
        shape: tuple[int, int],
        dtype: torch.dtype,
        optimizer: Optimizer,
        position: int = 0,
        workers: int = 1,
    ) -> None:
        self._filters = filters
        self._adds_up = _ADDS_UP.get(type(optimizer), True)
        self._most = math.inf  # of a resting row
        if filters.kkt is not None and self._adds_up:
            self._most = filters.kkt * _groups(optimizer)[position]["l1"] / workers
        keeps = filters.significant is not None or self._adds_up
        self.kept = torch.zeros(shape, dtype=dtype) if keeps else None

    def choose(self, rows: Tensor, gradients: Tensor, values: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """By row, whether it is sent, and what is sent if it is; `values` are those that the gradients are of.

        Gradients that are not finite are all sent, for the shard to refuse, and nothing is kept of them.
        """
        sent = torch.ones(len(rows), dtype=torch.bool)
        if not len(rows) or not bool(torch.isfinite(gradients).all()):
            return sent, gradients
        total = gradients if self.kept is None else gradients + self.kept[rows]
        sizes = total.abs().amax(dim=1)
        resting = rests(values) & (sizes <= self._most) if self._filters.kkt is not None else ~sent
        if self._filters.significant is not None:
            sent = sizes > self._filters.significant * sizes.max()
        sent = (sent & ~resting) | is_due(rows, batch)
        if self.kept is not None:
            ends = sent if self._adds_up else sent | resting
            self.kept[rows] = torch.where(ends[:, None], 0, total)
        return sent, total


def require_filters(
    filters: RowFilters, optimizer: Optimizer, tables: Sequence[tuple[str, int | None]]
) -> None:
    """UserError unless the filters make sense for these tables, given by name and number in the optimizer."""
    if filters and not tables:
        raise UserError(
            f"filter={filters}: the task has no row-sparse table to filter; name one in mh.Task(sparse=…), or leave "
            "filter= out"
        )
    if filters.kkt is None:
        return
    groups = _groups(optimizer)
    for name, position in tables:
        if type(optimizer) not in _ADDS_UP or position is None or not groups[position]["l1"]:
            raise UserError(
                f"filter={filters}: kkt needs an L1 penalty, which {type(optimizer).__name__} does not put on table "
                f"{name!r}; use manyhands.optim.FTRL or ProximalSGD with l1= above 0, or leave kkt out"
            )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter, by its number."""
    return [group for group in optimizer.param_groups for _ in group["params"]]
