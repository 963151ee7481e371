"""A matrix in a file of any size, read forward as blocks of rows: LIBSVM text (plain or gzip), npy, Parquet.

`matrix_files` opens them. No more is held than a few blocks. Where rows are needed again and in any order, as in
several passes by several processes, `stored_matrix` keeps them so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError

__all__ = ["BLOCK_BYTES", "MatrixBlock", "MatrixFile", "OnBytes", "Rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Row i has the features `indices[starts[i]:starts[i + 1]]` and their `values`; arrays are contiguous.

    `labels` are as the file has them, NaN where it has none. `weights` say how often a row counts. `size` is one more
    than the largest feature.
    """

    starts: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    size: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        arrays = (self.starts, self.indices, self.values, self.labels, self.weights)
        return sum(array.nbytes for array in arrays)

    @staticmethod
    def join(blocks: Sequence[Rows]) -> Rows:
        ends = np.cumsum([0, *(len(block.indices) for block in blocks)])
        starts = [block.starts[:-1] + end for block, end in zip(blocks, ends[:-1], strict=True)]
        kinds = {"indices": np.int32, "values": np.float32, "labels": np.float32, "weights": np.float32}
        joined: dict[str, Any] = {
            name: np.concatenate([np.empty(0, kind), *(getattr(block, name) for block in blocks)])
            for name, kind in kinds.items()
        }
        size = max((block.size for block in blocks), default=0)
        return Rows(starts=np.concatenate([*starts, ends[-1:]]).astype(np.int64), **joined, size=size)


OnBytes = Callable[[int], None]  # gets the bytes that have been read, a block at a time
BLOCK_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatrixBlock:
    """Some rows in a row; `rows` is a table of float32 or float64, or CSR where the file leaves zeros out."""

    begin: int  # the number of the first, from 0
    rows: NDArray[Any] | Rows
    labels: NDArray[Any] | None = None  # one for each row; None where the file has none

    def __len__(self) -> int:
        return len(self.rows)

    def dense(self, columns: int) -> NDArray[Any]:
        """The rows as a table of `columns` columns, the zeros that CSR leaves out written down."""
        if not isinstance(self.rows, Rows):
            return self.rows
        if self.rows.size > columns:
            found = f"row {self.begin} or later has feature {self.rows.size - 1}"
            raise DataError(f"{found}, but there are {columns} columns")
        table = np.zeros((len(self.rows), columns), np.float32)
        of = np.repeat(np.arange(len(self.rows)), np.diff(self.rows.starts))
        table[of, self.rows.indices] = self.rows.values
        return table


class MatrixFile(ABC):
    """A file of rows. Missing values, where a format has them, are NaN; the caller checks for them."""

    path: Path
    rows: int | None  # None where only reading tells, as of text
    columns: int | None  # of the matrix, without labels; None where only reading tells
    names: tuple[str, ...] | None = None  # of the columns, where they have some

    @abstractmethod
    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        """All rows from the first, in blocks of about so many bytes (at least a row); DataError says what is wrong."""
