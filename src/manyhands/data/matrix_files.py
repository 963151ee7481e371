"""Files that hold a matrix, one class per format; the first bytes of a file tell the format.

file = open_matrix("table.parquet", label="price")
for block in file.blocks(1 << 24):
    learn(block.dense(file.columns), block.labels)
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from manyhands.data.matrix import BLOCK_BYTES, MatrixBlock, MatrixFile, OnBytes
from manyhands.data.row_files import Reading, RowFile
from manyhands.errors import DataError, UserError, nearest

__all__ = ["LibsvmMatrix", "NpyMatrix", "ParquetMatrix", "open_matrix"]

_TEXT_BLOCK_BYTES: Final = 1 << 22
_NPY_MAGIC, _PARQUET_MAGIC, _GZIP_MAGIC = b"\x93NUMPY", b"PAR1", b"\x1f\x8b"
_AS_SINGLE = "?", "b", "B", "h", "H", "e", "f"  # types whose values single precision holds
# What numpy raises for a damaged head of an npy file
_BAD_HEADS = (
    ValueError,
    SyntaxError,
    TokenError,
    MemoryError,
    RecursionError,
    TypeError,
    LookupError,
    OverflowError,
)


def open_matrix(path: Path | str, label: str | None = None) -> MatrixFile:
    """A file by its first bytes; nothing but its head is read yet.

    `label` is the column that holds labels: a name in Parquet, a number in npy (-1 is the last). LIBSVM has its own.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not head:
        raise DataError(f"{path} is empty; give a matrix as LIBSVM text, npy or Parquet")
    if head.startswith(_NPY_MAGIC):
        return NpyMatrix(path, label)
    if head.startswith(_PARQUET_MAGIC):
        return ParquetMatrix(path, label)
    if head.startswith(_GZIP_MAGIC):
        try:
            with gzip.open(path) as unzipped:
                head = unzipped.read(8)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if head.startswith((_NPY_MAGIC, _PARQUET_MAGIC)):
            raise DataError(f"{path} is compressed by gzip and cannot be mapped; gunzip it first")
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

    columns: int

    def __init__(self, path: Path, label: str | None) -> None:
        self.path = path
        self.dtype, shape, self.is_column_major, self.offset = _npy_header(path)
        self._shape = shape
        self.rows, self._width = shape
        self.label = _column_number(path, label, self._width)
        self.columns = self._width - (self.label is not None)

    @property
    def is_mappable(self) -> bool:
        """Whether its rows lie in the file as a process computes with them."""
        return self.label is None and not self.is_column_major and self.dtype.isnative

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
        if label is not None and label not in [field.name for field in fields]:
            known = [field.name for field in fields]
            raise UserError(f"label={label!r}: {path} has no such column; {nearest(label, known)}")
        from pyarrow import types

        for field in fields:
            is_number = (types.is_integer, types.is_floating, types.is_boolean)
            if not any(is_kind(field.type) for is_kind in is_number):
                raise DataError(
                    f"{path}: column {field.name!r} is {field.type}, no number; leave it out or encode it as numbers"
                )
        self._columns = tuple(field.name for field in fields if field.name != label)
        if not self.rows or not self._columns:
            raise DataError(
                f"{path} has {self.rows} rows and {len(self._columns)} columns; give at least one of each"
            )
        if len(set(self._columns)) < len(self._columns):
            raise DataError(f"{path} has two columns of the same name; give each a name of its own")
        if chosen is not None:
            self._columns = tuple(chosen)
        kinds = [np.dtype(field.type.to_pandas_dtype()).char for field in fields]
        self._dtype = np.dtype(np.float32 if set(kinds) <= set(_AS_SINGLE) else np.float64)
        self.names, self.columns = self._columns, len(self._columns)

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        """In single precision where that holds all values, else in double."""
        row_bytes = len(self._columns) * self._dtype.itemsize
        begin = 0
        with _parquet(self.path) as file:
            wanted = [*self._columns, *([self.label] if self.label is not None else [])]
            batches = file.iter_batches(max(1, block_bytes // row_bytes), columns=wanted)
            while (batch := _next_batch(self.path, batches)) is not None:
                values = np.empty((len(batch), len(self._columns)), self._dtype)
                for place, name in enumerate(self._columns):
                    values[:, place] = _numbers(batch, name, self._dtype)
                labels = None if self.label is None else _numbers(batch, self.label, np.dtype(np.float64))
                yield MatrixBlock(begin=begin, rows=values, labels=labels)
                begin += len(values)
                if on_bytes is not None:
                    on_bytes(values.nbytes)
        if begin != self.rows:
            raise DataError(
                f"{self.path} is damaged: its head promises {self.rows} rows, and {begin} are there"
            )


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


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
    except _BAD_HEADS as error:
        raise DataError(f"{path}: the head of this npy file is damaged: {_first_line(error)}") from error
    if dtype.kind not in "biuf":
        raise DataError(f"{path} holds {dtype}, no numbers; save it as float64 or float32")
    if len(shape) != 2 or 0 in shape or any(not isinstance(size, int) or size < 0 for size in shape):
        raise DataError(
            f"{path} has the shape {shape}; a matrix has two dimensions, rows and columns, of at least 1"
        )
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    if end - offset < num_bytes:
        raise DataError(
            f"{path} is truncated: {shape} of {dtype} takes {num_bytes} bytes, {end - offset} are there"
        )
    return dtype, shape, is_column_major, offset


def _column_number(path: Path, label: str | None, columns: int) -> int | None:
    if label is None:
        return None
    try:
        number = int(label)
    except ValueError:
        raise UserError(
            f"label={label!r}: columns of an npy file are numbers, such as -1, the last"
        ) from None
    if not -columns <= number < columns or columns < 2:
        raise UserError(
            f"label={label}: {path} has {columns} columns; one of them can be the label if others are left"
        )
    return number % columns


def _parquet(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path} is Parquet, and pyarrow, which reads it, is missing; pip install manyhands[parquet]"
        ) from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from error


def _next_batch(path: Path, batches: Iterator[Any]) -> Any:
    import pyarrow

    try:
        return next(batches, None)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is no Parquet file that can be read: {_first_line(error)}")


def _numbers(batch: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    found = batch.column(name).to_numpy(zero_copy_only=False)
    if found.dtype == object:  # booleans of which some are null
        found = np.array([np.nan if value is None else value for value in found.tolist()], np.float64)
    return np.asarray(found, dtype)
