"""A shard's rows of a row-sparse table: values and lazy optimizers that touch nothing but the rows of a gradient.

Torch's dense optimizers walk over all of a table; these walk over the rows that came. Their settings are those of the
user's torch optimizer, their state has its names and shapes, and where every row comes in every step they are that
optimizer. Rows that do not come:

* **SGD, Adagrad, FTRL**: nothing would happen to them (without weight decay), so lazy is equal to dense, always.
* **ProximalSGD**: its l1 moves a row towards 0 when it comes.
* **SGD with momentum**: the buffer of a row does not decay, and does not move it, while the row stays away.
* **Adam, AdamW**: the moments of a row do not decay while it stays away; the bias correction uses the number of steps
  of the whole table, as torch's SparseAdam does, not that of the row.
* **Weight decay**, of either kind, reaches a row when it comes.

A row that is named twice in a gradient has the sum of both.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from manyhands.errors import UserError
from manyhands.optim import FTRL, ProximalSGD
from manyhands.strategies.common.tables import row_kernels as kernels

_NO_OWNERS = np.empty(0, dtype=np.int16)


class Placement:
    """Which of `shards` shards has which of the rows 0 to `num_rows` - 1; `place` makes one and keeps it.

    Rendezvous hashing (Thaler & Ravishankar 1998): every shard draws a number for every row, and the highest has it. So
    rows that are asked for often, which tend to be neighbours (the frequent words of a vocabulary), lie on different
    servers; shares are as even as chance makes them; and with one shard more, only those rows move that it takes.
    """

    def __init__(self, num_rows: int, shards: int) -> None:
        self.num_rows, self.shards = num_rows, shards
        self._owners: Tensor | None = None  # one shard needs no table
        self._local: Tensor | None = None
        if shards == 1:
            self._rows = [torch.arange(num_rows)]  # by shard
            return
        numbers = np.arange(num_rows, dtype=np.uint64)
        owners = np.zeros(num_rows, dtype=np.int16)
        best = np.zeros(num_rows, dtype=np.uint64)
        for shard in range(shards):
            drawn = mixed(numbers ^ mixed(np.full(1, shard + 1, dtype=np.uint64)))
            higher = drawn > best
            owners[higher], best[higher] = shard, drawn[higher]
        self._rows = [torch.from_numpy(np.flatnonzero(owners == shard)) for shard in range(shards)]
        self._owners = torch.from_numpy(owners)
        self._local = torch.empty(num_rows, dtype=torch.int64)
        for rows in self._rows:
            self._local[rows] = torch.arange(len(rows))

    def rows(self, shard: int) -> Tensor:
        return self._rows[shard]

    def count(self, shard: int) -> int:
        return len(self._rows[shard])

    def local(self, rows: Tensor) -> Tensor:
        """For each row, which of its shard's it is; IndexError for one that the table does not have."""
        return rows if self._local is None else torch.index_select(self._local, 0, rows)

    def split(self, rows: Tensor) -> list[Tensor]:
        if self._owners is None:
            return [rows]
        owners = torch.index_select(self._owners, 0, rows)
        return [rows[owners == shard] for shard in range(self.shards)]

    def foreign_row(self, rows: Tensor, shard: int) -> int | None:
        owners = self._owners.numpy() if self._owners is not None else _NO_OWNERS
        index = kernels.first_foreign_row(rows.numpy(), owners, shard, self.num_rows)
        return None if index < 0 else int(rows[index])


