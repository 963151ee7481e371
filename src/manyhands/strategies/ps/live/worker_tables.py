"""A worker's side of row-sparse tables: which rows a batch reads, their values and their gradients.

The model has every table in full, as the task built it. Only the rows that the batch names are updated before it
is computed, and only their gradients are sent, but for what filters keep here. A gradient of any other row is an
error: it would be lost, and it was computed from outdated values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import Built
from manyhands.errors import UserError
from manyhands.native.segment import round_up
from manyhands.strategies.common.tables.filter_setting import RowFilters
from manyhands.strategies.common.tables.row_filters import HeldRows
from manyhands.strategies.common.tables.row_kernels import ascend, put_rows
from manyhands.strategies.common.tables.row_tables import (
    Given,
    Named,
    RowGradient,
    RowSetNames,
    Unknown,
    name_of,
)
from manyhands.strategies.ps.live.row_payloads import (
    PartOfSet,
    Said,
    least_bytes,
    pack,
    take_rests,
    values_bytes,
)
from manyhands.strategies.ps.shard_layout import FlatLayout, Table
from manyhands.strategies.ps.strategy import Ps
from manyhands.task import RowsOf
from manyhands.transport.messages import ProtocolError
from manyhands.wire.flat_layout import LINE_BYTES

_SETS_PER_SERVER = 1 << 14
_HELD = "held/"  # before the name of a table, in what is saved
_NO_ROWS = torch.empty(0, dtype=torch.int64)
_NO_FILTERS = RowFilters()


class WorkerTables:
    """The tables of `model`; `rows_of` is the task's `sparse`, and `filters` need the optimizer and the workers.

    With `lists`, rows are listed every time, and not named where a server knows them.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: FlatLayout,
        rows_of: Mapping[str, RowsOf],
        *,
        filters: RowFilters = _NO_FILTERS,
        optimizer: Optimizer | None = None,
        workers: int = 1,
        lists: bool = False,
    ) -> None:
        self._filters, self._optimizer, self._workers, self._lists = filters, optimizer, workers, lists
        named = dict(model.named_parameters())
        self._layout = layout
        self._parameters = [named[table.name] for table in layout.tables]
        self.exist = bool(self._parameters)  # whether the task has any tables
        self._rows_of = [
            next(rows_of[name] for name in table.aliases if name in rows_of) for table in layout.tables
        ]
        self._names: defaultdict[int, RowSetNames] = defaultdict(partial(RowSetNames, _SETS_PER_SERVER))
        self._forgotten: set[bytes] = set()
        self._rows: list[list[Tensor]] = []  # by table and shard
        self._sorted: list[Tensor] = []  # by table, those of all shards
        self._sizes: dict[
            int, tuple[int, int]
        ] = {}  # by shard, least and most of what is read, once it is asked
        self._digests: dict[tuple[int, int], bytes] = {}  # by table and shard, their names, once asked
        self._whole = False
        self._gradients: list[list[Tensor] | None] = []  # the same; None for a table that was not reached
        self._sent: list[
            list[Tensor] | None
        ] = []  # the same: of the rows read, which have a gradient; None: all
        self.held = self.hold_anew()
        """What this worker keeps, by table; nothing without filters. A replay changes it with the worker."""

    def hold_anew(self) -> list[HeldRows]:
        if not self._filters:
            return []
        assert self._optimizer is not None, "filters need it"
        return [
            HeldRows(
                self._filters,
                (table.shape[0], table.width),
                table.dtype,
                self._optimizer,
                table.position,
                self._workers,
            )
            for table in self._layout.tables
        ]

    def memory(self) -> dict[str, Tensor]:
        """What is kept from one gradient to the next, for checkpoints."""
        pairs = zip(self._layout.tables, self.held, strict=False)
        return {_HELD + table.name: one.kept for table, one in pairs if one.kept is not None}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        for name, kept in self.memory().items():
            kept.copy_(memory[name])

    def begin(self) -> None:
        """Begin a new update: no batch is known yet, and one without samples reads nothing."""
        self._forgotten.clear()
        self._choose_none()
        self._rows = [[_NO_ROWS] * self._layout.shards for _ in self._parameters]
        self._sorted = [_NO_ROWS] * len(self._parameters)
        self._gradients = [None for _ in self._parameters]
        self._sent = [None for _ in self._parameters]

    def _choose_none(self) -> None:
        self._whole = False
        self._digests.clear()
        self._sizes.clear()

    def choose(self, batch: Any) -> list[int]:
        """Select the rows that this batch reads; returns the shards that have any."""
        self._choose_none()
        for number, (table, rows_of) in enumerate(zip(self._layout.tables, self._rows_of, strict=True)):
            rows = self._sorted[number] = _checked(table, rows_of(batch))
            self._rows[number] = table.placed(self._layout.shards).split(rows)
        return [
            shard
            for shard in range(self._layout.shards)
            if any(by_shard[shard].numel() for by_shard in self._rows)
        ]

    def choose_whole(self) -> Collection[int]:
        self._whole = True
        self._sizes.clear()
        return range(self._layout.shards)

    def chosen(self, shard: int) -> list[Tensor]:
        """The rows of a shard that the batch reads, by table."""
        return [by_shard[shard] for by_shard in self._rows]

    def request(self, member: int, shard: int) -> list[Any]:
        return [] if self._whole else pack([self._name(member, n, shard) for n in range(len(self._rows))])

    def require_size(self, shard: int, num_bytes: int) -> None:
        """Reject an answer of another length than requested, before it is read."""
        expected = self._sizes.get(shard)
        if expected is None:
            tables, shards = self._layout.tables, self._layout.shards
            counts = (
                [table.placed(shards).count(shard) for table in tables]
                if self._whole
                else [by_shard[shard].numel() for by_shard in self._rows]
            )
            most = values_bytes(tables, counts)
            expected = (most, most)
            if self._filters.kkt is not None:
                expected = least_bytes(counts), least_bytes(counts) + most
            self._sizes[shard] = expected
        least, most = expected
        if not least <= num_bytes <= most:
            allowed = f"{most}" if least == most else f"{least} to {most}"
            raise ProtocolError(
                "payload_bytes", f"the rows of shard {shard} must have {allowed} bytes, not {num_bytes}"
            )

    def take(self, shard: int, payload: memoryview) -> None:
        """Copy the received values of rows into the model."""
        self.require_size(shard, len(payload))
        if self._filters.kkt is None:
            self.put(shard, payload)
            return
        shards, parts = self._layout.shards, list[Tensor]()
        for number, table in enumerate(self._layout.tables):
            where = table.placed(shards).rows(shard) if self._whole else self._rows[number][shard]
            values, payload = take_rests(table, where.numel(), payload)
            parts.append(values)
        if payload:
            raise ProtocolError("rows", f"{len(payload)} bytes follow the last table")
        self.put(shard, memoryview(b"".join(map(bytes, pack((), parts)))))

    def put(self, shard: int, payload: memoryview) -> None:
        """Copy the values of the rows that were chosen into the model, of all of them."""
        begin, shards = 0, self._layout.shards
        for number, (table, parameter) in enumerate(zip(self._layout.tables, self._parameters, strict=True)):
            where = table.placed(shards).rows(shard) if self._whole else self._rows[number][shard]
            end = begin + where.numel() * table.width * table.dtype.itemsize
            _put(table, parameter.detach(), where, payload[begin:end])
            begin = round_up(end, LINE_BYTES)

    def collect(self, share: float, batch: int = 0) -> None:
        """After backward: take `share` times the gradients of the rows that were read, but for what is kept here."""
        for number, (table, parameter) in enumerate(zip(self._layout.tables, self._parameters, strict=True)):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            rows = self._sorted[number]
            values = _rows_of_gradient(table, gradient.detach(), rows)
            if share != 1:
                values *= share
            flat, by_shard = values.view(-1, table.width).cpu(), self._rows[number]
            if not self.held:
                self._gradients[number] = _split(flat, rows, by_shard)
                continue
            read = parameter.detach().index_select(0, rows.to(parameter.device)).view(-1, table.width).cpu()
            sent, flat = self.held[number].choose(rows, flat, read, batch)
            parts, marks = _split(flat, rows, by_shard), _split(sent, rows, by_shard)
            self._sent[number] = marks
            self._gradients[number] = [part[which] for part, which in zip(parts, marks, strict=True)]

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(part).all()) for parts in self._gradients for part in parts or ())

    def gradients(self, shard: int) -> dict[str, RowGradient]:
        """A shard's part of the gradients, by table, without tables that backward did not reach."""
        return {
            table.name: RowGradient(rows=self._pushed(number, shard), values=parts[shard])
            for number, (table, parts) in enumerate(zip(self._layout.tables, self._gradients, strict=True))
            if parts is not None
        }

    def _pushed(self, number: int, shard: int) -> Tensor:
        """The rows of a shard that have a gradient."""
        rows, sent = self._rows[number][shard], self._sent[number]
        return rows if sent is None else rows[sent[shard]]

    def push(self, member: int, shard: int) -> list[Any]:
        said = [
            None if parts is None else self._named_part(member, number, shard)
            for number, parts in enumerate(self._gradients)
        ]
        return pack(said, [parts[shard] for parts in self._gradients if parts is not None])

    def forgotten(self, names: Collection[str]) -> None:
        """Send these sets in full for the rest of this update: a server does not know them."""
        self._forgotten.update(bytes.fromhex(name) for name in names)

    def forget(self, member: int) -> None:
        """Forget which sets a disconnected server knows."""
        self._names.pop(member, None)

    def _named_part(self, member: int, number: int, shard: int) -> Said:
        sent = self._sent[number]
        if sent is None:
            return self._name(member, number, shard)
        if self._lists:
            rows = self._pushed(number, shard)
            return Given(name=name_of(rows), rows=rows)
        return PartOfSet(self._name(member, number, shard), sent[shard])

    def _name(self, member: int, number: int, shard: int) -> Named | Given:
        rows, names = self._rows[number][shard], self._names[member]
        name = self._digests.get((number, shard))
        if name is None:
            name = self._digests[number, shard] = name_of(rows)
        if self._lists:
            return Given(name=name, rows=rows)
        return names.give(Unknown(name=name), rows) if name in self._forgotten else names.name(rows, name)


