"""`train_svd`: one matrix, some workers, its largest singular values and their components, as a run of `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from manyhands.data.matrix_files import open_matrix
from manyhands.data.stored_matrix import MatrixStore, StoredMatrix
from manyhands.engine.fitting import await_workers, fit_or_kept
from manyhands.engine.options import Options
from manyhands.engine.training import Keeping, Kept
from manyhands.native.warming import prepare, spent_s
from manyhands.observe.draw.bars import Bars, bar_view
from manyhands.places.local.capacity import check_capacity, of_processes
from manyhands.strategy import Strategy
from manyhands.workloads.svd.model import SvdModel
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.svd.pass_sums import SvdMemory
from manyhands.workloads.svd.task import SvdTask, check_strategy
from manyhands.workloads.tasks.digits import read_digits

__all__ = ["AfterPass", "SvdResult", "stored", "train_svd"]

AfterPass = Callable[[int, float], None]
"""Called with the number of passes done and the error that is left."""

_READ_BYTES = 1 << 22


@dataclass(kw_only=True, slots=True)
class SvdResult:
    """A decomposition and how it came about."""

    model: SvdModel
    columns: int
    entries: int
    """Numbers of the matrix that are not left out."""
    is_sparse: bool
    seconds: float
    """Reading and decomposing; compiling kernels, where they were missing, not counted."""
    train_seconds: float
    """The passes alone, without reading and without starting workers."""
    interrupted: bool = False
    """Whether Ctrl-C ended it early; the model is the one that was kept."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """That of `fit`; of an interrupted run there is none."""


def train_svd(
    path: Path | str | None = None,
    options: SvdOptions | None = None,
    *,
    workers: int = 1,
    strategy: str | Strategy | None = None,
    bars: Bars | None = None,
    after_pass: AfterPass | None = None,
    keep: Keeping | None = None,
) -> SvdResult:
    """Decompose the matrix of a file (LIBSVM, npy or Parquet), or the digits that come with scikit-learn.

    Without a `strategy`, one worker is `single` and more are `allreduce`. With `keep`, the run has a directory: Ctrl-C
    then keeps what is done, and it can be resumed. UserError for what makes no sense and for files that are wrong.
    """
    options, bars = options or SvdOptions(), bars or Bars()
    chosen = Strategy.parse(strategy or ("single" if workers == 1 else "allreduce"))
    check_strategy(chosen, workers)
    if chosen.most_workers != 1:
        check_capacity(of_processes(), workers, allow_overload=options.allow_overload)
    began = time.monotonic() - spent_s()
    await_workers(chosen, ["manyhands.workloads.svd.task"], compiled=True)  # while rows are read
    with stored(path, options, bars) as matrix:
        if matrix.is_sparse:
            prepare("svd")
        task = SvdTask(matrix=matrix, svd=options, workers=workers)
        fitted_at = time.monotonic()
        memory, summary = _fit(task, chosen, bars, after_pass, keep)
        train_seconds = float(summary.get("seconds", time.monotonic() - fitted_at))
    return SvdResult(
        model=SvdModel.of(memory.space, task.sizes, options),
        columns=matrix.columns,
        entries=matrix.entries,
        is_sparse=matrix.is_sparse,
        seconds=time.monotonic() - spent_s() - began,
        train_seconds=train_seconds,
        interrupted=not summary,
        summary=summary,
    )


@contextmanager
def stored(path: Path | str | None, options: SvdOptions, bars: Bars) -> Iterator[StoredMatrix]:
    """The matrix as all workers read it, while the body runs."""
    with MatrixStore() as store:
        if path is None:
            yield store.keep_array(read_digits()[0].astype("float64"))
            return
        block_bytes = max(1, min(_READ_BYTES, options.memory_bytes // 64))
        with bars.phase("reading", None, "bytes") as phase:
            matrix = store.keep(open_matrix(path), block_bytes, phase.advance)
        yield matrix


def _fit(
    task: SvdTask, strategy: Strategy, bars: Bars, after_pass: AfterPass | None, keep: Keeping | None
) -> tuple[SvdMemory, Mapping[str, Any]]:
    """The memory at the end; after Ctrl-C that of the last checkpoint and no summary, or it is raised."""
    asked = keep.options if keep is not None else Options(resume_command="")
    passes = task.passes.steps

    def heard(rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if after_pass is not None and row.get("loss") is not None and row["step"] % passes == 0:
                after_pass(row["step"] // passes, row["loss"])

    phase = bars.phase("decomposing", task.samples * task.svd.passes, "rows")
    view = partial(bar_view, phase, lambda step: step * task.samples / passes)
    ended = fit_or_kept(
        task,
        strategy,
        workers=task.workers,
        epochs=task.svd.passes,
        seed=task.svd.seed,
        options=replace(asked, view=view, on_rows=heard, allow_overload=task.svd.allow_overload),
        keep=keep,
        is_result=lambda kept: bool(_filled(task, kept.values).space.passes),
    )
    if isinstance(ended, Kept):
        return _filled(task, ended.values), {}
    return _filled(task, ended.model.state_dict()), ended.summary


def _filled(task: SvdTask, values: Mapping[str, torch.Tensor]) -> SvdMemory:
    memory = task.model()
    memory.load_state_dict(values)
    return memory
