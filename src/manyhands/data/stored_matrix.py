"""A matrix whose rows several processes read pass after pass, in any order: memory-mapped files.

    with MatrixStore() as store:
        stored = store.keep(open_matrix("rows.txt.gz"))   # a plain value, good while the store is open
        for block in stored.opened().blocks(0, stored.rows, block_bytes):
            ...

An npy file whose rows lie one after another is used where it is; anything else is written to a temporary folder once.
"""

from __future__ import annotations

import errno
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.data.matrix_files import BLOCK_BYTES, MatrixBlock, MatrixFile, NpyMatrix, OnBytes
from manyhands.data.row_files import Rows
from manyhands.errors import DataError, ManyhandsError
from manyhands.native.closeable import Closeable

_CSR: Final[dict[str, Any]] = {"starts": np.int64, "indices": np.int32, "values": np.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """The location of a matrix: a plain value, which is sent to other processes."""

    path: str  # the file, or the folder of several
    rows: int
    columns: int
    entries: int  # numbers that are there; of a sparse matrix, those that are not left out
    dtype: str = ""  # of a table; empty for CSR
    offset: int = 0  # of a table in its file

    @property
    def is_sparse(self) -> bool:
        return not self.dtype

    @property
    def num_bytes(self) -> int:
        if self.is_sparse:
            return 8 * self.entries + 8 * self.rows
        return self.entries * np.dtype(self.dtype).itemsize

    def opened(self, *, kept_in_memory: bool = True) -> OpenedMatrix:
        """Mapped in this process; pages that were read leave its memory at once unless they are `kept_in_memory`."""
        return OpenedMatrix(self, kept_in_memory)


class MatrixStore(Closeable):
    """A context manager that makes matrices mappable; the files it wrote are removed on exit."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()

    def keep(
        self, file: MatrixFile, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> StoredMatrix:
        """The matrix of a file, without its labels; ManyhandsError says when the disk is full."""
        if isinstance(file, NpyMatrix) and file.is_mappable:
            return StoredMatrix(
                path=str(file.path.absolute()),
                rows=file.rows,
                columns=file.columns,
                entries=file.rows * file.columns,
                dtype=file.dtype.str,
                offset=file.offset,
            )
        return self._written(file.blocks(block_bytes, on_bytes), str(file.path))

    def keep_array(self, table: NDArray[Any]) -> StoredMatrix:
        return self._written(iter([MatrixBlock(begin=0, rows=np.ascontiguousarray(table))]), "a table")

    def _written(self, blocks: Iterator[MatrixBlock], name: str) -> StoredMatrix:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-matrix-")))
        try:
            first = next(blocks)
            if isinstance(first.rows, Rows):
                return _write_sparse(folder, chain([first], blocks))
            rows, columns, path = 0, first.rows.shape[1], folder / "table"
            with path.open("wb") as out:
                for block in chain([first], blocks):
                    assert not isinstance(block.rows, Rows), "one kind"
                    out.write(block.rows.data)
                    rows += len(block)
            entries, dtype = rows * columns, first.rows.dtype.str
            return StoredMatrix(path=str(path), rows=rows, columns=columns, entries=entries, dtype=dtype)
        except StopIteration:
            raise DataError(f"{name} holds no rows; give a matrix with at least one") from None
        except OSError as error:
            hint = "; free some space, or set TMPDIR to another disk" if error.errno == errno.ENOSPC else ""
            raise ManyhandsError(
                f"rows of {name} could not be kept in {folder}: {error.strerror}{hint}"
            ) from error


def _write_sparse(folder: Path, blocks: Iterator[MatrixBlock]) -> StoredMatrix:
    rows = entries = columns = 0
    with ExitStack() as stack:
        out: dict[str, BinaryIO] = {name: stack.enter_context((folder / name).open("wb")) for name in _CSR}
        out["starts"].write(np.zeros(1, np.int64).data)
        for block in blocks:
            part = block.rows
            assert isinstance(part, Rows), "one kind"
            out["starts"].write((part.starts[1:] + entries).data)
            out["indices"].write(part.indices.data)
            out["values"].write(part.values.data)
            rows, entries, columns = rows + len(part), entries + len(part.indices), max(columns, part.size)
    if not entries:
        raise DataError("no row has any entry; give a matrix that is not zero")
    return StoredMatrix(path=str(folder), rows=rows, columns=columns, entries=entries)


class OpenedMatrix:
    """A mapped matrix; `close` is idempotent."""

    def __init__(self, matrix: StoredMatrix, kept_in_memory: bool) -> None:
        self._columns, self._is_sparse = matrix.columns, matrix.is_sparse
        if matrix.is_sparse:
            counts = {"starts": matrix.rows + 1, "indices": matrix.entries, "values": matrix.entries}
            self._maps = [
                _Map(Path(matrix.path, name), np.dtype(kind), 0, counts[name], kept_in_memory)
                for name, kind in _CSR.items()
            ]
        else:
            path, dtype = Path(matrix.path), np.dtype(matrix.dtype)
            self._maps = [_Map(path, dtype, matrix.offset, matrix.entries, kept_in_memory)]

    def blocks(self, begin: int, end: int, block_bytes: int) -> Iterator[MatrixBlock]:
        """Rows `begin` to `end` in blocks of at most so many bytes (at least a row); each is good until the next."""
        if self._is_sparse:
            yield from self._sparse_blocks(begin, end, block_bytes)
            return
        (table,), width = self._maps, self._columns
        count = max(1, block_bytes // (width * table.dtype.itemsize))
        for first in range(begin, end, count):
            span = first * width, min(first + count, end) * width
            yield MatrixBlock(begin=first, rows=table.items(*span).reshape(-1, width))
            table.done(*span)

    def _sparse_blocks(self, begin: int, end: int, block_bytes: int) -> Iterator[MatrixBlock]:
        starts, indices, values = self._maps
        most = max(1, block_bytes // 16)  # rows, and entries
        while begin < end:
            begins = starts.items(begin, min(end, begin + most) + 1)
            first_entry = int(begins[0])
            fit = int(np.searchsorted(begins, first_entry + most, side="right")) - 1
            last = begin + max(1, fit)
            last_entry = int(begins[last - begin])
            nothing = np.zeros(last - begin, np.float32)
            rows = Rows(
                starts=begins[: last - begin + 1] - first_entry,
                indices=indices.items(first_entry, last_entry),
                values=values.items(first_entry, last_entry),
                labels=nothing,
                weights=nothing,
                size=self._columns,
            )
            yield MatrixBlock(begin=begin, rows=rows)
            indices.done(first_entry, last_entry)
            values.done(first_entry, last_entry)
            starts.done(begin, last)
            begin = last

    def close(self) -> None:
        """Unmap, once no block is in use."""
        for mapped in self._maps:
            mapped.close()


class _Map:
    """A file of items, mapped for reading."""

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int, count: int, kept: bool) -> None:
        self.dtype, self._offset, self._kept = dtype, offset, kept
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be mapped: {error}") from error
        if len(self._map) < offset + count * dtype.itemsize:
            raise DataError(f"{path} has become shorter since it was opened; do not change it during a run")
        self._items: NDArray[Any] | None = np.frombuffer(self._map, dtype, count, offset)

    def items(self, begin: int, end: int) -> NDArray[Any]:
        assert self._items is not None, "not closed"
        return self._items[begin:end]

    def done(self, begin: int, end: int) -> None:
        """These are not needed for now; whole pages of them go."""
        if self._kept:
            return
        first = (self._offset + begin * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        last = (self._offset + end * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        self._items = None
        with suppress(BufferError):  # a block is still in use; the map goes with it
            self._map.close()
