"""GloVe a batch of records at a time: in one thread, which is the reference, and split over worker processes two ways.

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

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.cluster.context import RoleContext
from manyhands.data.plan import split
from manyhands.group.shared import SharedGroup, warm
from manyhands.memory.segment import CACHE_LINE, Segment, round_up
from manyhands.words.glove_batch_kernels import (
    add_rows,
    batch_dots,
    batch_errors,
    step_rows,
    sum_gradients,
)
from manyhands.words.glove_crew import PATIENCE_S, Control, Plan, Report, run_crew
from manyhands.words.glove_model import GloveModel, Snapshot
from manyhands.words.glove_passes import Passes, Work
from manyhands.words.glove_reader import Block, RecordReader

__all__ = [
    "AllReduceStep",
    "BatchStep",
    "LocalStep",
    "TensorStep",
    "train_allreduce",
    "train_here",
    "train_tensor",
]


class BatchStep(ABC):
    """One worker's way to take a batch: its model and what it needs to move it."""

    def __init__(self, work: Work, dims: range | None = None, part: int | None = None) -> None:
        """`dims` are those kept here, `part` the most records that are read here of a batch."""
        self.work = work
        self.model = GloveModel(work.vocabulary_size, work.options, dims=dims).initialise()
        self.part = work.options.batch if part is None else part
        self._shape = self.model.shape()
        self._settings = work.options.settings()
        dtype, rows = work.options.numpy_dtype, min(2 * work.options.batch, 2 * work.vocabulary_size)
        self._errors = np.zeros(self.part, dtype)
        self._slots = np.full(2 * work.vocabulary_size, -1, np.int32)
        self._touched = np.empty(rows, np.int64)
        self._gradients = np.empty(rows * self.model.layout.accumulators, dtype)

    def records(self, size: int) -> range:
        """Which records of a batch of `size` are read here."""
        return range(size)

    @abstractmethod
    def take(self, block: Block) -> float:
        """Move the model by one batch, of which `block` is read here; the sum of costs that count here."""

    def close(self) -> None:
        """Let go of memory that others share."""
        self._errors = np.empty(0, self._errors.dtype)

    def _sum(self, block: Block, errors: NDArray[Any], touched: NDArray[Any], gradients: NDArray[Any]) -> int:
        rate = self.work.options.rate
        return int(
            sum_gradients(
                self.model.values, block[0], errors, self._shape, rate, self._slots, touched, gradients
            )
        )

    def _step(self, found: int) -> None:
        step_rows(self.model.values, self._touched[:found], self._gradients, self._shape, self._slots)


class LocalStep(BatchStep):
    """The reference: all of a batch in one thread."""

    def take(self, block: Block) -> float:
        """Errors, gradients, step."""
        errors = self._errors[: block[1].size // 2]
        batch_dots(self.model.values, block[0], self._shape, True, errors)
        cost = batch_errors(block[1], errors, self._settings)
        self._step(self._sum(block, errors, self._touched, self._gradients))
        return float(cost)


class TensorStep(BatchStep):
    """Some dimensions of all vectors."""

    def __init__(self, work: Work, group: SharedGroup) -> None:
        super().__init__(work, dims=split(work.options.dim, group.rank, group.world))
        self._group = group
        item = work.options.numpy_dtype.itemsize
        group.allocate(round_up(work.options.batch * item, CACHE_LINE), "partial inner products")
        self._bucket = group.bucket(0, work.options.batch, _torch_dtype(work))
        self._errors = self._bucket.tensor.numpy()

    def take(self, block: Block) -> float:
        """Partial products, their sum over all workers, and then as if alone."""
        count, first = block[1].size // 2, self._group.rank == 0
        self._errors[count:] = 0
        batch_dots(self.model.values, block[0], self._shape, first, self._errors[:count])
        self._group.all_reduce(self._bucket)
        errors = self._errors[:count]
        cost = batch_errors(block[1], errors, self._settings)
        self._step(self._sum(block, errors, self._touched, self._gradients))
        return float(cost) if first else 0.0


class AllReduceStep(BatchStep):
    """All parameters and a part of each batch."""

    def __init__(self, work: Work, group: SharedGroup) -> None:
        super().__init__(work, part=len(split(work.options.batch, 0, group.world)))
        self._group = group
        self._number = 0
        rows, span = 2 * self.part, self.model.layout.accumulators
        dtype = work.options.numpy_dtype
        ids = round_up(8 * (rows + 1), CACHE_LINE)
        area = ids + round_up(rows * span * dtype.itemsize, CACHE_LINE)
        self._common = group.share(2 * group.world * area, "rows of a batch and their gradients")
        self._areas = [
            [
                (self._common.array(at, rows + 1, np.int64), self._common.array(at + ids, rows * span, dtype))
                for at in range(turn * group.world * area, (turn + 1) * group.world * area, area)
            ]
            for turn in range(2)
        ]

    def records(self, size: int) -> range:
        """An even part, in worker order."""
        return split(size, self._group.rank, self._group.world)

    def take(self, block: Block) -> float:
        """This worker's rows into its area; then everyone's, in worker order."""
        areas = self._areas[self._number % 2]
        self._number += 1
        mine, gradients = areas[self._group.rank]
        errors = self._errors[: block[1].size // 2]
        batch_dots(self.model.values, block[0], self._shape, True, errors)
        cost = batch_errors(block[1], errors, self._settings)
        mine[0] = self._sum(block, errors, mine[1:], gradients)
        self._group.barrier()
        found = 0
        for rows, part in areas:
            found = add_rows(
                rows[1 : 1 + rows[0]], part, self._shape, found, self._slots, self._touched, self._gradients
            )
        self._step(found)
        return float(cost)

    def close(self) -> None:
        """Let go of the areas."""
        super().close()
        self._areas.clear()
        self._common.close()


def run_pass(step: BatchStep, reader: RecordReader, advanced: Callable[[int], None]) -> float:
    """Take all batches of a pass; the sum of costs that count here."""
    work, cost = step.work, 0.0
    for begin in range(0, work.num_records, work.options.batch):
        mine = step.records(min(work.options.batch, work.num_records - begin))
        cost += step.take(reader.read(begin + mine.start, len(mine)))
        advanced(len(mine))
    return cost


def train_here(work: Work, passes: Passes) -> None:
    """Train in this thread."""
    step = LocalStep(work)
    with RecordReader(work.path, step.part, work.vocabulary_size) as reader:
        for _ in range(work.options.passes):
            passes.finish(run_pass(step, reader, passes.advance), step.model.snapshot)


def train_allreduce(work: Work, passes: Passes) -> None:
    """Train with processes that each hold the model."""
    _train_in_processes(work, passes, AllReduceStep)


def train_tensor(work: Work, passes: Passes) -> None:
    """Train with processes that each hold some dimensions."""
    _train_in_processes(work, passes, TensorStep)


def _train_in_processes(
    work: Work, passes: Passes, kind: Callable[[Work, SharedGroup], AllReduceStep | TensorStep]
) -> None:
    warm([_torch_dtype(work)])
    with SharedGroup.create(work.workers) as files:
        plan = Plan(
            target=partial(_work, work=work, kind=kind),
            shared_bytes=2
            * work.vocabulary_size
            * (work.options.dim + 1)
            * work.options.numpy_dtype.itemsize,
            purpose="GloVe vectors",
            prepare=lambda segment: partial(_read, _Result(work, segment).rows, work.vocabulary_size),
            descriptors={"control": files.control, "arena": files.arena},
            on_failure=files.abort,
        )
        run_crew(work, passes, plan)


def _work(
    context: RoleContext,
    segment: Segment,
    report: Report,
    _control: Control,
    *,
    work: Work,
    kind: Callable[[Work, SharedGroup], AllReduceStep | TensorStep],
) -> None:
    """A worker process, from joining the group to the last pass."""
    result = _Result(work, segment)
    joined = SharedGroup(
        control=context.descriptor("control"),
        arena=context.descriptor("arena"),
        rank=context.rank,
        world=context.world,
        timeout_s=PATIENCE_S,
    )
    with (
        joined as group,
        closing(kind(work, group)) as step,
        RecordReader(work.path, step.part, work.vocabulary_size) as reader,
    ):
        for number in range(work.options.passes):
            report.begin_pass(number)
            cost = run_pass(step, reader, report.advance)
            if isinstance(step, TensorStep) or context.rank == 0:
                result.write(step.model)
            report.end_pass(cost)


class _Result:
    """Where workers leave the parameters after a pass: one row per word, then one per context; the bias is last."""

    def __init__(self, work: Work, segment: Segment) -> None:
        shape = 2 * work.vocabulary_size, work.options.dim + 1
        self.rows = segment.array(0, shape[0] * shape[1], work.options.numpy_dtype).reshape(shape)

    def write(self, model: GloveModel) -> None:
        """The dimensions that `model` has; who has the first has the biases too."""
        self.rows[:, model.dims.start : model.dims.stop] = model.rows[:, : model.layout.dim]
        if model.dims.start == 0:
            self.rows[:, -1] = model.rows[:, model.layout.lanes]


def _read(rows: NDArray[Any], vocabulary_size: int) -> Snapshot:
    word, context = rows[:vocabulary_size], rows[vocabulary_size:]
    return Snapshot(
        word=word[:, :-1].copy(),
        context=context[:, :-1].copy(),
        word_bias=word[:, -1].copy(),
        context_bias=context[:, -1].copy(),
    )


def _torch_dtype(work: Work) -> torch.dtype:
    return torch.from_numpy(np.empty(0, work.options.numpy_dtype)).dtype
