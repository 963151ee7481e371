"""The payload format of table rows: which rows, by name where the other side knows them, and then their values.

    for each table of the task, in their order:   kind (i64) · count (i64) · name (32 bytes)
    for each, in their order, if it is given:     its rows, int64
                              if it is a part:    a bit for each row of the set, whether the gradient has it
    for each that is there, in a gradient:        its values, row after row

Kind 0: the table is not there (in a gradient: it was not reached), 1: a set of rows by its name, 2: a set that is
given, `count` rows, 3 and 4: part of such a set, of `count` rows. Little-endian; each of the parts begins at a multiple
of 64 bytes and is filled up with zeros. An answer has values alone, for the reader knows of which rows. With
`filter=kkt` these are, of each table, a bit for each row, whether it is other than 0, another, whether it rests
(`row_filters.py`), and the values of those that are not 0. Rows ascend, each named once.

What arrives is checked against the layout before anything of its length is made; ProtocolError says what is wrong.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.native.segment import round_up
from manyhands.strategies.common.tables.row_filters import rests
from manyhands.strategies.common.tables.row_tables import Given, Named, Placement, RowSets, Unknown
from manyhands.strategies.ps.shard_layout import FlatLayout, Table
from manyhands.transport.messages import ProtocolError
from manyhands.wire.flat_layout import LINE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class PartOfSet:
    """Some rows of a set: `sent` says of each whether it is one of them."""

    whole: Named | Given
    sent: Tensor


Said = Named | Given | PartOfSet | None  # how a table's rows are given; None: the table is absent

Vetted = tuple[bytes, int, int]
"""The name of a row set that was checked to belong to this table (by number) and shard."""

_MOST_VETTED = 1 << 14
_HEAD = struct.Struct("<qq32s")
_ROW_BYTES = 8
_ZEROS = bytes(LINE_BYTES)
_NUMPY = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


class _Kind(IntEnum):
    ABSENT = 0
    NAMED = 1
    GIVEN = 2
    PART_OF_NAMED = 3
    PART_OF_GIVEN = 4


class UnknownSets(Exception):
    """A payload names row sets that are not known here."""

    def __init__(self, unknown: Sequence[Unknown]) -> None:
        super().__init__(f"{len(unknown)} row sets are unknown")
        self.names = tuple(one.name.hex() for one in unknown)


def pack(said: Sequence[Said], values: Sequence[Tensor] = ()) -> list[Any]:
    """The payload, as buffers to be sent in order; without `said`, the values of an answer."""
    parts: list[Any] = []
    heads, named = [], list[Any]()
    for one in said:
        match one:
            case None:
                heads.append(_HEAD.pack(_Kind.ABSENT, 0, b""))
            case Named(name=name):
                heads.append(_HEAD.pack(_Kind.NAMED, 0, name))
            case Given(name=name, rows=rows):
                heads.append(_HEAD.pack(_Kind.GIVEN, rows.numel(), name))
                named.append(_array(rows))
            case PartOfSet(whole=Named(name=name), sent=sent):
                heads.append(_HEAD.pack(_Kind.PART_OF_NAMED, sent.numel(), name))
                named.append(np.packbits(sent.numpy()))
            case PartOfSet(whole=Given(name=name, rows=rows), sent=sent):
                heads.append(_HEAD.pack(_Kind.PART_OF_GIVEN, sent.numel(), name))
                named += [_array(rows), np.packbits(sent.numpy())]
    add_part(parts, b"".join(heads))
    for data in (*named, *map(_array, values)):
        add_part(parts, data)
    return parts


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().view(-1).numpy()


def most_bytes(layout: FlatLayout, shard: int) -> int:
    """The maximum valid payload: every row of every table, given, as a part, and with values."""
    counts = [table.placed(layout.shards).count(shard) for table in layout.tables]
    rows = sum(round_up(count * _ROW_BYTES, LINE_BYTES) + _bits_bytes(count) for count in counts)
    return _heads_bytes(layout) + rows + values_bytes(layout.tables, counts)


def least_bytes(counts: Sequence[int]) -> int:
    """The minimum answer about so many rows of each table where those of 0 have no values."""
    return 2 * sum(map(_bits_bytes, counts))


def _bits_bytes(count: int) -> int:
    return round_up(-(-count // 8), LINE_BYTES)


def values_bytes(tables: Sequence[Table], counts: Sequence[int]) -> int:
    return sum(
        round_up(count * table.width * table.dtype.itemsize, LINE_BYTES)
        for table, count in zip(tables, counts, strict=True)
    )


def take_sets(
    layout: FlatLayout, shard: int, payload: memoryview, sets: RowSets, vetted: set[Vetted] | None = None
) -> tuple[list[Tensor | None], memoryview]:
    """The rows that a payload names, by table, and the rest of it; UnknownSets if `sets` lacks any.

    All rows are checked to be of this shard and ascending. `vetted` caches the checks, since a name determines
    its rows.
    """
    rest = payload[_heads_bytes(layout) :]
    if len(payload) < _heads_bytes(layout):
        raise ProtocolError("rows", f"{len(payload)} bytes are too few for {len(layout.tables)} tables")
    found: list[Tensor | Unknown | None] = []
    for number, table in enumerate(layout.tables):
        kind, count, name = _HEAD.unpack_from(payload, number * _HEAD.size)
        placement = table.placed(layout.shards)
        fits = 0 <= count <= placement.count(shard)
        if kind in (_Kind.GIVEN, _Kind.PART_OF_GIVEN) and fits:
            rows, rest = _cut(rest, count, torch.int64)
            _require_own(table, placement, shard, rows)
            if not bool((rows[1:] > rows[:-1]).all()):
                raise ProtocolError("rows", f"the rows of table {table.name!r} are not in ascending order")
            try:
                found.append(sets.learn(Given(name=name, rows=rows)))
            except ValueError as error:
                raise ProtocolError("rows", str(error)) from error
        elif (kind == _Kind.NAMED and count == 0) or (kind == _Kind.PART_OF_NAMED and fits):
            known = sets.find(Named(name=name))
            seen = (name, number, shard)  # a set of another table may have the same rows, and the same name
            if not isinstance(known, Unknown) and (vetted is None or seen not in vetted):
                _require_own(table, placement, shard, known)
                if vetted is not None:
                    if len(vetted) >= _MOST_VETTED:
                        vetted.clear()
                    vetted.add(seen)
            found.append(known)
        elif kind == _Kind.ABSENT and count == 0:
            found.append(None)
        else:
            raise ProtocolError("rows", f"table {table.name!r}: kind {kind} with {count} rows is invalid")
        if kind in (_Kind.PART_OF_NAMED, _Kind.PART_OF_GIVEN):
            sent, rest = _cut_bits(rest, count)
            found[-1] = _some_of(found[-1], sent)
    unknown = [one for one in found if isinstance(one, Unknown)]
    if unknown:
        raise UnknownSets(unknown)
    return [one for one in found if not isinstance(one, Unknown)], rest


def _some_of(rows: Tensor | Unknown | None, sent: Tensor) -> Tensor | Unknown | None:
    if not isinstance(rows, Tensor):
        return rows
    if rows.numel() != sent.numel():
        raise ProtocolError("rows", f"a part of {sent.numel()} rows is of a set of {rows.numel()} rows")
    return rows[sent]


def take_values(
    tables: Sequence[Table], counts: Sequence[int | None], payload: memoryview, *, borrow: bool = False
) -> list[Tensor | None]:
    """The values of this many rows of each table (None: absent), which must be all of `payload`.

    They are views of the payload; values in read-only memory are copied, unless the caller borrows them while the
    payload exists.
    """
    values: list[Tensor | None] = []
    for table, count in zip(tables, counts, strict=True):
        if count is None:
            values.append(None)
            continue
        flat, payload = _cut(payload, count * table.width, table.dtype, borrow=borrow)
        values.append(flat.view(count, table.width))
    if payload:
        raise ProtocolError("rows", f"{len(payload)} bytes follow the last table")
    return values


def pack_rests(parts: list[Any], values: Tensor) -> None:
    """Append the answer about rows of one table where those of 0 have no values: two bits, and the other rows."""
    filled = (values != 0).any(dim=1)
    add_part(parts, np.packbits(filled.numpy()))
    add_part(parts, np.packbits(rests(values).numpy()))
    add_part(parts, _array(values[filled]))


def take_rests(table: Table, count: int, payload: memoryview) -> tuple[Tensor, memoryview]:
    """The values of so many rows of a table at the start of such an answer, and the rest of it."""
    filled, payload = _cut_bits(payload, count)
    resting, payload = _cut_bits(payload, count)
    given, payload = _cut(payload, int(filled.sum()) * table.width, table.dtype)
    values = torch.zeros((count, table.width), dtype=table.dtype)
    values[resting] = -0.0
    values[filled] = given.view(-1, table.width)
    return values, payload


def _heads_bytes(layout: FlatLayout) -> int:
    return round_up(len(layout.tables) * _HEAD.size, LINE_BYTES)


def add_part(parts: list[Any], data: Any) -> None:
    """Append a part and its padding; an empty part is omitted."""
    num_bytes = memoryview(data).nbytes
    if num_bytes:
        parts.append(data)
        filling = round_up(num_bytes, LINE_BYTES) - num_bytes
        if filling:
            parts.append(_ZEROS[:filling])


def _cut(
    rest: memoryview, count: int, dtype: torch.dtype, *, borrow: bool = False
) -> tuple[Tensor, memoryview]:
    """`count` items from the start of `rest`, and the remainder."""
    num_bytes = count * dtype.itemsize
    end = round_up(num_bytes, LINE_BYTES)
    if end > len(rest):
        raise ProtocolError("rows", f"{len(rest)} bytes are left, but {end} were announced")
    array = np.frombuffer(rest[:num_bytes], _NUMPY[dtype])
    if not array.flags.writeable and borrow and num_bytes:
        # The same memory as an array that torch accepts without a warning; for reading only, and it owns nothing.
        memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
        array = np.frombuffer(memory, array.dtype)
    elif not array.flags.writeable:  # of an arena, whose memory is soon reused
        array = array.copy()
    return torch.from_numpy(array), rest[end:]


def _cut_bits(rest: memoryview, count: int) -> tuple[Tensor, memoryview]:
    """`count` bits from the start of `rest`, as truths, and the remainder."""
    packed, rest = _cut(rest, -(-count // 8), torch.uint8)
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool(), rest


def _require_own(table: Table, placement: Placement, shard: int, rows: Tensor) -> None:
    bad = placement.foreign_row(rows, shard)
    if bad is not None:
        raise ProtocolError("rows", f"row {bad} of table {table.name!r} does not belong to shard {shard}")
