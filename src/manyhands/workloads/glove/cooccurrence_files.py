"""Co-occurrence records on disk, as Stanford's tools write them: two int32 and a float64, 16 bytes, no header.

Word numbers count from 1, in the order of the vocabulary. Files are written under a temporary name in a folder beside
their place, which is removed whatever happens, and moved to their own name when they are whole.

They are put in random order also where they do not fit in memory: each goes to a bucket drawn for it, and each bucket,
which does fit, is shuffled by itself. The buckets one after the other are then a uniformly random order of all (Rao
1961, Sandelius 1962). Records that fit in memory are one bucket.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.store.atomic import WriteFailed, reason
from manyhands.errors import DataError, UserError, format_bytes
from manyhands.native.closeable import Closeable
from manyhands.observe.draw.bars import BarPhase, Bars
from manyhands.workloads.glove.count_kernels import deal_pairs, shuffle_pairs
from manyhands.workloads.glove.glove_kernels import first_bad
from manyhands.workloads.glove.options import GloveOptions

RECORD = np.dtype([("word", "<i4"), ("context", "<i4"), ("count", "<f8")])
_WRITE_BYTES = 1 << 30  # one write takes less than 2 GiB on Linux


def record_count(path: Path | str) -> int:
    """How many records a file holds; a DataError where its size is not a multiple of theirs."""
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    if size % RECORD.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is not a multiple of {RECORD.itemsize}: it is damaged or holds no "
            "co-occurrence records (int32 word, int32 context, float64 count)"
        )
    return size // RECORD.itemsize


def open_records(path: Path | str) -> NDArray[Any]:
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


@dataclass(frozen=True, kw_only=True)
class GloveWork:
    """A file of shuffled records, and how to train on them."""

    path: Path
    num_records: int
    vocabulary_size: int
    glove: GloveOptions


Block = tuple[NDArray[np.int32], NDArray[np.float64]]
"""The same records twice: as 4 int32 each (the first two are ids) and as 2 float64 each (the second is the count)."""


class RecordReader(Closeable):
    """Reads up to `capacity` records at a time; a context manager, used by one thread.

    What `read` returns is valid until the next call. A DataError names the first record that cannot be trained on.
    """

    def __init__(self, path: Path, capacity: int, vocabulary_size: int) -> None:
        self._path, self._vocabulary_size = path, vocabulary_size
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
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class RecordWriter(Closeable):
    """Writes records one after the other into a new file, or to the end of one with `append`; a context manager.

    A disk that takes no more raises WriteFailed with a sentence; whoever made the folder removes what is there.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path, self.written, how = path, 0, os.O_APPEND if append else os.O_TRUNC
        with self._disk_errors(0):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o666)

    def write(self, records: NDArray[Any]) -> None:
        rest = records.view(np.uint8).data
        with self._disk_errors(self.written + len(records)):
            while rest:
                rest = rest[os.write(self._file, rest[:_WRITE_BYTES]) :]
        self.written += len(records)

    @contextmanager
    def _disk_errors(self, records: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteFailed(
                f"{self.path} could not be written beyond {records * RECORD.itemsize:,} bytes: {reason(error)}; "
                "temporary files are removed; free some space, write to a larger disk, or raise min_count"
            ) from error

    def close(self) -> None:
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


_MOST_PIECE = 1 << 20
_MOST_BUCKETS = 4096


def shuffle_records(
    source: Path, out: Path, *, seed: int = 0, memory_bytes: int = 2 << 30, bars: Bars | None = None
) -> None:
    """Write the records of `source` to `out` in an order drawn from `seed`, uniform over all orders.

    `source` and `out` may be the same file. At most `memory_bytes` are used for records; what does not fit goes
    through temporary files beside `out`, which are removed whatever happens.
    """
    count, bars = record_count(source), bars or Bars()
    # Records to deal at once: two buffers of a third of the memory each, and what was drawn for them.
    at_once = max(1, min(_MOST_PIECE, memory_bytes // (3 * RECORD.itemsize)))
    buckets = _buckets(count, memory_bytes)
    if buckets > min(_MOST_BUCKETS, at_once):
        raise UserError(
            f"memory={format_bytes(memory_bytes)} is too little to shuffle {count:,} records "
            f"({format_bytes(count * RECORD.itemsize)}); give more"
        )
    state = np.array([seed & (1 << 64) - 1], np.uint64)
    with temporary_folder(out) as folder, RecordWriter(folder / "shuffled") as writer:
        with bars.phase("shuffling", count * (1 if buckets == 1 else 2), "records") as phase:
            parts = [source]
            if buckets > 1:
                parts = [folder / f"bucket-{number}" for number in range(buckets)]
                _scatter(source, parts, at_once, state, phase)
            for part in parts:
                records = np.empty(record_count(part) if part.exists() else 0, RECORD)
                if len(records):
                    with _opened(part) as file:
                        if read_records(file.fileno(), records) != len(records):
                            raise DataError(f"{part} became shorter while it was read")
                shuffle_pairs(*_halves(records), state)
                writer.write(records)
                phase.advance(len(records))
                if part != source:
                    part.unlink(missing_ok=True)  # chance may leave a bucket empty
        writer.path.replace(out)


def _buckets(count: int, memory_bytes: int) -> int:
    """How many, so that each fits with much room for chance."""
    num_bytes = count * RECORD.itemsize
    return 1 if num_bytes <= memory_bytes else -(-num_bytes * 3 // (2 * max(1, memory_bytes)))


def _scatter(source: Path, parts: list[Path], at_once: int, state: NDArray[Any], phase: BarPhase) -> None:
    piece, sorted_piece = np.empty(at_once, RECORD), np.empty(at_once, RECORD)
    ends, chosen = np.empty(len(parts), np.int64), np.empty(at_once, np.int32)
    # Files are opened for each piece, so that the system's limit on open files does not matter.
    with _opened(source) as file:
        while found := read_records(file.fileno(), piece):
            deal_pairs(*_halves(piece[:found]), *_halves(sorted_piece[:found]), chosen, ends, state)
            start = 0
            for part, end in zip(parts, ends.tolist(), strict=True):
                if end > start:
                    with RecordWriter(part, append=True) as writer:
                        writer.write(sorted_piece[start:end])
                start = end
            phase.advance(found)


def _opened(path: Path) -> FileIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error


def _halves(records: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same memory as pairs of int64, which compiled code moves fastest: words and bits of the count."""
    pairs = records.view(np.int64)
    return pairs[0::2], pairs[1::2]
