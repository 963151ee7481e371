"""Parsed examples, gone through pass after pass: in memory where they fit, else in files that are mapped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manyhands.workloads.logreg.examples import Labelled, scale_of

__all__ = ["Opened", "Parsed", "ParsedBlocks", "Piece"]

Piece = tuple[Any, NDArray[np.float32], tuple[int, int], int]
"""Rows and targets as compiled code takes them, which of the rows, and how many examples of the pass precede row 0."""


class Opened(Protocol):
    """Examples that can be gone through."""

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Examples `begin` to `end` of a pass."""


class Parsed(ABC):
    """All examples of a file."""

    examples: int
    entries: int
    """Features of all examples together."""
    size: int
    """One more than the largest feature."""
    scale: float
    """The size of the values, as of `scale_of`."""

    @abstractmethod
    def opened(self) -> Opened:
        """In this process."""


@dataclass(frozen=True, eq=False)
class ParsedBlocks(Parsed):
    """Examples in the memory of this process."""

    blocks: Sequence[Labelled]
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", list(accumulate(len(block.rows) for block in self.blocks)))

    @property
    def examples(self) -> int:  # type: ignore[override]
        """Of all blocks."""
        return self.ends[-1]

    @property
    def entries(self) -> int:  # type: ignore[override]
        """Of all blocks."""
        return sum(len(block.rows.indices) for block in self.blocks)

    @property
    def size(self) -> int:  # type: ignore[override]
        """Of the largest block."""
        return max(block.rows.size for block in self.blocks)

    @property
    def scale(self) -> float:  # type: ignore[override]
        """Of the first."""
        return scale_of(self.blocks[0].rows)

    def opened(self) -> ParsedBlocks:
        """They are here."""
        return self

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Whole blocks, and parts of the first and the last."""
        number = bisect_right(self.ends, begin)
        while begin < end:
            block, before = self.blocks[number], self.ends[number] - len(self.blocks[number].rows)
            until = min(end, self.ends[number])
            yield block.arrays(), block.targets, (begin - before, until - before), before
            begin, number = until, number + 1