@lru_cache(maxsize=64)
def place(num_rows: int, shards: int) -> Placement:
    return Placement(num_rows, shards)


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al. 2014): every bit of the result depends on every bit of the number."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowGradient:
    """The gradient of some rows of a table: `values[i]` belongs to row `rows[i]` of the whole table (int64)."""

    rows: Tensor
    values: Tensor
    is_vetted: bool = False  # whether rows are known to ascend and to be of the receiving shard: unchecked

    @staticmethod
    def total(terms: Sequence[tuple[RowGradient, float]]) -> RowGradient:
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
        self.name, self.values = name, values
        self.state: State = {}  # by torch's names; what belongs to single items has the shape of `values`
        self._placement, self._shard = placement, shard
        self._rule = _RULES[kind]
        self.slack: float | None = None
        """With `filter=kkt`: zeros that are this share of l1 away from leaving 0 are kept as -0, which says so."""

    @property
    def nbytes(self) -> int:
        kept = (value for value in self.state.values() if isinstance(value, Tensor))
        return self.values.nbytes + sum(value.nbytes for value in kept)

    def copy_rows(self, rows: Tensor, address: int) -> None:
        """Copy the values of these rows of the whole table, which are known to be this shard's, to an address."""
        local = self._placement.local(rows)
        row_bytes = self.values.shape[1] * self.values.itemsize
        kernels.take_rows(self.values.data_ptr(), local.data_ptr(), address, local.numel(), row_bytes)

    def gather(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The values of these rows of the whole table, in a new tensor or in `out`; IndexError names a wrong one."""
        self._require_inside(rows)
        return torch.index_select(self.values, 0, self._placement.local(rows), out=out)

    def apply(self, gradient: RowGradient, settings: Mapping[str, Any], rate: float = 1.0) -> None:
        """Take one step, with learning rate times `rate`; `settings` is the parameter group of the optimizer.

        A gradient without rows is a step too: it counts. One that does not fit is refused as by `require_fit`.
        """
        self.require_fit(gradient)
        rows = self._placement.local(gradient.rows).contiguous().numpy()
        gradients = gradient.values.contiguous().numpy()
        if not gradient.is_vetted:  # a row may be named twice
            numbers, local = np.empty_like(rows), np.empty_like(rows)
            count = kernels.number_rows(rows, numbers, local)
            if count < rows.size:
                gradients = kernels.sum_rows(gradients, numbers, count)
            rows = local[:count]
        self._rule(self.values, self.state, rows, gradients, {**settings, "lr": float(settings["lr"]) * rate})
        if self.slack is not None:  # FTRL keeps what pulls at a row; else it is the gradient
            forces = self.state["z"].numpy()[rows] if "z" in self.state else gradients
            kernels.mark_rows(self.values.numpy(), rows, forces, (1 - self.slack) * settings["l1"])

    def require_fit(self, gradient: RowGradient) -> None:
        """IndexError names a row that is not here, ValueError a gradient of another form than the table's."""
        shape = (gradient.rows.numel(), self.values.shape[1])
        if gradient.rows.dtype != torch.int64 or gradient.rows.dim() != 1:
            raise ValueError(f"rows of table {self.name!r} must be int64 in one dimension")
        if gradient.values.shape != shape or gradient.values.dtype != self.values.dtype:
            raise ValueError(
                f"the gradient of {shape[0]} rows of table {self.name!r} is {tuple(gradient.values.shape)} of "
                f"{gradient.values.dtype}; it must be {shape} of {self.values.dtype}"
            )
        if not gradient.is_vetted:
            self._require_inside(gradient.rows)

    def _require_inside(self, rows: Tensor) -> None:
        bad = self._placement.foreign_row(rows, self._shard)
        if bad is not None:
            raise IndexError(
                f"row {bad} of table {self.name!r} is missing; shard {self._shard} has {len(self.values)} of "
                f"{self._placement.num_rows} rows"
            )


def require_lazy(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has no lazy form for tables, with a UserError that says which have."""
    kind = type(optimizer)
    if kind not in _RULES:
        raise UserError(
            f"sparse tables are updated lazily, which optimizer {kind.__name__} may not support; allowed: "
            f"{', '.join(sorted(one.__name__ for one in _RULES))}; or leave sparse out"
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise UserError("sparse tables are updated lazily, which amsgrad does not support; use amsgrad=False")


def _sgd(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    momentum = settings["momentum"]
    is_first = bool(momentum) and "momentum_buffer" not in state
    if is_first:
        state["momentum_buffer"] = torch.zeros_like(values)
    speeds = state["momentum_buffer"].numpy() if momentum else np.empty((0, 0), dtype=values.numpy().dtype)
    fresh = 1.0 if is_first else 1.0 - settings["dampening"]  # as torch: the first gradient is not dampened
    numbers = _numbers(values, settings["lr"], settings["weight_decay"], momentum, fresh)
    nesterov, maximize = bool(settings["nesterov"]), bool(settings["maximize"])
    kernels.sgd_rows(values.numpy(), speeds, rows, gradients, numbers, nesterov, maximize)


def _adagrad(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    if not state:
        state["step"] = _zero()
        state["sum"] = torch.full_like(values, settings["initial_accumulator_value"])
    state["step"] += 1
    rate = settings["lr"] / (1 + (state["step"].item() - 1) * settings["lr_decay"])
    numbers = _numbers(values, rate, settings["weight_decay"], settings["eps"])
    kernels.adagrad_rows(
        values.numpy(), state["sum"].numpy(), rows, gradients, numbers, bool(settings["maximize"])
    )


def _adam(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    if not state:
        state["step"] = _zero()
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
    state["step"] += 1
    step = state["step"].item()
    beta1, beta2 = (float(beta) for beta in settings["betas"])
    decay, decoupled = settings["weight_decay"], settings.get("decoupled_weight_decay", False)
    rate, root = settings["lr"] / (1 - beta1**step), math.sqrt(1 - beta2**step)
    added, kept = (0.0, 1.0 - settings["lr"] * decay) if decoupled else (decay, 1.0)
    numbers = _numbers(values, rate, root, added, kept, beta1, beta2, settings["eps"])
    means, squares = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
    kernels.adam_rows(values.numpy(), means, squares, rows, gradients, numbers, bool(settings["maximize"]))


def _ftrl(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    if not state:
        state.update(FTRL.begin(values, settings))
    numbers = _numbers(values, *(settings[name] for name in ("lr", "alpha", "beta", "l1", "l2")))
    kernels.ftrl_rows(values.numpy(), state["z"].numpy(), state["n"].numpy(), rows, gradients, numbers)


def _proximal(values: Tensor, state: State, rows: Any, gradients: Any, settings: Mapping[str, Any]) -> None:
    del state
    kernels.proximal_rows(values.numpy(), rows, gradients, _numbers(values, settings["lr"], settings["l1"]))


Rule = Callable[[Tensor, State, Any, Any, Mapping[str, Any]], None]
_RULES: dict[type[Optimizer], Rule] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    Adam: _adam,
    AdamW: _adam,
    FTRL: _ftrl,
    ProximalSGD: _proximal,
}


def _zero() -> Tensor:
    is_double = torch.get_default_dtype() == torch.float64
    return torch.zeros((), dtype=torch.float64 if is_double else torch.float32)


def _numbers(values: Tensor, *numbers: float) -> Any:
    """Settings in the table's own type, so that compiled loops do not widen their items."""
    return np.array(numbers, dtype=values.numpy().dtype)


# Row sets by name: a set of rows that was sent once is afterwards 32 bytes.
#
# Workers read and push the same sets again and again: a read and its push, every epoch the same batches. The name is
# the SHA-256 of the rows' bytes, so that two sets never share one, and needs no agreement. Both sides forget:
#
#     worker                                       server
#     name(rows) -> Given(name, rows)  ─────────►  learn(given)                     first time
#     name(rows) -> Named(name)        ─────────►  find(named) -> rows              from then on
#                                      ◄─────────  find(named) -> Unknown(name)     it has forgotten
#     give(unknown, rows) -> Given     ─────────►  learn(given)
#
# Pure: no sockets and no clocks. Rows are int64 in one dimension; their order is part of the set.


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A set that the server was given before."""

    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """A set with its rows."""

    name: bytes
    rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """The server has forgotten this set, or never had it: send the rows."""

    name: bytes


def name_of(rows: Tensor) -> bytes:
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(
            f"a row set must be int64 in one dimension, not {rows.dtype} of shape {tuple(rows.shape)}"
        )
    return hashlib.sha256(rows.contiguous().numpy().data).digest()


class RowSetNames:
    """The worker's side, one for each server: which of the last `capacity` sets that server was given."""

    def __init__(self, capacity: int) -> None:
        self._capacity = _checked(capacity, "sets")
        self._given: OrderedDict[bytes, None] = OrderedDict()

    def name(self, rows: Tensor, name: bytes | None = None) -> Named | Given:
        name = name or name_of(rows)
        if name in self._given:
            self._given.move_to_end(name)
            return Named(name=name)
        return self._give(name, rows)

    def give(self, unknown: Unknown, rows: Tensor) -> Given:
        """What to send where the server does not know the set; ValueError if these are not its rows."""
        if name_of(rows) != unknown.name:
            raise ValueError(f"these rows are not the set {unknown.name.hex()}")
        return self._give(unknown.name, rows)

    def forget(self) -> None:
        self._given.clear()

    def _give(self, name: bytes, rows: Tensor) -> Given:
        self._given[name] = None
        self._given.move_to_end(name)
        if len(self._given) > self._capacity:
            self._given.popitem(last=False)
        return Given(name=name, rows=rows)


class RowSets:
    """The server's side: the sets that were used last, as many as `capacity_bytes` hold."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = _checked(capacity_bytes, "bytes")
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self.nbytes = 0  # the size of all sets; never more than the capacity

    def __len__(self) -> int:
        return len(self._rows)

    def learn(self, given: Given) -> Tensor:
        """Keep a copy of a set, forgetting the one that was not used for longest; a set larger than all is not kept.

        Returns the rows. ValueError if the name is not theirs: a lie here would send every later gradient astray.
        """
        if name_of(given.rows) != given.name:
            raise ValueError(f"a row set of {given.rows.numel()} rows arrived under the wrong name")
        if given.name in self._rows:
            self._rows.move_to_end(given.name)
        elif given.rows.nbytes <= self._capacity_bytes:
            self._rows[given.name] = given.rows.clone()
            self.nbytes += given.rows.nbytes
            while self.nbytes > self._capacity_bytes:
                _, forgotten = self._rows.popitem(last=False)
                self.nbytes -= forgotten.nbytes
        return given.rows

    def find(self, named: Named) -> Tensor | Unknown:
        rows = self._rows.get(named.name)
        if rows is None:
            return Unknown(name=named.name)
        self._rows.move_to_end(named.name)
        return rows


def _checked(capacity: int, unit: str) -> int:
    if capacity < 1:
        raise UserError(f"the capacity for row sets is {capacity} {unit}; it must be at least 1")
    return capacity
