"""What is sent at once: a range of a buffer that every worker has laid out alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class Matrix(NamedTuple):
    """Items of a parcel that are a matrix, row by row, from item `begin` on."""

    begin: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Bytes `begin` to `end` of buffer `number`, which holds items of `dtype`; the same on every worker.

    It names what travels, so a codec may keep something for it from one step to the next.
    """

    number: int
    begin: int
    end: int
    dtype: torch.dtype
    exact: bool = False  # it travels as it is, whatever the codec: workers agree by it, or decide
    matrices: tuple[Matrix, ...] = ()
    """Which of its items are matrices, for a codec that sees more in them than items."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Items `begin` to `end` that belong to no tensor: the next tensor begins on a line of its own; ascending."""

    @classmethod
    def whole(cls, number: int, count: int, dtype: torch.dtype, *, exact: bool = False) -> Parcel:
        end = count * dtype.itemsize
        return cls(number=number, begin=0, end=end, dtype=dtype, exact=exact)

    @property
    def key(self) -> str:
        """By which a codec finds again what it keeps for it."""
        return f"{self.number}.{self.begin}.{self.end}"

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def count(self) -> int:  # of items, those in gaps included
        return self.num_bytes // self.dtype.itemsize

    @property
    def tensor_items(self) -> int:  # those that belong to tensors
        return self.count - sum(end - begin for begin, end in self.gaps)

    def part(self, begin: int, end: int) -> Parcel:
        item = self.dtype.itemsize
        inside = [one for one in self.matrices if begin <= one.begin and one.end <= end]
        gaps = [(max(first, begin) - begin, min(last, end) - begin) for first, last in self.gaps]
        return replace(
            self,
            begin=self.begin + begin * item,
            end=self.begin + end * item,
            matrices=tuple(one._replace(begin=one.begin - begin) for one in inside),
            gaps=tuple((first, last) for first, last in gaps if first < last),
        )


def gaps_between(tensors: Iterable[tuple[int, int]], count: int) -> tuple[tuple[int, int], ...]:
    """What is left of `count` items between and behind tensors, each given by its first item and the one after it."""
    gaps, at = [], 0
    for begin, end in sorted(tensors):
        if at < begin:
            gaps.append((at, begin))
        at = max(at, end)
    return (*gaps, (at, count)) if at < count else tuple(gaps)