def tables_of(
    strategy: Ps, built: Built, layout: FlatLayout, rows_of: Mapping[str, RowsOf], workers: int
) -> WorkerTables:
    """The tables of one of so many workers of this strategy."""
    return WorkerTables(
        built.model,
        layout,
        rows_of,
        filters=strategy.filter,
        optimizer=built.optimizer,
        workers=workers,
        lists=strategy.keys == "listed",
    )


def _split(items: Tensor, rows: Tensor, by_shard: Sequence[Tensor]) -> list[Tensor]:
    """The items of each shard's rows, of those of all `rows`, which are sorted."""
    return [items] if len(by_shard) == 1 else [items[torch.searchsorted(rows, own)] for own in by_shard]


def _checked(table: Table, rows: Any) -> Tensor:
    """The rows that a task's function named: sorted, each once; a UserError if the table has no such rows."""
    allowed = f"it must return row indices from 0 to {table.shape[0] - 1}"
    try:
        found = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"sparse[{table.name!r}] returned a {type(rows).__name__}; {allowed}") from error
    if not found.numel():
        return _NO_ROWS
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise UserError(f"sparse[{table.name!r}] returned items of {found.dtype}; {allowed}")
    given = found.detach().cpu().numpy().astype(np.int64, copy=True).reshape(-1)
    if not ascend(given):
        given.sort()
        given = given[np.append(True, given[1:] != given[:-1])]
    for row in (int(given[0]), int(given[-1])):
        if not 0 <= row < table.shape[0]:
            raise UserError(f"sparse[{table.name!r}] returned row {row}; {allowed}")
    return torch.from_numpy(given)


