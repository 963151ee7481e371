"""What GloVe trains on, in which portions, and its compiled steps: record by record, or a batch at a time.

* Record by record on one memory, alone or with others (HOGWILD!: Niu, Recht, Ré, Wright, 2011): two workers that meet
in
  a row may lose each other's change to some items; with millions of records and thousands of rows they seldom meet.
  Where an order is asked for, a worker goes through a gate for every STEP records, from reading the rows to writing
  them.
* Batches in one thread, which is the reference of the two below.
* `allreduce`: every worker holds all parameters and takes its part of each batch. The rows that it touched and their
  summed gradients go into an area of shared memory, and every worker adds the areas up in worker order, so that all
  replicas stay the same, bit for bit. Each has two areas in turn: one barrier per batch is enough.
* `tensor`: every worker holds some dimensions of all vectors, and takes every record. Partial inner products are
  summed in worker order in a shared bucket, one scalar per record; everything else is local. The first worker adds
  the biases, of which all keep the same copy.

Batches are the records in the order of the file, the last of a pass may be short. Records are read rather than mapped:
pages of a mapped file would count as memory of this process, however large the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.batch_plan import split
from manyhands.engine.kernel_task import KernelStep, Portion, Taken
from manyhands.errors import DataError
from manyhands.native.closeable import Closeable
from manyhands.native.group.gate import FREE, Turn, require_turn
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.workloads.glove import glove_kernels as kernels
from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.glove_kernels import STEP
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.options import GloveOptions

__all__ = [
    "AllReduceStep",
    "BatchStep",
    "GloveWork",
    "RecordReader",
    "RecordStep",
    "TensorStep",
    "warm_batches",
]

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
        """Records of a step: a whole number of batches, or of records that pass a gate at once."""
        wanted = min(_MOST, -(-self.num_records // _PER_PASS))
        if self.glove.batch == 1:
            return round_up(wanted, STEP)
        return self.glove.batch * max(1, wanted // self.glove.batch)


def turn_number(num_records: int, portion: Portion) -> int:
    """The number at the gate of a portion's first STEP records, over all passes."""
    return portion.passed * -(-num_records // STEP) + portion.begin // STEP


Block = tuple[NDArray[np.int32], NDArray[np.float64]]
"""The same records twice: as 4 int32 each (the first two are ids) and as 2 float64 each (the second is the count)."""


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
        bad = int(kernels.first_bad(*block, self._vocabulary_size))
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
        given = self._rows.values, *block, self._shape, self._settings
        if self._turn.order == FREE:
            cost = kernels.train_block(*given)
        else:
            number = turn_number(self._num_records, portion)
            cost, status = kernels.train_block_in_order(*given, tuple(self._turn), number)
            require_turn(status, self._turn)
        return Taken(loss=float(cost), weight=count, samples=count, input_ns=read_ns)

    def close(self) -> None:
        super().close()
        self._reader.close()


class BatchStep(KernelStep):
    """The batches of a portion, in one thread: the reference, and what the ways to share them have in common."""

    def __init__(self, work: GloveWork, model: GloveModel, rows: GloveModel, part: int) -> None:
        """`rows` are those that are moved here, `part` the most records that are read here of a batch."""
        super().__init__(model)
        self.rows = rows
        self._batch, self._rate = work.glove.batch, work.glove.rate
        self._shape = rows.shape()
        self._settings = work.glove.settings()
        dtype, most = work.glove.numpy_dtype, min(2 * work.glove.batch, 2 * work.vocabulary_size)
        self._errors = np.zeros(part, dtype)
        self._slots = np.full(2 * work.vocabulary_size, -1, np.int32)
        self._touched = np.empty(most, np.int64)
        self._gradients = np.empty(most * rows.layout.accumulators, dtype)
        self._reader = RecordReader(work.path, part, work.vocabulary_size)
        self._bytes_sent = 0

    def take(self, portion: Portion) -> Taken:
        loss, samples, read_ns, messages = 0.0, 0, 0, 0
        self._bytes_sent = 0
        for begin in range(portion.begin, portion.end, self._batch):
            mine = self.records(min(self._batch, portion.end - begin))
            asked_ns = time.monotonic_ns()
            block = self._reader.read(begin + mine.start, len(mine))
            read_ns += time.monotonic_ns() - asked_ns
            loss += self.take_batch(block)
            samples += len(mine)
            messages += 1
        weight, counted = self.counted(samples)
        return Taken(
            loss=loss,
            weight=weight,
            samples=counted,
            input_ns=read_ns,
            bytes_sent=self._bytes_sent,
            messages_sent=messages if self._bytes_sent else 0,
        )

    def records(self, size: int) -> range:
        """Which records of a batch of `size` are read here."""
        return range(size)

    def counted(self, samples: int) -> tuple[int, int]:
        """What losses here are divided by, and how many of the records read count as this worker's."""
        return samples, samples

    def take_batch(self, block: Block) -> float:
        """Move the rows by one batch, of which `block` is read here; the sum of costs that count here."""
        cost, errors = self._errors_of(block)
        self._step(self._sum(block, errors, self._touched, self._gradients))
        return cost

    def _errors_of(self, block: Block, *, with_bias: bool = True) -> tuple[float, NDArray[Any]]:
        errors = self._errors[: block[1].size // 2]
        kernels.batch_dots(self.rows.values, block[0], self._shape, with_bias, errors)
        self._add_dots(len(errors))
        return float(kernels.batch_errors(block[1], errors, self._settings)), errors

    def _add_dots(self, count: int) -> None:
        """Sum the first `count` products over workers, where each has a part of them."""

    def fill(self) -> None:
        self.rows.initialise()

    def close(self) -> None:
        self._errors = np.empty(0, self._errors.dtype)
        self._reader.close()
        super().close()

    def _sum(self, block: Block, errors: NDArray[Any], touched: NDArray[Any], gradients: NDArray[Any]) -> int:
        found = touched, gradients
        values, shape = self.rows.values, self._shape
        return int(kernels.sum_gradients(values, block[0], errors, shape, self._rate, self._slots, *found))

    def _step(self, found: int) -> None:
        kernels.step_rows(self.rows.values, self._touched[:found], self._gradients, self._shape, self._slots)


class TensorStep(BatchStep):
    """Some dimensions of all vectors; `model` is the whole, in memory that all workers see."""

    shares_memory = False

    def __init__(self, work: GloveWork, group: SharedGroup, control_bytes: int) -> None:
        size, options = work.vocabulary_size, work.glove
        whole_bytes = GloveModel.num_bytes(size, options)
        offset = round_up(control_bytes, CACHE_LINE)
        self.segment = group.share(offset + whole_bytes, "vectors of all dimensions")
        whole = GloveModel(size, options, segment=self.segment, offset=offset)
        dims = split(options.dim, group.rank, group.world)
        super().__init__(work, whole, GloveModel(size, options, dims=dims), options.batch)
        self._whole, self._group = whole, group
        self._item = options.numpy_dtype.itemsize
        group.allocate(round_up(options.batch * self._item, CACHE_LINE), "partial inner products")
        dtype = torch.from_numpy(np.empty(0, options.numpy_dtype)).dtype
        self._bucket = group.bucket(0, options.batch, dtype)
        self._errors = self._bucket.tensor.numpy()

    def counted(self, samples: int) -> tuple[int, int]:
        """All see all of them: the first counts the losses, and the records are shared out."""
        first = self._group.rank == 0
        return samples if first else 0, len(split(samples, self._group.rank, self._group.world))

    def take_batch(self, block: Block) -> float:
        cost, errors = self._errors_of(block, with_bias=self._group.rank == 0)
        self._step(self._sum(block, errors, self._touched, self._gradients))
        return cost if self._group.rank == 0 else 0.0

    def _add_dots(self, count: int) -> None:
        self._errors[count:] = 0
        self._group.all_reduce(self._bucket)
        self._bytes_sent += (self._group.world - 1) * count * self._item

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._whole.load_state_dict(state)  # all workers write the same
        for whole, mine in self._whole.columns_of(self.rows):
            mine[:] = whole

    def gather(self) -> None:
        """Everyone writes its dimensions; of the biases all have the same copy, and the first writes them."""
        for number, (whole, mine) in enumerate(self._whole.columns_of(self.rows)):
            if number % 2 == 0 or self._group.rank == 0:
                whole[:] = mine
        self._group.barrier()


class AllReduceStep(BatchStep):
    """All parameters and a part of each batch."""

    shares_memory = False

    def __init__(self, work: GloveWork, group: SharedGroup, control_bytes: int) -> None:
        model = GloveModel(work.vocabulary_size, work.glove)
        part = len(split(work.glove.batch, 0, group.world))
        super().__init__(work, model, model, part)
        self._group = group
        self._number = 0
        most, span = 2 * part, model.layout.accumulators
        dtype = work.glove.numpy_dtype
        ids = round_up(8 * (most + 1), CACHE_LINE)
        area = ids + round_up(most * span * dtype.itemsize, CACHE_LINE)
        offset = round_up(control_bytes, CACHE_LINE)
        common = group.share(offset + 2 * group.world * area, "rows of a batch and their gradients")
        self.segment = common
        self._row_bytes = 8 + span * dtype.itemsize
        every = [
            (common.array(at, most + 1, np.int64), common.array(at + ids, most * span, dtype))
            for at in range(offset, offset + 2 * group.world * area, area)
        ]
        self._areas = [every[: group.world], every[group.world :]]

    def records(self, size: int) -> range:
        return split(size, self._group.rank, self._group.world)

    def take_batch(self, block: Block) -> float:
        areas = self._areas[self._number % 2]
        self._number += 1
        mine, gradients = areas[self._group.rank]
        cost, errors = self._errors_of(block)
        mine[0] = self._sum(block, errors, mine[1:], gradients)
        self._bytes_sent += (self._group.world - 1) * int(mine[0]) * self._row_bytes
        self._group.barrier()
        found = 0
        for rows, part in areas:
            found = kernels.add_rows(
                rows[1 : 1 + rows[0]], part, self._shape, found, self._slots, self._touched, self._gradients
            )
        self._step(found)
        return cost

    def close(self) -> None:
        self._areas.clear()
        super().close()


def warm_batches(options: GloveOptions) -> None:
    dtype = options.numpy_dtype
    values, shape = np.zeros(64, dtype), np.array([1, 8, 16, 32], np.int64)
    ids, counts, errors = np.empty(0, np.int32), np.empty(0, np.float64), np.empty(0, dtype)
    slots, touched, gradients = np.full(2, -1, np.int32), np.empty(2, np.int64), np.empty(32, dtype)
    kernels.batch_dots(values, ids, shape, True, errors)
    kernels.batch_errors(counts, errors, options.settings())
    kernels.sum_gradients(values, ids, errors, shape, options.rate, slots, touched, gradients)
    kernels.add_rows(touched[:0], gradients, shape, 0, slots, touched, gradients)
    kernels.step_rows(values, touched[:0], gradients, shape, slots)
