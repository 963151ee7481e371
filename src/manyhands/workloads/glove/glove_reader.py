"""Blocks of co-occurrence records from a file, read into one buffer that is used again and again.

Read rather than mapped: pages of a mapped file would count as memory of this process, however large the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError
from manyhands.native.closeable import Closeable
from manyhands.workloads.glove.cooccurrence_files import RECORD, record_count
from manyhands.workloads.glove.glove_kernels import first_bad

__all__ = ["Block", "RecordReader", "count_records"]

Block = tuple[NDArray[np.int32], NDArray[np.float64]]
"""The same records twice: as 4 int32 each (the first two are ids) and as 2 float64 each (the second is the count)."""


def count_records(path: Path) -> int:
    """How many records a file holds, at least one."""
    count = record_count(path)
    if count == 0:
        raise DataError(f"{path} holds no records; count the words of a corpus first")
    return count


class RecordReader(Closeable):
    """Reads up to `capacity` records at a time; a context manager, used by one thread.

    What `read` returns is valid until the next call. A DataError names the first record that cannot be trained on.
    """

    def __init__(self, path: Path, capacity: int, vocabulary_size: int) -> None:
        self._path = path
        self._vocabulary_size = vocabulary_size
        self._buffer = np.empty(capacity * RECORD.itemsize, np.uint8)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, begin: int, count: int) -> Block:
        """The records from `begin` on, all `count` of them; the system is asked for as many more meanwhile."""
        view, offset = self._buffer.data[: count * RECORD.itemsize], begin * RECORD.itemsize
        while view:
            got = os.preadv(self._file, [view], offset)
            if not got:
                raise DataError(f"{self._path} became shorter while it was read; count again")
            view, offset = view[got:], offset + got
        os.posix_fadvise(self._file, offset, count * RECORD.itemsize, os.POSIX_FADV_WILLNEED)
        used: NDArray[Any] = self._buffer[: count * RECORD.itemsize]
        block = used.view(np.int32), used.view(np.float64)
        bad = int(first_bad(*block, self._vocabulary_size))
        if bad >= 0:
            ids, counts = block
            raise DataError(
                f"{self._path}: record {begin + bad} is ({ids[4 * bad]}, {ids[4 * bad + 1]}, {counts[2 * bad + 1]:g}); "
                f"ids must be from 1 to {self._vocabulary_size}, the size of the vocabulary, and the count above 0"
            )
        return block

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
