"""Row sets by name: a set of rows that was sent once is afterwards 32 bytes.

Workers read and push the same sets again and again: a read and its push, every epoch the same batches. The name is the
SHA-256 of the rows' bytes, so that two sets never share one, and nobody has to agree on numbers. Both sides forget:

    worker                                       server
    name(rows) -> Given(name, rows)  ─────────►  learn(given)                     first time
    name(rows) -> Named(name)        ─────────►  find(named) -> rows              from then on
                                     ◄─────────  find(named) -> Unknown(name)     it has forgotten
    give(unknown, rows) -> Given     ─────────►  learn(given)

Pure: no sockets and no clocks. Rows are int64 in one dimension; their order is part of the set.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.errors import UserError

__all__ = ["Given", "Named", "RowSetNames", "RowSets", "Unknown", "name_of"]


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
            f"a row set is int64 in one dimension, and not {rows.dtype} of shape {tuple(rows.shape)}"
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
        self.nbytes = 0
        """The size of all sets; never more than the capacity."""

    def __len__(self) -> int:
        return len(self._rows)

    def learn(self, given: Given) -> Tensor:
        """Keep a copy of a set, forgetting the one that was not used for longest; a set larger than all is not kept.

        Returns the rows. ValueError if the name is not theirs: a lie here would send every later gradient astray.
        """
        if name_of(given.rows) != given.name:
            raise ValueError(f"a row set of {given.rows.numel()} rows came under a name that is not its own")
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
