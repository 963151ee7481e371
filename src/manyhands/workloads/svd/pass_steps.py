"""A pass over the rows of a matrix, alone or together: portions go into sums, and its end extends the space."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from manyhands.data.batches import split
from manyhands.data.stored_matrix import OpenedMatrix
from manyhands.engine.kernel_task import KernelStep, Portion, Taken
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.workloads.svd.krylov import DONE, Array, advance, begin
from manyhands.workloads.svd.pass_sums import PassSums, RowPass, SvdMemory, SvdWork, combined_triangle

__all__ = ["AllRowsStep", "SharedRowsStep"]

_SAMPLES, _SAMPLE_ROWS = 16, 64


class _RowStep(KernelStep):
    """What both have in common: this worker's rows into its sums."""

    def __init__(self, work: SvdWork, model: SvdMemory, sums: Array, triangle: Array) -> None:
        super().__init__(model)
        self._work, self._sizes, self._memory = work, work.sizes, model
        self._sums, self._triangle = PassSums(sums, self._sizes), triangle
        self._matrix: OpenedMatrix = work.matrix.opened(kept_in_memory=self._sizes.kept_in_memory)
        self._pass: tuple[int, RowPass] | None = None
        self._bytes_sent = 0
        # numpy's own threads know nothing of the other workers
        self._limits = threadpool_limits(torch.get_num_threads(), "blas")

    def take(self, portion: Portion) -> Taken:
        """Multiply this worker's rows; at the end of a pass, extend the space."""
        began, read_ns, self._bytes_sent = time.monotonic_ns(), 0, 0
        mine = self._mine(portion)
        one = self._row_pass(portion)
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
        """Unmap the matrix, and let go of memory that others share."""
        self._pass = None
        self._matrix.close()
        self._limits.restore_original_limits()
        super().close()

    @abstractmethod
    def _mine(self, portion: Portion) -> range:
        """Which rows of a portion are gone through here."""

    @abstractmethod
    def _end_pass(self) -> None:
        """All rows have been gone through, here."""

    def _row_pass(self, portion: Portion) -> RowPass:
        if self._pass is None or self._pass[0] != portion.passed:
            if portion.begin == 0:
                self._sums.clear()
                self._triangle[:] = 0
            width = len(self._memory.space.block)
            triangle = self._triangle[: width * width].reshape(width, width)
            made = RowPass(
                self._memory.space, self._sizes, self._sums, triangle, center=self._work.svd.center
            )
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
        found = np.zeros(columns)
        count = 0
        for number in range(_SAMPLES):
            part = split(rows, number, _SAMPLES)
            end = min(part.stop, part.start + _SAMPLE_ROWS)
            for block in self._matrix.blocks(part.start, end, self._sizes.block_bytes):
                found += column_sums(block.dense(columns))
                count += len(block)
        guess = found / count
        return np.where(np.isfinite(guess), guess, 0.0)  # what is wrong with a row, the pass will say


class AllRowsStep(_RowStep):
    """All rows in one thread; the sums are those of the model."""

    def __init__(self, work: SvdWork, model: SvdMemory) -> None:
        count = PassSums.count(work.sizes)
        super().__init__(work, model, model.under_way[:count], model.under_way[count:])

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """With sums of a pass that was under way."""
        super().restore(state)
        self._pass = None

    def _mine(self, portion: Portion) -> range:
        return range(portion.begin, portion.end)

    def _end_pass(self) -> None:
        assert self._pass is not None, "a pass has ended"
        self._advance(self._sums, self._pass[1].triangle)
        self._pass = None


class SharedRowsStep(_RowStep):
    """A part of each portion; products are added up once a pass, and worker 0 extends the space for all."""

    def __init__(self, work: SvdWork, group: SharedGroup, control_bytes: int) -> None:
        offset = round_up(control_bytes, CACHE_LINE)
        numbers = SvdMemory.count(work.sizes)
        segment = group.share(offset + 8 * numbers, "the space of singular vectors")
        self._group = group
        count, square = PassSums.count(work.sizes), work.sizes.width**2
        model = SvdMemory(segment.array(offset, numbers, np.float64), work.sizes)
        super().__init__(work, model, np.zeros(count), np.zeros(square))
        self.segment = segment
        whole = count + group.world * square  # each writes its triangle in a place of its own
        group.allocate(round_up(8 * whole, CACHE_LINE), "products of a pass")
        self._bucket = group.bucket(0, whole, torch.float64)
        self._sent_bytes = 8 * (group.world - 1) * whole

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The sums of a pass that was under way go on with worker 0."""
        super().restore(state)
        count = len(self._sums.memory)
        self._sums.memory[:] = self._memory.under_way[:count]
        self._triangle[:] = self._memory.under_way[count:]
        self._pass = None

    def gather(self) -> None:
        """What all have of a pass that is under way."""
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


def column_sums(table: Array) -> Array:
    found: Array = np.asarray(table).sum(axis=0, dtype=np.float64)
    return found