def _put(table: Table, parameter: Tensor, rows: Tensor, payload: memoryview) -> None:
    """Overwrite rows of a parameter with the values that came, perhaps in memory that may only be read."""
    count = rows.numel()
    if not count:
        return
    if parameter.device.type == "cpu" and parameter.is_contiguous():
        came, row_bytes = np.frombuffer(payload, np.uint8), table.width * table.dtype.itemsize
        put_rows(parameter.data_ptr(), rows.data_ptr(), came.ctypes.data, count, row_bytes)
        return
    values = torch.from_numpy(np.frombuffer(payload, np.uint8).copy()).view(table.dtype)
    with torch.no_grad():
        parameter[rows.to(parameter.device)] = values.view(count, *table.shape[1:]).to(parameter.device)


def _rows_of_gradient(table: Table, gradient: Tensor, rows: Tensor) -> Tensor:
    """The gradient's rows `rows`, sorted; a UserError if it has others that are not 0."""
    rows = rows.to(gradient.device)
    if gradient.is_sparse:
        coalesced = gradient.coalesce()
        indices, values = coalesced.indices()[0], coalesced.values()
        places = torch.searchsorted(rows, indices)
        known = rows[places.clamp(max=rows.numel() - 1)] == indices if rows.numel() else indices < 0
        _require_none(table, indices[~known])
        return values.new_zeros((rows.numel(), *values.shape[1:])).index_copy_(0, places, values)
    values = gradient.index_select(0, rows)
    others = gradient.index_fill_(0, rows, 0).view(table.shape[0], -1)
    if bool(others.any()):
        _require_none(table, others.any(dim=1).nonzero().view(-1))
    return values


def _require_none(table: Table, rows: Tensor) -> None:
    if rows.numel():
        raise UserError(
            f"sparse[{table.name!r}] did not return row {int(rows[0])}, but the batch has a gradient there; return "
            "every row that the batch reads; a table that is also used in full, such as an output layer, is not sparse"
        )
