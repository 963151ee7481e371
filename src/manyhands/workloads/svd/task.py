"""A truncated SVD as a task whose step is compiled: a Krylov space that grows with every pass over the rows.

* `single`: one thread goes through all rows.
* `allreduce`, `mirrored`: every worker goes through its part of each portion. After a pass their products, a thin
  matrix, are added up in worker order; worker 0 extends the space, which all share.

A step is a portion of a pass, so that a large file shows how far it is; what follows a pass follows its last step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from manyhands.data.batches import split
from manyhands.data.stored_matrix import OpenedMatrix, StoredMatrix
from manyhands.engine.kernel_task import AnyTask, KernelStep, KernelTask, Portion, Taken, check_shared_rows
from manyhands.native.group.gate import CompiledGate
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, Segment, round_up
from manyhands.strategy import Strategy
from manyhands.workloads.svd.krylov import DONE, Array, advance, begin
from manyhands.workloads.svd.options import Shape, SvdOptions, SvdSizes, sizes_of
from manyhands.workloads.svd.pass_sums import PassSums, RowPass, SvdMemory, combined_triangle
from manyhands.workloads.svd.product_kernels import warm

_STEP_BYTES: Final = 1 << 26  # a fraction of a second
_SAMPLES, _SAMPLE_ROWS = 16, 64


@dataclass(frozen=True, kw_only=True)
class SvdTask(KernelTask):
    """Decomposing a stored matrix; `workers` decides how large all may be. UserError where memory is too small."""

    name: ClassVar[str] = "svd"
    advice: ClassVar[str] = "scale the matrix down"

    matrix: StoredMatrix
    svd: SvdOptions
    workers: int = 1
    step_bytes: int = _STEP_BYTES  # of the matrix, that a worker goes through in a step

    def __post_init__(self) -> None:
        self.sizes  # noqa: B018 - before anything is started

    @property
    def sizes(self) -> SvdSizes:
        rows, columns, entries = self.matrix.rows, self.matrix.columns, self.matrix.entries
        shape = Shape(rows=rows, columns=columns, entries=entries, is_sparse=self.matrix.is_sparse)
        return sizes_of(shape, self.svd, self.workers)

    @property
    def samples(self) -> int:
        return self.matrix.rows

    @property
    def batch_size(self) -> int:
        return max(1, min(self.matrix.rows, int(self.workers * self.step_bytes / self.record_bytes)))

    @property
    def epochs(self) -> int:
        return self.svd.passes

    @property
    def options(self) -> Mapping[str, Any]:
        """All that changes what comes out, but how long it may train."""
        kept = asdict(self.svd) | asdict(self.sizes.shape)
        for name in ("passes", "allow_overload", "memory_bytes", "is_sparse"):
            del kept[name]
        return kept | {"most": self.sizes.most, "width": self.sizes.width}

    @property
    def record_bytes(self) -> float:
        return max(1.0, self.matrix.num_bytes / self.matrix.rows)

    def model(self) -> SvdMemory:
        return SvdMemory(np.zeros(SvdMemory.count(self.sizes)), self.sizes)

    def shared_model(self, segment: Segment, offset: int) -> SvdMemory:
        return SvdMemory(segment.array(offset, SvdMemory.count(self.sizes), np.float64), self.sizes)

    @property
    def num_bytes(self) -> int:
        return 8 * SvdMemory.count(self.sizes)

    def step(self, model: nn.Module, gate: CompiledGate) -> KernelStep:
        del gate
        assert isinstance(model, SvdMemory), "a model of this task"
        return RowStep(self, model)

    def step_on_copies(self, group: SharedGroup, control_bytes: int) -> KernelStep:
        return SharedRowsStep(self, group, control_bytes)

    def warm(self) -> None:
        if self.matrix.is_sparse:
            warm()

    def for_strategy(self, strategy: Strategy, workers: int) -> AnyTask:
        check_strategy(strategy, workers)
        return self


def check_strategy(strategy: Strategy, workers: int) -> None:
    why = "adds products up in shared memory once a pass, so it takes no algorithm or buckets"
    check_shared_rows(strategy, workers, "svd", f"{why}; use {strategy.word}")


class RowStep(KernelStep):
    """All rows in one thread; the sums are those of the model, unless others are given."""

    def __init__(self, work: SvdTask, model: SvdMemory, sums: Array | None = None) -> None:
        """`sums` are those of a pass, and then the triangle."""
        super().__init__(model)
        self._work, self._sizes, self._memory = work, work.sizes, model
        memory, count = model.under_way if sums is None else sums, PassSums.count(work.sizes)
        self._sums, self._triangle = PassSums(memory[:count], self._sizes), memory[count:]
        self._matrix: OpenedMatrix = work.matrix.opened(kept_in_memory=self._sizes.kept_in_memory)
        self._pass: tuple[int, RowPass] | None = None
        self._bytes_sent = 0
        # numpy's own threads know nothing of the other workers
        self._limits = threadpool_limits(torch.get_num_threads(), "blas")

    def take(self, portion: Portion) -> Taken:
        began, read_ns, self._bytes_sent = time.monotonic_ns(), 0, 0
        mine, one = self._mine(portion), self._row_pass(portion)
        for block in self._matrix.blocks(mine.start, mine.stop, self._sizes.block_bytes):
            read_ns += time.monotonic_ns() - began
            one.add(block)
            began = time.monotonic_ns()
        if portion.end == self._sizes.shape.rows:
            self._end_pass()
        count = len(mine)
        return Taken(
            loss=count * self._memory.space.error,
            weight=count,
            samples=count,
            input_ns=read_ns,
            bytes_sent=self._bytes_sent,
            messages_sent=1 if self._bytes_sent else 0,
        )

    @property
    def is_done(self) -> bool:
        return self._memory.space.kind == DONE

    def fill(self) -> None:
        """Draw the first block; where columns are centred, guess their means from some rows."""
        begin(self._memory.space, self._sizes, self._work.svd, self._guess())
        self._memory.under_way[:] = 0

    def close(self) -> None:
        self._pass = None
        self._matrix.close()
        self._limits.restore_original_limits()
        super().close()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self._pass = None

    def _mine(self, portion: Portion) -> range:
        """Which rows of a portion are gone through here."""
        return range(portion.begin, portion.end)

    def _end_pass(self) -> None:
        assert self._pass is not None, "a pass has ended"
        self._advance(self._sums, self._pass[1].triangle)
        self._pass = None

    def _row_pass(self, portion: Portion) -> RowPass:
        if self._pass is None or self._pass[0] != portion.passed:
            if portion.begin == 0:
                self._sums.clear()
                self._triangle[:] = 0
            space, width = self._memory.space, len(self._memory.space.block)
            triangle = self._triangle[: width * width].reshape(width, width)
            made = RowPass(space, self._sizes, self._sums, triangle, center=self._work.svd.center)
            self._pass = portion.passed, made
        return self._pass[1]

    def _advance(self, sums: PassSums, triangle: Array) -> None:
        totals = sums.totals(self._memory.space, center=self._work.svd.center, triangle=triangle)
        advance(self._memory.space, self._sizes, self._work.svd, totals)
        self._memory.under_way[:] = 0

    def _guess(self) -> Array:
        rows, columns = self._sizes.shape.rows, self._sizes.shape.columns
        if not self._work.svd.center:
            return np.zeros(columns)
        found, count = np.zeros(columns), 0
        for number in range(_SAMPLES):
            part = split(rows, number, _SAMPLES)
            end = min(part.stop, part.start + _SAMPLE_ROWS)
            for block in self._matrix.blocks(part.start, end, self._sizes.block_bytes):
                found += np.asarray(block.dense(columns)).sum(axis=0, dtype=np.float64)
                count += len(block)
        guess = found / count
        return np.where(np.isfinite(guess), guess, 0.0)  # what is wrong with a row, the pass will say


class SharedRowsStep(RowStep):
    """A part of each portion; products are added up once a pass, and worker 0 extends the space for all."""

    def __init__(self, work: SvdTask, group: SharedGroup, control_bytes: int) -> None:
        offset = round_up(control_bytes, CACHE_LINE)
        segment = group.share(offset + work.num_bytes, "the space of singular vectors")
        count, square = PassSums.count(work.sizes), work.sizes.width**2
        super().__init__(work, work.shared_model(segment, offset), np.zeros(count + square))
        self.segment, self._group = segment, group
        whole = count + group.world * square  # each writes its triangle in a place of its own
        group.allocate(round_up(8 * whole, CACHE_LINE), "products of a pass")
        self._bucket = group.bucket(0, whole, torch.float64)
        self._sent_bytes = 8 * (group.world - 1) * whole

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The sums of a pass that was under way continue with worker 0."""
        super().restore(state)
        count = len(self._sums.memory)
        self._sums.memory[:] = self._memory.under_way[:count]
        self._triangle[:] = self._memory.under_way[count:]

    def gather(self) -> None:
        if self._pass is None:
            return
        sums, triangle = self._added_up()
        if self._group.rank == 0:
            count = len(self._sums.memory)
            self._memory.under_way[:count] = sums.memory
            self._memory.under_way[count : count + triangle.size] = triangle.reshape(-1)
        self._group.barrier()

    def _mine(self, portion: Portion) -> range:
        mine = split(portion.end - portion.begin, self._group.rank, self._group.world)
        return range(portion.begin + mine.start, portion.begin + mine.stop)

    def _end_pass(self) -> None:
        sums, triangle = self._added_up()
        self._bytes_sent = self._sent_bytes
        if self._group.rank == 0:
            self._advance(sums, triangle)
        self._pass = None
        self._group.barrier()

    def _added_up(self) -> tuple[PassSums, Array]:
        """Collective: the sums of all, and one triangle of all rows."""
        assert self._pass is not None, "a pass is under way"
        found: Array = self._bucket.tensor.numpy()
        count, square = len(self._sums.memory), len(self._triangle)
        found[:count] = self._sums.memory
        found[count:] = 0
        place = count + self._group.rank * square
        found[place : place + square] = self._triangle
        self._group.all_reduce(self._bucket)
        mine = self._pass[1].triangle
        triangles = found[count:].reshape(self._group.world, square)[:, : mine.size]
        whole = combined_triangle([one.reshape(mine.shape) for one in triangles]) if mine.size else mine
        return PassSums(found[:count], self._sizes), whole

    def close(self) -> None:
        del self._bucket
        super().close()
