"""GloVe a batch of records at a time: in one thread, which is the reference, and split over workers two ways.

* `allreduce`: every worker holds all parameters and takes its part of each batch. The rows that it touched and their
  summed gradients go into an area of shared memory, and every worker adds the areas up in worker order, so that all
  replicas stay the same, bit for bit. Each has two areas in turn: one barrier per batch is enough.
* `tensor`: every worker holds some dimensions of all vectors, and takes every record. Partial inner products are
  summed in worker order in a shared bucket, one scalar per record; everything else is local. The first worker adds
  the biases, of which all keep the same copy.

The rule is that of `glove_batch_kernels`; the batches are the records in the order of the file, the last of a pass may
be short.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.batches import split
from manyhands.engine.kernel_task import KernelStep, Portion, Taken
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.workloads.glove.glove_kernels import (
    add_rows,
    batch_dots,
    batch_errors,
    step_rows,
    sum_gradients,
)
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.glove_steps import Block, GloveWork, RecordReader
from manyhands.workloads.glove.options import GloveOptions

__all__ = ["AllReduceStep", "AloneStep", "BatchStep", "TensorStep", "warm_batches"]


class BatchStep(KernelStep):
    """One worker's way to take the batches of a portion: the rows that it moves, and what it needs for that."""

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

    @abstractmethod
    def take_batch(self, block: Block) -> float:
        """Move the rows by one batch, of which `block` is read here; the sum of costs that count here."""

    def fill(self) -> None:
        self.rows.initialise()

    def close(self) -> None:
        """Close the file, and let go of memory that others share."""
        self._errors = np.empty(0, self._errors.dtype)
        self._reader.close()
        super().close()

    def _sum(self, block: Block, errors: NDArray[Any], touched: NDArray[Any], gradients: NDArray[Any]) -> int:
        return int(
            sum_gradients(
                self.rows.values, block[0], errors, self._shape, self._rate, self._slots, touched, gradients
            )
        )

    def _step(self, found: int) -> None:
        step_rows(self.rows.values, self._touched[:found], self._gradients, self._shape, self._slots)


class AloneStep(BatchStep):
    """The reference: all of a batch in one thread."""

    def __init__(self, work: GloveWork, model: GloveModel) -> None:
        super().__init__(work, model, model, work.glove.batch)

    def take_batch(self, block: Block) -> float:
        errors = self._errors[: block[1].size // 2]
        batch_dots(self.rows.values, block[0], self._shape, True, errors)
        cost = batch_errors(block[1], errors, self._settings)
        self._step(self._sum(block, errors, self._touched, self._gradients))
        return float(cost)


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
        """Partial products, their sum over all workers, and then as if alone."""
        count, first = block[1].size // 2, self._group.rank == 0
        self._errors[count:] = 0
        batch_dots(self.rows.values, block[0], self._shape, first, self._errors[:count])
        self._group.all_reduce(self._bucket)
        self._bytes_sent += (self._group.world - 1) * count * self._item
        errors = self._errors[:count]
        cost = batch_errors(block[1], errors, self._settings)
        self._step(self._sum(block, errors, self._touched, self._gradients))
        return float(cost) if first else 0.0

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
        self._areas = [
            [
                (common.array(at, most + 1, np.int64), common.array(at + ids, most * span, dtype))
                for at in range(
                    offset + turn * group.world * area, offset + (turn + 1) * group.world * area, area
                )
            ]
            for turn in range(2)
        ]

    def records(self, size: int) -> range:
        return split(size, self._group.rank, self._group.world)

    def take_batch(self, block: Block) -> float:
        """This worker's rows into its area; then everyone's, in worker order."""
        areas = self._areas[self._number % 2]
        self._number += 1
        mine, gradients = areas[self._group.rank]
        errors = self._errors[: block[1].size // 2]
        batch_dots(self.rows.values, block[0], self._shape, True, errors)
        cost = batch_errors(block[1], errors, self._settings)
        mine[0] = self._sum(block, errors, mine[1:], gradients)
        self._bytes_sent += (self._group.world - 1) * int(mine[0]) * self._row_bytes
        self._group.barrier()
        found = 0
        for rows, part in areas:
            found = add_rows(
                rows[1 : 1 + rows[0]], part, self._shape, found, self._slots, self._touched, self._gradients
            )
        self._step(found)
        return float(cost)

    def close(self) -> None:
        self._areas.clear()
        super().close()


def warm_batches(options: GloveOptions) -> None:
    """Compile what batches need into the cache, by working on none."""
    dtype = options.numpy_dtype
    values, shape = np.zeros(64, dtype), np.array([1, 8, 16, 32], np.int64)
    ids, counts, errors = np.empty(0, np.int32), np.empty(0, np.float64), np.empty(0, dtype)
    slots, touched, gradients = np.full(2, -1, np.int32), np.empty(2, np.int64), np.empty(32, dtype)
    batch_dots(values, ids, shape, True, errors)
    batch_errors(counts, errors, options.settings())
    sum_gradients(values, ids, errors, shape, options.rate, slots, touched, gradients)
    add_rows(touched[:0], gradients, shape, 0, slots, touched, gradients)
    step_rows(values, touched[:0], gradients, shape, slots)
