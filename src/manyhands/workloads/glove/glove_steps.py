"""What GloVe trains on, in which portions, and its compiled step on one memory: alone, or with others (HOGWILD!).

Niu, Recht, Ré, Wright (2011): two workers that meet in a row may lose each other's change to some items; with millions
of records and thousands of rows they seldom meet. Where an order is asked for, a worker goes through a gate for every
STEP records, from reading the rows to writing them.

Blocks of co-occurrence records from a file, read into one buffer that is used again and again.

Read rather than mapped: pages of a mapped file would count as memory of this process, however large the file.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.engine.kernel_task import KernelStep, Portion, Taken
from manyhands.errors import DataError
from manyhands.native.closeable import Closeable
from manyhands.native.group.gate import FREE, Turn, require_turn
from manyhands.native.segment import round_up
from manyhands.workloads.glove.cooccurrence_files import RECORD, record_count
from manyhands.workloads.glove.glove_kernels import STEP, first_bad, train_block, train_block_in_order
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.options import GloveOptions

__all__ = ["Block", "GloveWork", "RecordReader", "RecordStep", "count_records", "turn_number"]

_MOST = 1 << 16  # records of a step: a megabyte, some milliseconds
_PER_PASS = 16  # steps that a short file has, so that all workers have some


@dataclass(frozen=True, kw_only=True)
class GloveWork:
    """A file of shuffled records, and how to train on them."""

    path: Path
    num_records: int
    vocabulary_size: int
    glove: GloveOptions

    @cached_property
    def step_records(self) -> int:
        """Records of a step: a multiple of the batch, or of the records that pass a gate at once."""
        wanted = min(_MOST, -(-self.num_records // _PER_PASS))
        if self.glove.batch == 1:
            return round_up(wanted, STEP)
        return self.glove.batch * max(1, wanted // self.glove.batch)


def turn_number(num_records: int, portion: Portion) -> int:
    """The number at the gate of a portion's first STEP records, over all passes."""
    return portion.passed * -(-num_records // STEP) + portion.begin // STEP


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
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class RecordStep(KernelStep):
    """The published rule, record by record."""

    def __init__(self, work: GloveWork, model: GloveModel, turn: Turn) -> None:
        super().__init__(model)
        self._rows, self._shape = model, model.shape()
        self._settings = work.glove.settings()
        self._num_records = work.num_records
        self._turn = turn
        capacity = min(work.step_records, work.num_records)
        self._reader = RecordReader(work.path, capacity, work.vocabulary_size)

    def fill(self) -> None:
        self._rows.initialise()

    def take(self, portion: Portion) -> Taken:
        begin, count = time.monotonic_ns(), portion.end - portion.begin
        block = self._reader.read(portion.begin, count)
        read_ns = time.monotonic_ns() - begin
        if self._turn.order == FREE:
            cost = train_block(self._rows.values, *block, self._shape, self._settings)
        else:
            number = turn_number(self._num_records, portion)
            cost, status = train_block_in_order(
                self._rows.values, *block, self._shape, self._settings, tuple(self._turn), number
            )
            require_turn(status, self._turn)
        return Taken(loss=float(cost), weight=count, samples=count, input_ns=read_ns)

    def close(self) -> None:
        super().close()
        self._reader.close()
