"""Which shard has which rows of a table: rendezvous hashing (Thaler & Ravishankar 1998).

Every shard draws a number for every row, and the highest has it. So rows that are asked for often, which tend to be
neighbours (the frequent words of a vocabulary), lie on different servers; shares are as even as chance makes them; and
with one shard more, only those rows move that it takes: its own share, and nobody else's.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.strategies.common.tables.row_kernels import first_foreign_row

__all__ = ["Placement", "place"]

_NO_OWNERS = np.empty(0, dtype=np.int16)


class Placement:
    """The rows 0 to `num_rows` - 1 of a table over `shards` shards; `place` makes one and keeps it."""

    def __init__(self, num_rows: int, shards: int) -> None:
        self.num_rows, self.shards = num_rows, shards
        self._owners: Tensor | None = None  # one shard needs no table
        self._local: Tensor | None = None
        if shards == 1:
            self._rows = [torch.arange(num_rows)]
            return
        owners = _highest(num_rows, shards)
        self._rows = [torch.from_numpy(np.flatnonzero(owners == shard)) for shard in range(shards)]
        self._owners = torch.from_numpy(owners)
        self._local = torch.empty(num_rows, dtype=torch.int64)
        for rows in self._rows:
            self._local[rows] = torch.arange(len(rows))

    def rows(self, shard: int) -> Tensor:
        """The rows that a shard has, ascending."""
        return self._rows[shard]

    def count(self, shard: int) -> int:
        """How many they are."""
        return len(self._rows[shard])

    def local(self, rows: Tensor) -> Tensor:
        """For each row, which of its shard's it is; IndexError for one that the table does not have."""
        if self._local is None:
            return rows
        return torch.index_select(self._local, 0, rows)

    def split(self, rows: Tensor) -> list[Tensor]:
        """By shard: which of `rows` are its own, in their order."""
        if self._owners is None:
            return [rows]
        owners = torch.index_select(self._owners, 0, rows)
        return [rows[owners == shard] for shard in range(self.shards)]

    def foreign_row(self, rows: Tensor, shard: int) -> int | None:
        """The first of `rows` that a shard does not have."""
        owners = self._owners.numpy() if self._owners is not None else _NO_OWNERS
        index = first_foreign_row(rows.numpy(), owners, shard, self.num_rows)
        return None if index < 0 else int(rows[index])


@lru_cache(maxsize=64)
def place(num_rows: int, shards: int) -> Placement:
    """The placement of a table; the same in every process."""
    return Placement(num_rows, shards)


def _highest(num_rows: int, shards: int) -> NDArray[np.int16]:
    """By row: the shard that drew the highest number."""
    rows = np.arange(num_rows, dtype=np.uint64)
    owners = np.zeros(num_rows, dtype=np.int16)
    best = np.zeros(num_rows, dtype=np.uint64)
    for shard in range(shards):
        drawn = _mixed(rows ^ _mixed(np.full(1, shard + 1, dtype=np.uint64)))
        higher = drawn > best
        owners[higher] = shard
        best[higher] = drawn[higher]
    return owners


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al. 2014): every bit of the result depends on every bit of the number."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
