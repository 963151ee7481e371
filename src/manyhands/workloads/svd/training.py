"""`train_svd`: one matrix, some workers, its largest singular values and their components, as a run of `fit`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from manyhands.data.matrix_files import MatrixFile
from manyhands.data.stored_matrix import MatrixStore, StoredMatrix
from manyhands.engine.fitting import await_workers
from manyhands.engine.training import Keeping
from manyhands.native.warming import prepare, spent_s
from manyhands.observe.draw.bars import Bars
from manyhands.places.local.host import check_capacity, of_processes
from manyhands.strategy import Strategy
from manyhands.workloads.compiled_training import CompiledResult, train_compiled
from manyhands.workloads.svd.krylov import KrylovSpace
from manyhands.workloads.svd.model import SvdModel, opened_rows
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.svd.task import SvdTask, check_strategy
from manyhands.workloads.tasks.digits import read_digits

_READ_BYTES = 1 << 22


@dataclass(kw_only=True, slots=True)
class SvdResult(CompiledResult):
    """A decomposition and how it came about."""

    model: SvdModel
    columns: int
    entries: int  # numbers of the matrix that are not left out
    is_sparse: bool
    bad_rows: int  # that were wrong and left out
    train_seconds: float  # the passes alone, without reading and without starting workers


def train_svd(
    data: Any = None,
    options: SvdOptions | None = None,
    *,
    workers: int = 1,
    strategy: str | Strategy | None = None,
    bars: Bars | None = None,
    keep: Keeping | None = None,
) -> SvdResult:
    """Decompose the matrix of a file, an array, a DataFrame or `opened_rows`, or the digits of scikit-learn.

    Without a `strategy`, one worker is `single` and more are `allreduce`. With `keep`, the run has a directory, as
    `train_compiled` says. UserError for what makes no sense and for files that are wrong.
    """
    options, bars = options or SvdOptions(), bars or Bars()
    chosen = Strategy.parse(strategy or ("single" if workers == 1 else "allreduce"))
    check_strategy(chosen, workers)
    if chosen.most_workers != 1:
        check_capacity(of_processes(), workers, allow_overload=options.allow_overload)
    began = time.monotonic() - spent_s()
    await_workers(chosen, ["manyhands.workloads.svd.task"], compiled=True)  # while rows are read
    rows = data if data is None or isinstance(data, np.ndarray | MatrixFile) else opened_rows(data)
    file = rows if isinstance(rows, MatrixFile) else None
    with stored(rows, options, bars) as matrix:
        if matrix.is_sparse:
            prepare("svd")
        task = SvdTask(matrix=matrix, svd=options, workers=workers)
        per_step, fitted_at = task.samples / task.passes.steps, time.monotonic()

        def space_of(values: Mapping[str, Tensor]) -> KrylovSpace:
            memory = task.model()
            memory.load_state_dict(values)
            return memory.space

        bar = bars.phase("decomposing", task.samples * options.passes, "rows")
        trained = train_compiled(
            task,
            chosen,
            workers=workers,
            epochs=options.passes,
            options=options,
            shown=(bar, lambda step: step * per_step),
            keep=keep,
            is_result=lambda values: bool(space_of(values).passes),
        )
        train_seconds = float(trained.summary.get("seconds", time.monotonic() - fitted_at))
    model = SvdModel.of(space_of(trained.values), task.sizes, options)
    return SvdResult(
        model=model if file is None else replace(model, encoding=file.encoding),
        bad_rows=file.left_out if file is not None else 0,
        columns=matrix.columns,
        entries=matrix.entries,
        is_sparse=matrix.is_sparse,
        seconds=time.monotonic() - spent_s() - began,
        train_seconds=train_seconds,
        interrupted=not trained.summary,
        summary=trained.summary,
    )


@contextmanager
def stored(rows: Any, options: SvdOptions, bars: Bars) -> Iterator[StoredMatrix]:
    """The matrix of a `MatrixFile` or an array; without one, that of digits."""
    with MatrixStore() as store:
        if not isinstance(rows, MatrixFile):
            yield store.keep_array(read_digits()[0].astype("float64") if rows is None else rows)
            return
        block_bytes = max(1, min(_READ_BYTES, options.memory_bytes // 64))
        with bars.phase("reading", None, "bytes") as phase:
            matrix = store.keep(rows, block_bytes, phase.advance)
        yield matrix
