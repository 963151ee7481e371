"""Records in random order, also where they do not fit in memory.

Each record goes to a bucket drawn for it, and each bucket, which does fit, is shuffled by itself: the buckets one
after the other are then a uniformly random order of all (Rao 1961, Sandelius 1962). Records that fit in memory are
one bucket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from manyhands.draw.bars import BarPhase, Bars
from manyhands.errors import DataError, UserError, format_bytes
from manyhands.store.atomic import reason
from manyhands.words.records import RECORD, RecordWriter, read_records, record_count, temporary_folder

__all__ = ["shuffle_records"]

_MOST_PIECE = 1 << 20
_MOST_BUCKETS = 4096
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_ONE, _MIX_TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_MASK = (1 << 64) - 1


def shuffle_records(
    source: Path,
    out: Path,
    *,
    seed: int = 0,
    memory_bytes: int = 2 * 1024**3,
    bars: Bars | None = None,
) -> None:
    """Write the records of `source` to `out` in an order drawn from `seed`, uniform over all orders.

    `source` and `out` may be the same file. At most `memory_bytes` are used for records; what does not fit goes
    through temporary files beside `out`, which are removed whatever happens.
    """
    count = record_count(source)
    buckets = _buckets(count, memory_bytes)
    bars = bars or Bars()
    state = np.array([seed & _MASK], np.uint64)
    with temporary_folder(out) as folder, RecordWriter(folder / "shuffled") as writer:
        with bars.phase("shuffling", count * (1 if buckets == 1 else 2), "records") as phase:
            parts = [source]
            if buckets > 1:
                parts = [folder / f"bucket-{number}" for number in range(buckets)]
                _scatter(source, parts, memory_bytes, state, phase)
            for part in parts:
                records = _whole(part)
                _shuffle(*_halves(records), state)
                writer.write(records)
                phase.advance(len(records))
                if part != source:
                    part.unlink(missing_ok=True)  # chance may leave a bucket empty
        writer.path.replace(out)


def _buckets(count: int, memory_bytes: int) -> int:
    """How many buckets, so that each fits with much room for chance."""
    if count * RECORD.itemsize <= memory_bytes:
        return 1
    buckets = -(-count * RECORD.itemsize * 3 // (2 * max(1, memory_bytes)))
    if buckets > _MOST_BUCKETS or buckets > _piece_records(memory_bytes):
        raise UserError(
            f"memory={format_bytes(memory_bytes)} is too little to shuffle {count:,} records "
            f"({format_bytes(count * RECORD.itemsize)}); give more"
        )
    return buckets


def _piece_records(memory_bytes: int) -> int:
    """How many records to deal at once: two buffers of a third of the memory each, and what was drawn for them."""
    return max(1, min(_MOST_PIECE, memory_bytes // (3 * RECORD.itemsize)))


def _scatter(
    source: Path, parts: list[Path], memory_bytes: int, state: NDArray[Any], phase: BarPhase
) -> None:
    """Each record of `source` to the end of a part drawn for it."""
    piece = np.empty(_piece_records(memory_bytes), RECORD)
    sorted_piece = np.empty_like(piece)
    ends = np.empty(len(parts), np.int64)
    chosen = np.empty(len(piece), np.int32)
    # Files are opened for each piece, so that their number is no matter of the system's limit.
    with _reading(source) as file:
        while found := read_records(file, piece):
            _deal(*_halves(piece[:found]), *_halves(sorted_piece[:found]), chosen, ends, state)
            start = 0
            for part, end in zip(parts, ends.tolist(), strict=True):
                if end > start:
                    with RecordWriter(part, append=True) as writer:
                        writer.write(sorted_piece[start:end])
                start = end
            phase.advance(found)


def _whole(path: Path) -> NDArray[Any]:
    records = np.empty(record_count(path) if path.exists() else 0, RECORD)
    if len(records):
        with _reading(path) as file:
            if read_records(file, records) != len(records):
                raise DataError(f"{path} became shorter while it was read")
    return records


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    try:
        yield file
    finally:
        os.close(file)


def _halves(records: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same memory as pairs of int64, which compiled code moves fastest: words and bits of the count."""
    pairs = records.view(np.int64)
    return pairs[0::2], pairs[1::2]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _below(limit: int, state: Any) -> Any:
    """A number from 0 to limit - 1: SplitMix64 (Steele, Lea, Flood 2014), its upper 53 bits as a fraction."""
    state[0] += _STEP
    mixed = state[0]
    mixed = (mixed ^ (mixed >> _S30)) * _MIX_ONE
    mixed = (mixed ^ (mixed >> _S27)) * _MIX_TWO
    mixed ^= mixed >> _S31
    return np.int64(np.float64(mixed >> _S11) * 2.0**-53 * limit)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _shuffle(pairs: Any, bits: Any, state: Any) -> None:
    """Fisher and Yates, in place."""
    for last in range(pairs.size - 1, 0, -1):
        other = _below(last + 1, state)
        pairs[last], pairs[other] = pairs[other], pairs[last]
        bits[last], bits[other] = bits[other], bits[last]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _deal(pairs: Any, bits: Any, out_pairs: Any, out_bits: Any, chosen: Any, ends: Any, state: Any) -> None:
    """Draw a part for each record and put those of one part together; `ends` says where each part ends."""
    ends[:] = 0
    for index in range(pairs.size):
        chosen[index] = _below(ends.size, state)
        ends[chosen[index]] += 1
    for part in range(1, ends.size):
        ends[part] += ends[part - 1]
    for index in range(pairs.size - 1, -1, -1):
        ends[chosen[index]] -= 1
        out_pairs[ends[chosen[index]]] = pairs[index]
        out_bits[ends[chosen[index]]] = bits[index]
    for part in range(ends.size - 1):  # each end has moved to its start, which is the end of the part before
        ends[part] = ends[part + 1]
    ends[-1] = pairs.size
