"""Co-occurrence records on disk, as Stanford's tools write them: two int32 and a float64, 16 bytes, no header.

Word numbers count from 1, in the order of the vocabulary. Files are written under a temporary name in a folder beside
their place, which is removed whatever happens, and moved to their own name when they are whole.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.data.store.atomic import WriteFailed, reason
from manyhands.errors import DataError

__all__ = ["RECORD", "RecordWriter", "open_records", "read_records", "record_count", "temporary_folder"]

RECORD = np.dtype([("word", "<i4"), ("context", "<i4"), ("count", "<f8")])
_WRITE_BYTES = 1 << 30  # one write takes less than 2 GiB on Linux


def record_count(path: Path | str) -> int:
    """How many records a file holds; a DataError where its size is no whole number of them."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    if size % RECORD.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is no multiple of {RECORD.itemsize}: it is damaged, or it holds no "
            "co-occurrence records (int32 word, int32 context, float64 count)"
        )
    return size // RECORD.itemsize


def open_records(path: Path | str) -> NDArray[Any]:
    """The records of a file, read-only and mapped: a memmap of `RECORD`."""
    if record_count(path) == 0:
        raise DataError(f"{path} holds no co-occurrence records; it is empty")
    return np.memmap(path, RECORD, mode="r")


def read_records(file: int, buffer: NDArray[Any]) -> int:
    """Fill `buffer` from a descriptor as far as its file goes; return how many records came."""
    room, at = buffer.view(np.uint8).data, 0
    while at < len(room):
        got = os.readv(file, [room[at : at + _WRITE_BYTES]])
        if not got:
            break
        at += got
    return at // RECORD.itemsize


class RecordWriter:
    """Writes records one after the other into a new file, or to the end of one with `append`; a context manager.

    A disk that takes no more raises WriteFailed with a sentence; whoever made the folder removes what is there.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        self.written = 0
        self._how = os.O_APPEND if append else os.O_TRUNC
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | self._how | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _failed(self.path, error, 0) from error
        return self

    def write(self, records: NDArray[Any]) -> None:
        """Append an array of `RECORD`."""
        rest = records.view(np.uint8).data
        try:
            while rest:
                rest = rest[os.write(self._file, rest[:_WRITE_BYTES]) :]
        except OSError as error:
            raise _failed(self.path, error, self.written + len(records)) from error
        self.written += len(records)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """A folder `.tmp-…` in the folder of `beside`, removed at the end with all that is in it."""
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".tmp-", dir=beside.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise WriteFailed(f"{beside.parent} could not be written: {reason(error)}") from error
    with folder as name:
        yield Path(name)


def _failed(path: Path, error: OSError, records: int) -> WriteFailed:
    return WriteFailed(
        f"the disk took no more than {records * RECORD.itemsize:,} bytes of {path}: {reason(error)}; temporary files "
        "are removed; free some space, write to a larger disk, or raise the least count of a word"
    )
