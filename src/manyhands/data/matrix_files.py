"""Matrices in files of any size, read forward as blocks of rows: LIBSVM text (plain or gzip), npy, Parquet.

file = open_matrix("table.parquet", label="price")
for block in file.blocks(1 << 24):
    learn(block.dense(file.columns), block.labels)

The first bytes of a file tell the format. No more is held than a few blocks; where rows are needed again and in any
order, as in several passes by several processes, `stored_matrix` keeps them so.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from manyhands.data.file_reader import DataFile
from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.errors import DataError, UserError, first_line, nearest

__all__ = ["BLOCK_BYTES", "MatrixBlock", "MatrixFile", "NpyMatrix", "OnBytes", "ParquetMatrix", "open_matrix"]

OnBytes = Callable[[int], None]  # gets the bytes that have been read, a block at a time
BLOCK_BYTES: Final = 1 << 24
_TEXT_BLOCK_BYTES: Final = 1 << 22
_AS_SINGLE = "?", "b", "B", "h", "H", "e", "f"  # types whose values single precision holds


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


def open_matrix(path: Path | str, label: str | None = None) -> MatrixFile:
    """A file by its first bytes; nothing but its head is read yet.

    `label` is the column that holds labels: a name in Parquet, a number in npy (-1 is the last). LIBSVM has its own.
    """
    path = Path(path)
    with DataFile(path) as file:
        head, is_gzip = bytes(file.up_to(8)), file.is_gzip
    if not head and not is_gzip:
        raise DataError(f"{path} is empty; give a matrix as LIBSVM text, npy or Parquet")
    kind = next((kind for magic, kind in _MAPPED.items() if head.startswith(magic)), None)
    if kind is not None and is_gzip:
        raise DataError(f"{path} is compressed by gzip and cannot be mapped; gunzip it first")
    if kind is not None:
        return kind(path, label)
    if label is not None:
        raise UserError(
            f"label={label!r}: {path} is LIBSVM text, whose labels come first in each line; leave it out"
        )
    return LibsvmMatrix(path)


class LibsvmMatrix(MatrixFile):
    """Labels and `index:value` pairs; column j has index j, so of a file that counts from 1 column 0 is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self.columns = None

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        """CSR with labels, of at most `block_bytes` of text each, parsed by as many threads as there are cores."""
        reading = Reading(
            format="libsvm",
            threads=len(os.sched_getaffinity(0)),
            block_bytes=max(1, min(block_bytes, _TEXT_BLOCK_BYTES)),
        )
        begin = 0
        for rows in RowFile(self.path, reading).blocks(on_bytes):
            yield MatrixBlock(begin=begin, rows=rows, labels=rows.labels)
            begin += len(rows)


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
        dtype = np.float32 if self.dtype.char in _AS_SINGLE else np.float64
        count = max(1, block_bytes // row_bytes)
        for begin in range(0, len(table), count):
            values = np.ascontiguousarray(table[begin : begin + count], dtype)
            labels = None
            if self.label is not None:
                labels, values = values[:, self.label], np.delete(values, self.label, axis=1)
            yield MatrixBlock(begin=begin, rows=values, labels=labels)
            if on_bytes is not None:
                on_bytes(len(values) * row_bytes)


class ParquetMatrix(MatrixFile):
    """A table whose columns are numbers, all or those of `chosen`, in that order; null is NaN. Needs pyarrow."""

    names: tuple[str, ...]
    columns: int

    def __init__(self, path: Path, label: str | None, chosen: Sequence[str] | None = None) -> None:
        self.path, self.label = path, label
        with _parquet(path) as file:
            self.rows = int(file.metadata.num_rows)
            fields = list(file.schema_arrow)
        if chosen is not None:
            fields = [field for field in fields if field.name in (*chosen, label)]
        known = [field.name for field in fields]
        if label is not None and label not in known:
            raise UserError(f"label={label!r}: {path} has no such column; {nearest(label, known)}")
        from pyarrow import types

        for field in fields:
            is_number = (types.is_integer, types.is_floating, types.is_boolean)
            if not any(is_kind(field.type) for is_kind in is_number):
                raise DataError(
                    f"{path}: column {field.name!r} is {field.type}, not a number; leave it out or encode it as numbers"
                )
        names = tuple(name for name in known if name != label)
        if not self.rows or not names:
            raise DataError(
                f"{path} has {self.rows} rows and {len(names)} columns; give at least one of each"
            )
        if len(set(names)) < len(names):
            raise DataError(f"{path} has two columns of the same name; give each a name of its own")
        self.names = names if chosen is None else tuple(chosen)
        self.columns = len(self.names)
        kinds = [np.dtype(field.type.to_pandas_dtype()).char for field in fields]
        self._dtype = np.dtype(np.float32 if set(kinds) <= set(_AS_SINGLE) else np.float64)

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        row_bytes, begin = self.columns * self._dtype.itemsize, 0
        with _parquet(self.path) as file:
            wanted = [*self.names, *([self.label] if self.label is not None else [])]
            batches = file.iter_batches(max(1, block_bytes // row_bytes), columns=wanted)
            while True:
                with _arrow_errors(self.path):
                    batch = next(batches, None)
                if batch is None:
                    break
                values = np.empty((len(batch), self.columns), self._dtype)
                for place, name in enumerate(self.names):
                    values[:, place] = _numbers(batch, name, self._dtype)
                labels = None if self.label is None else _numbers(batch, self.label, np.dtype(np.float64))
                yield MatrixBlock(begin=begin, rows=values, labels=labels)
                begin += len(values)
                if on_bytes is not None:
                    on_bytes(values.nbytes)
        if begin != self.rows:
            raise DataError(
                f"{self.path} is damaged: its header announces {self.rows} rows, but it has {begin}"
            )


# Formats that are mapped or read by their columns, by the first bytes of a file
_MAPPED: dict[bytes, type[NpyMatrix | ParquetMatrix]] = {b"\x93NUMPY": NpyMatrix, b"PAR1": ParquetMatrix}


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


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path} is Parquet, which needs pyarrow; pip install manyhands[parquet]") from error
    with _arrow_errors(path):
        return parquet.ParquetFile(path)


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a Parquet file that can be read: {first_line(error)}") from error


def _numbers(batch: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    found = batch.column(name).to_numpy(zero_copy_only=False)
    if found.dtype == object:  # booleans of which some are null
        found = np.array([np.nan if value is None else value for value in found.tolist()], np.float64)
    return np.asarray(found, dtype)
