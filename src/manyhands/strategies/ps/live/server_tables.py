"""A server's side of row-sparse tables: the row sets it knows, the rows it sends, the gradients it takes.

The most recently used sets are cached, in at most a quarter of the memory of a shard's rows; a worker that names
an evicted one is asked for its rows (RowsUnknown). Rows are always forwarded to a backup in full, so it need not
ask, and knows them when it takes over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.native.segment import round_up
from manyhands.strategies.common.tables.row_tables import Given, RowGradient, RowSets, name_of
from manyhands.strategies.ps.live.row_payloads import (
    Vetted,
    add_part,
    most_bytes,
    pack,
    pack_rests,
    take_sets,
    take_values,
)
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.transport.messages import ProtocolError
from manyhands.wire.flat_layout import LINE_BYTES

_LEAST_CAPACITY_BYTES = 64 << 10
_SHARE_FOR_SETS = 4
_KEPT_BYTES = 4 << 20


class ServerTables:
    """The tables of all shards of which this server process is a replica; with `rests`, rows of 0 travel as bits."""

    def __init__(self, layout: FlatLayout, *, rests: bool = False) -> None:
        self._layout, self._rests = layout, rests
        self._most_bytes = [most_bytes(layout, shard) for shard in range(layout.shards)]
        own_bytes = sum(_num_bytes(table.shape, table.dtype) for table in layout.tables) // layout.shards
        self._vetted: set[Vetted] = set()
        self._rooms: dict[tuple[int, int], tuple[NDArray[np.uint8], int]] = {}
        """By member and table: what its rows' values lie in, and the address of that."""
        self._sets = RowSets(max(_LEAST_CAPACITY_BYTES, own_bytes // _SHARE_FOR_SETS))

    def check_capacity(self, shard: int, num_bytes: int) -> None:
        """Reject a payload that is longer than rows of this shard can be, before it is read."""
        if not 0 <= shard < self._layout.shards:
            raise ProtocolError("shard", f"there is no shard {shard} of {self._layout.shards}")
        most = self._most_bytes[shard]
        if num_bytes > most:
            raise ProtocolError(
                "payload_bytes", f"rows for shard {shard} must have at most {most} bytes, not {num_bytes}"
            )

    def asked(self, shard: int, payload: memoryview, whole: bool) -> list[Tensor | None]:
        """The rows of each table that a ReadRows requests; UnknownSets if it names a set that is not known here."""
        self.check_capacity(shard, len(payload))
        if whole:
            return [table.placed(self._layout.shards).rows(shard) for table in self._layout.tables]
        rows, rest = take_sets(self._layout, shard, payload, self._sets, self._vetted)
        if rest:
            raise ProtocolError("rows", f"{len(rest)} bytes follow the last table")
        return rows

    def values(
        self, store: ShardStore, asked: Sequence[Tensor | None], member: int, *, has_all: bool
    ) -> list[Any]:
        """The payload of a RowValues: the store's current values of the rows that `asked` returned.

        The buffer is kept for `member` and reused for its next answer once it `has_all` that was sent.
        """
        parts: list[Any] = []
        for number, (table, rows) in enumerate(zip(self._layout.tables, asked, strict=True)):
            if rows is not None:
                num_bytes = rows.numel() * table.width * table.dtype.itemsize
                known = self._rooms.get((member, number))
                if known is None or known[0].nbytes < num_bytes or not has_all:
                    fresh = np.empty(
                        num_bytes, np.uint8
                    )  # else reused: fresh pages cost more than filling them
                    known = (fresh, fresh.ctypes.data)
                    if num_bytes <= _KEPT_BYTES:  # and not for all rows, that an evaluation reads
                        self._rooms[member, number] = known
                room, address = known
                store.tables[table.name].copy_rows(rows, address)
                if self._rests:
                    pack_rests(
                        parts, torch.from_numpy(room[:num_bytes]).view(table.dtype).view(-1, table.width)
                    )
                else:
                    add_part(parts, room[:num_bytes])
        return parts

    def forget(self, member: int) -> None:
        for key in [key for key in self._rooms if key[0] == member]:
            del self._rooms[key]

    def gradients(self, shard: int, payload: memoryview, *, borrow: bool = False) -> dict[str, RowGradient]:
        """The row gradients that a Push carries, by table; UnknownSets as above.

        With `borrow` they are valid only while the payload exists.
        """
        self.check_capacity(shard, len(payload))
        tables = self._layout.tables
        rows, rest = take_sets(self._layout, shard, payload, self._sets, self._vetted)
        values = take_values(
            tables, [None if one is None else one.numel() for one in rows], rest, borrow=borrow
        )
        return {
            table.name: RowGradient(rows=which, values=gradient, is_vetted=True)
            for table, which, gradient in zip(tables, rows, values, strict=True)
            if which is not None and gradient is not None
        }

    def packed(self, gradients: Mapping[str, RowGradient]) -> list[Any]:
        """Gradients as a self-contained payload: all rows are given."""
        present = [gradients.get(table.name) for table in self._layout.tables]
        said = [None if one is None else Given(name=name_of(one.rows), rows=one.rows) for one in present]
        return pack(said, [one.values for one in present if one is not None])


# ── the tables at the end of a run, in the launcher's memory behind the flat buffer ───────────────────────────────────


def final_bytes(layout: FlatLayout) -> int:
    """The size of the memory in which all servers leave what was trained."""
    tables = (round_up(_num_bytes(table.shape, table.dtype), LINE_BYTES) for table in layout.tables)
    return layout.num_bytes + sum(tables)


def final_tables(layout: FlatLayout, memory: Tensor) -> dict[str, Tensor]:
    """The whole tables in that memory, by name and in their shapes."""
    views: dict[str, Tensor] = {}
    begin = layout.num_bytes
    for table in layout.tables:
        num_bytes = _num_bytes(table.shape, table.dtype)
        views[table.name] = memory[begin : begin + num_bytes].view(table.dtype).view(table.shape)
        begin += round_up(num_bytes, LINE_BYTES)
    return views


def leave_tables(layout: FlatLayout, shard: int, store: ShardStore, memory: Tensor) -> None:
    views = final_tables(layout, memory)
    for table in layout.tables:
        own = table.placed(layout.shards).rows(shard)
        views[table.name][own] = store.tables[table.name].gather(own).view(len(own), *table.shape[1:])


def _num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize
