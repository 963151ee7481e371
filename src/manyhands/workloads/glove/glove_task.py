"""GloVe as a task whose step is compiled: the rows of all words and contexts, records from a file, and who does what.

* `single`: one thread, the published rule record by record; with `batch` above 1 the reference of the three below.
* `hogwild`: threads or processes that all do the same on one memory, without locks.
* `allreduce`, `mirrored`: every worker holds the model and takes its part of each batch; rows touched travel.
* `tensor`: every worker holds some dimensions of every vector and takes all records; scalars travel.
* `ps`: parameter servers hold the rows; workers pull those of their part of a batch, and push what moves them.

Two workers that meet in a row under `hogwild` may lose each other's change to some items; with millions of records and
thousands of rows they seldom do (Niu, Recht, Ré, Wright, 2011). Under an order, a worker goes through a gate for every
STEP records, from reading the rows to writing them.

`allreduce` puts the rows touched and their summed gradients into one of its two areas of shared memory, and every
worker adds the areas up in worker order, so that all replicas stay the same, bit for bit, with one barrier per batch.
`tensor` sums partial inner products in worker order; the first worker adds the biases, of which all keep a copy.

Records are read rather than mapped: pages of a mapped file would count as memory of this process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.batches import split
from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask, Portion, Taken
from manyhands.errors import DataError, UserError, check_count
from manyhands.facts import Split, Truth
from manyhands.native.group.gate import FREE, CompiledGate, require_admitted
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, Segment, round_up
from manyhands.strategy import Strategy
from manyhands.workloads.glove import glove_kernels as kernels
from manyhands.workloads.glove.cooccurrence_files import RECORD, Block, GloveWork, RecordReader, record_count
from manyhands.workloads.glove.glove_kernels import STEP, warm, warm_in_order
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.options import GloveOptions, usual_batch

_MOST = 1 << 16  # records of a step: a megabyte, some milliseconds
_PER_PASS = 16  # steps that a short file has, so that all workers have some


@dataclass(frozen=True, kw_only=True)
class GloveTask(GloveWork, KernelTask):
    """Training on a file of shuffled records, in its order in every pass."""

    name: ClassVar[str] = "glove"
    record_bytes: ClassVar[float] = RECORD.itemsize

    any_batch: bool = False  # whether the batch is what a strategy usually has, instead of the one in `glove`
    in_order: bool = True  # whether workers may take turns, which is compiled apart

    @classmethod
    def of(cls, path: Path, vocabulary_size: int, glove: GloveOptions, any_batch: bool = False) -> GloveTask:
        check_count("vocabulary_size", vocabulary_size)
        if not record_count(path):
            raise DataError(f"{path} holds no records; count the words of a corpus first")
        return cls(
            path=Path(path).absolute(),
            num_records=record_count(path),
            vocabulary_size=vocabulary_size,
            glove=glove,
            any_batch=any_batch,
        )

    @property
    def samples(self) -> int:
        return self.num_records

    @cached_property
    def batch_size(self) -> int:  # a multiple of the batch, or of the records that pass a gate at once
        wanted = min(_MOST, -(-self.num_records // _PER_PASS))
        if self.glove.batch == 1:
            return round_up(wanted, STEP)
        return self.glove.batch * max(1, wanted // self.glove.batch)

    @property
    def epochs(self) -> int:
        return self.glove.passes

    @property
    def options(self) -> Mapping[str, Any]:
        kept = asdict(self.glove) | {"vocabulary_size": self.vocabulary_size}
        return {name: value for name, value in kept.items() if name not in ("passes", "allow_overload")}

    @property
    def advice(self) -> str:
        return f"lower the rate ({self.glove.rate:g}) or the batch ({self.glove.batch})"

    def model(self) -> GloveModel:
        return GloveModel(self.vocabulary_size, self.glove)

    def shared_model(self, segment: Segment, offset: int) -> GloveModel:
        return GloveModel(self.vocabulary_size, self.glove, segment=segment, offset=offset)

    @property
    def num_bytes(self) -> int:
        return GloveModel.num_bytes(self.vocabulary_size, self.glove)

    def step(self, model: nn.Module, gate: CompiledGate) -> KernelStep:
        assert isinstance(model, GloveModel), "a model of this task"
        batch = self.glove.batch
        return RecordStep(self, model, gate) if batch == 1 else BatchStep(self, model, model, batch)

    def step_on_copies(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        return AllReduceStep(self, group, control_bytes)

    def step_on_slices(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        return TensorStep(self, group, control_bytes)

    def warm(self) -> None:
        if self.glove.batch > 1:
            warm_batches(self.glove)
            return
        warm(self.glove.numpy_dtype)
        if self.in_order:
            warm_in_order(self.glove.numpy_dtype)

    def numbering(self, step: int) -> int:
        return gate_number(self.num_records, self.portion(step))

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        """Compiled but under `ps`, whose servers step by themselves."""
        batch = usual_batch(strategy) if self.any_batch else self.glove.batch
        task = replace(self, glove=replace(self.glove, batch=batch))
        check_together(strategy, task.glove, workers)
        if strategy.truth is not Truth.SERVERS:
            return replace(task, in_order=strategy.facts.record_order not in (None, "free"))
        from manyhands.workloads.glove.glove_server import glove_tables  # what the others never need

        return glove_tables(task, workers)


def check_together(strategy: Strategy, options: GloveOptions, workers: int) -> None:
    check_count("workers", workers)
    alone = strategy.most_workers == 1
    if alone and workers > 1:
        raise UserError(f"workers={workers}: {strategy.word} is one thread; use strategy=hogwild for more")
    if strategy.facts.record_order is not None:
        if options.batch > 1 and not alone:
            raise UserError(
                f"batch={options.batch}: {strategy.word} takes one record at a time; leave it at 1"
            )
        return
    if strategy.split is Split.DIMENSIONS and workers > options.dim:
        raise UserError(f"workers={workers}: tensor splits dim={options.dim}; use fewer workers")
    if not strategy.trains_compiled and strategy.truth is not Truth.SERVERS:
        allowed = "hogwild, single, mirrored, allreduce, tensor, ps"
        raise UserError(f"strategy {strategy} does not train glove; allowed: {allowed}")
    if options.batch == 1:
        raise UserError(
            f"batch=1: {strategy} works on batches of records, whose duplicate rows are summed; use a batch of 2 or "
            "more, such as 1024"
        )
    by_rows = strategy.truth is Truth.EVERYONE and strategy.split is Split.DATA
    if by_rows and strategy != type(strategy)():
        raise UserError(
            f"strategy {strategy}: glove sends every worker's changed rows to all workers, so it takes no algorithm "
            f"or buckets; use {strategy.word}"
        )


def gate_number(num_records: int, portion: Portion) -> int:
    """The number at the gate of a portion's first STEP records, over all passes."""
    return portion.passed * -(-num_records // STEP) + portion.begin // STEP


class RecordStep(KernelStep):
    """The published rule, record by record."""

    def __init__(self, work: GloveTask, model: GloveModel, gate: CompiledGate) -> None:
        super().__init__(model)
        self._rows, self._shape, self._settings = model, model.shape(), work.glove.settings()
        self._num_records, self._gate = work.num_records, gate
        capacity = min(work.batch_size, work.num_records)
        self._reader = RecordReader(work.path, capacity, work.vocabulary_size)

    def fill(self) -> None:
        self._rows.initialise()

    def take(self, portion: Portion) -> Taken:
        begin, count = time.monotonic_ns(), portion.end - portion.begin
        block = self._reader.read(portion.begin, count)
        read_ns = time.monotonic_ns() - begin
        given = self._rows.values, *block, self._shape, self._settings
        if self._gate.order == FREE:
            cost = kernels.train_block(*given)
        else:
            number = gate_number(self._num_records, portion)
            cost, status = kernels.train_block_in_order(*given, tuple(self._gate), number)
            require_admitted(status, self._gate)
        return Taken(loss=float(cost), weight=count, samples=count, input_ns=read_ns)

    def close(self) -> None:
        super().close()
        self._reader.close()


class BatchStep(KernelStep):
    """The batches of a portion, in one thread: the reference, and what the ways to share them have in common."""

    _with_bias = True  # whether products have both biases here

    def __init__(self, work: GloveTask, model: GloveModel, rows: GloveModel, part: int) -> None:
        """`rows` are those that are moved here, `part` the most records that are read here of a batch."""
        super().__init__(model)
        self.rows, self._shape, self._settings = rows, rows.shape(), work.glove.settings()
        self._batch, self._rate = work.glove.batch, work.glove.rate
        dtype, most = work.glove.numpy_dtype, min(2 * work.glove.batch, 2 * work.vocabulary_size)
        self._errors = np.zeros(part, dtype)
        self._slots = np.full(2 * work.vocabulary_size, -1, np.int32)
        self._touched = np.empty(most, np.int64)
        self._gradients = np.empty(most * rows.layout.accumulators, dtype)
        self._reader = RecordReader(work.path, part, work.vocabulary_size)
        self._bytes_sent = 0

    def take(self, portion: Portion) -> Taken:
        loss, samples, read_ns, messages, self._bytes_sent = 0.0, 0, 0, 0, 0
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
        cost, found = self._sum(block, self._touched, self._gradients)
        self._step(found)
        return cost

    def _sum(self, block: Block, touched: NDArray[Any], gradients: NDArray[Any]) -> tuple[float, int]:
        """The costs of the records, and how many rows they touch, whose gradients are summed into `gradients`."""
        values, shape, errors = self.rows.values, self._shape, self._errors[: block[1].size // 2]
        kernels.batch_dots(values, block[0], shape, self._with_bias, errors)
        self._add_dots(len(errors))
        cost, found = float(kernels.batch_errors(block[1], errors, self._settings)), (touched, gradients)
        given = values, block[0], errors, shape, self._rate, self._slots
        return cost, int(kernels.sum_gradients(*given, *found))

    def _add_dots(self, count: int) -> None:
        """Sum the first `count` products over workers, where each has a part of them."""

    def _step(self, found: int) -> None:
        kernels.step_rows(self.rows.values, self._touched[:found], self._gradients, self._shape, self._slots)

    def fill(self) -> None:
        self.rows.initialise()

    def close(self) -> None:
        self._errors = np.empty(0, self._errors.dtype)
        self._reader.close()
        super().close()


class TensorStep(BatchStep):
    """Some dimensions of all vectors; `model` is the whole, in memory that all workers see."""

    shares_memory = False

    def __init__(self, work: GloveTask, group: SharedGroup, control_bytes: int) -> None:
        size, options, offset = work.vocabulary_size, work.glove, round_up(control_bytes, CACHE_LINE)
        self.segment = group.share(offset + work.num_bytes, "vectors of all dimensions")
        whole = GloveModel(size, options, segment=self.segment, offset=offset)
        dims = split(options.dim, group.rank, group.world)
        super().__init__(work, whole, GloveModel(size, options, dims=dims), options.batch)
        self._whole, self._group, self._with_bias = whole, group, group.rank == 0
        self._item = options.numpy_dtype.itemsize
        group.allocate(round_up(options.batch * self._item, CACHE_LINE), "partial inner products")
        dtype = torch.from_numpy(np.empty(0, options.numpy_dtype)).dtype
        self._bucket = group.bucket(0, options.batch, dtype)
        self._errors = self._bucket.tensor.numpy()

    def counted(self, samples: int) -> tuple[int, int]:
        """All see all of them: the first counts the losses, and the records are shared out."""
        mine = len(split(samples, self._group.rank, self._group.world))
        return samples if self._with_bias else 0, mine

    def take_batch(self, block: Block) -> float:
        cost = super().take_batch(block)
        return cost if self._with_bias else 0.0

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

    def __init__(self, work: GloveTask, group: SharedGroup, control_bytes: int) -> None:
        model = GloveModel(work.vocabulary_size, work.glove)
        part = len(split(work.glove.batch, 0, group.world))
        super().__init__(work, model, model, part)
        self._group, self._number = group, 0
        most, span, dtype = 2 * part, model.layout.accumulators, work.glove.numpy_dtype
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
        cost, mine[0] = self._sum(block, mine[1:], gradients)
        self._bytes_sent += (self._group.world - 1) * int(mine[0]) * self._row_bytes
        self._group.barrier()
        found = 0
        for rows, part in areas:
            sums = self._slots, self._touched, self._gradients
            found = kernels.add_rows(rows[1 : 1 + rows[0]], part, self._shape, found, *sums)
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
