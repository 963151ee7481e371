"""Matrices in files of any size, read forward as blocks of rows: LIBSVM text (plain or gzip) and npy.

`table_files.open_matrix` opens these and tables. No more is held than a few blocks; where rows are needed again and in
any order, as in several passes by several processes, `stored_matrix` keeps them so.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.data.table_encoding import TableEncoding
from manyhands.errors import DataError, UserError, first_line

OnBytes = Callable[[int], None]  # gets the bytes that have been read, a block at a time
BLOCK_BYTES: Final = 1 << 24
_TEXT_BLOCK_BYTES: Final = 1 << 22
AS_SINGLE = "?", "b", "B", "h", "H", "e", "f"  # types whose values single precision holds


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
    encoding: TableEncoding | None = None  # of a table: how its columns became numbers
    left_out: int = 0  # lines or rows of the last reading that were wrong and skipped

    @abstractmethod
    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        """All rows from the first, in blocks of about so many bytes (at least a row); DataError says what is wrong."""


class LibsvmMatrix(MatrixFile):
    """Labels and `index:value` pairs; column j has index j, so of a file that counts from 1 column 0 is empty."""

    def __init__(self, path: Path, *, skip_bad: bool = False) -> None:
        self.path, self._skip_bad = path, skip_bad
        self.rows = self.columns = None

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        """CSR with labels, of at most `block_bytes` of text each, parsed by as many threads as there are cores."""
        reading = Reading(
            format="libsvm",
            skip_bad=self._skip_bad,
            threads=len(os.sched_getaffinity(0)),
            block_bytes=max(1, min(block_bytes, _TEXT_BLOCK_BYTES)),
        )
        begin, file = 0, RowFile(self.path, reading)
        for rows in file.blocks(on_bytes):
            yield MatrixBlock(begin=begin, rows=rows, labels=rows.labels)
            begin += len(rows)
        self.left_out = file.bad_lines


class NpyMatrix(MatrixFile):
    """An array of two dimensions that numpy saved; it is mapped, not read."""

    rows: int
    columns: int

    def __init__(self, path: Path, label: str | None) -> None:
        self.path = path
        self.dtype, self._shape, self.is_column_major, self.offset = _npy_header(path)
        self.rows, self._width = self._shape
        self.label: int | None = None
        if label is not None:
            try:
                number = int(label)
            except ValueError:
                numbers = "columns of an npy file are numbers, such as -1, the last"
                raise UserError(f"label={label!r}: {numbers}") from None
            if not -self._width <= number < self._width or self._width < 2:
                raise UserError(
                    f"label={label}: {path} has {self._width} columns; a label needs at least one other column"
                )
            self.label = number % self._width
        self.columns = self._width - (self.label is not None)
        # Whether its rows lie in the file as a process computes with them
        self.is_mappable = self.label is None and not self.is_column_major and self.dtype.isnative

    def mapped(self) -> NDArray[Any]:
        """All of it, labels too, read from the disk where it is looked at."""
        order: Literal["F", "C"] = "F" if self.is_column_major else "C"
        return np.memmap(self.path, self.dtype, "r", self.offset, self._shape, order)

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        """In single precision where that holds all values, else in double."""
        table, row_bytes = self.mapped(), self._width * self.dtype.itemsize
        dtype = np.float32 if self.dtype.char in AS_SINGLE else np.float64
        count = max(1, block_bytes // row_bytes)
        for begin in range(0, len(table), count):
            values = np.ascontiguousarray(table[begin : begin + count], dtype)
            labels = None
            if self.label is not None:
                labels, values = values[:, self.label], np.delete(values, self.label, axis=1)
            yield MatrixBlock(begin=begin, rows=values, labels=labels)
            if on_bytes is not None:
                on_bytes(len(values) * row_bytes)


def _npy_header(path: Path) -> tuple[np.dtype[Any], tuple[int, int], bool, int]:
    """Type, shape, whether columns lie together, and where the numbers begin; the file is long enough for them."""
    try:
        with path.open("rb") as file:
            version = npy.read_magic(file)
            readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            if version not in readers:
                raise DataError(
                    f"{path} is npy of version {version[0]}.{version[1]}; save it with numpy.save"
                )
            shape, is_column_major, dtype = readers[version](file)
            offset, end = file.tell(), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except DataError:
        raise
    except Exception as error:  # numpy raises nearly anything for a damaged head
        raise DataError(f"{path}: the header of this npy file is damaged: {first_line(error)}") from error
    if dtype.kind not in "biuf":
        raise DataError(f"{path} holds {dtype}, not numbers; save it as float64 or float32")
    if len(shape) != 2 or 0 in shape or any(not isinstance(size, int) or size < 0 for size in shape):
        raise DataError(
            f"{path} has the shape {shape}; a matrix has two dimensions, rows and columns, of at least 1"
        )
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    if end - offset < num_bytes:
        raise DataError(
            f"{path} is truncated: {shape} of {dtype} needs {num_bytes} bytes, but has {end - offset}"
        )
    return dtype, shape, is_column_major, offset
