"""`train_glove`: from shuffled co-occurrence records to word vectors, by the strategy that you name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from manyhands.engine.fitting import fit_or_kept
from manyhands.engine.history_rows import PASS_LOSS
from manyhands.engine.interrupted_run import Keeping, Kept
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.run import Run
from manyhands.native.warming import prepare
from manyhands.observe.draw.bars import Bars, bar_view
from manyhands.places.local.capacity import Amount, MemoryCost, check_capacity, of_processes
from manyhands.strategy import Strategy
from manyhands.workloads.glove.glove_model import GloveModel
from manyhands.workloads.glove.glove_server import GloveTables
from manyhands.workloads.glove.glove_task import GloveTask, check_together
from manyhands.workloads.glove.options import GloveOptions

__all__ = [
    "AfterPass",
    "GloveOptions",
    "GloveResult",
    "Keeping",
    "check_glove",
    "summed_vectors",
    "train_glove",
]

AfterPass = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GloveResult:
    """What came out: the parameters at the end, of words and of contexts, row by row."""

    costs: list[float]
    """After each finished pass, the mean of f d^2 / 2 over all records, each taken before its own update."""

    word: NDArray[Any]
    context: NDArray[Any]
    word_bias: NDArray[Any]
    context_bias: NDArray[Any]
    seconds: float
    """Of training: reading records and starting workers included."""

    records_per_s: float
    interrupted: bool
    """Whether Ctrl-C ended it before the last pass was over; the parameters are those that were kept."""

    summary: Mapping[str, Any] = field(default_factory=dict)
    """That of `fit`; of an interrupted run there is none."""

    @property
    def biases(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Those of words and those of contexts."""
        return self.word_bias, self.context_bias

    def vectors(self) -> NDArray[np.float32]:
        """(V, dim): the sum of each word's two vectors, the usual result."""
        both: NDArray[np.float32] = (self.word + self.context).astype(np.float32)
        return both


def train_glove(
    records: Path,
    vocabulary_size: int,
    options: GloveOptions,
    *,
    strategy: str | Strategy = "single",
    workers: int = 1,
    bars: Bars | None = None,
    after_pass: AfterPass | None = None,
    keep: Keeping | None = None,
) -> GloveResult:
    """Train on a file of shuffled records, in its order in every pass.

    `after_pass(number, mean_cost)` is called in this thread after each pass. With `keep`, the run has a directory:
    Ctrl-C then keeps what is done (`interrupted`) and the run can be resumed; without one, or before anything is kept,
    it is raised. Raises UserError for what makes no sense, DataError for a bad file, NonFinite when training breaks,
    WorkerFailed naming the first worker that failed.
    """
    chosen = Strategy.parse(strategy)
    work = GloveTask.of(records, vocabulary_size, options)
    task = work.for_strategy(chosen, workers)
    per_step = work.batch_size if task.compiled else options.batch
    heard = _Heard(work.num_records, per_step, after_pass)
    asked = keep.options if keep is not None else Options(resume_command="", progress="none")
    if bars is not None:
        phase = bars.phase("training", work.num_records * options.passes, "records")
        asked = replace(asked, view=partial(bar_view, phase, heard.records_after))
    prepare("glove")
    began = time.monotonic()
    ended = fit_or_kept(
        task,
        chosen,
        workers=workers,
        epochs=task.epochs,
        seed=options.seed,
        options=replace(asked, on_rows=heard.rows, allow_overload=options.allow_overload),
        keep=keep,
    )
    return _result(task, ended, heard.records, time.monotonic() - began)


def _result(task: AnyTask, ended: Run | Kept, records: int, seconds: float) -> GloveResult:
    """Of a run that trained `records` records, to its end or until it was interrupted."""
    if isinstance(ended, Kept):
        model, rows, summary = task.model(), ended.rows, {}
        model.load_state_dict(ended.values)
    else:
        model, rows, summary = ended.model, list(ended.history), ended.summary
    assert isinstance(model, GloveModel | GloveTables), "what the task builds"
    found = model.snapshot()
    return GloveResult(
        costs=[row["metrics"][PASS_LOSS] for row in rows if PASS_LOSS in row.get("metrics", {})],
        word=found.word,
        context=found.context,
        word_bias=found.word_bias,
        context_bias=found.context_bias,
        seconds=seconds,
        records_per_s=records / seconds,
        interrupted=isinstance(ended, Kept),
        summary=summary,
    )


def summed_vectors(model: nn.Module) -> NDArray[np.float32]:
    """(V, dim): the sum of each word's two vectors, of any model that a task of word vectors builds."""
    assert isinstance(model, GloveModel | GloveTables), "what the task builds"
    found = model.snapshot()
    both: NDArray[np.float32] = (found.word + found.context).astype(np.float32)
    return both


class _Heard:
    """What is heard of a run while it goes on: how many records, and whose passes are over."""

    def __init__(self, num_records: int, per_step: int, after_pass: AfterPass | None) -> None:
        self.records = 0
        self._num_records = num_records
        self._per_step = per_step
        self._per_pass = -(-num_records // per_step)
        self._after_pass = after_pass

    def records_after(self, step: int) -> int:
        """How many records so many steps visit; the last of a pass may be short."""
        whole, more = divmod(step, self._per_pass)
        return whole * self._num_records + min(more * self._per_step, self._num_records)

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows of the history."""
        for row in rows:
            step = row["step"]
            if PASS_LOSS not in row.get("metrics", {}):
                self.records += self.records_after(step) - self.records_after(step - 1)
            elif self._after_pass is not None:
                self._after_pass(step // self._per_pass, row["metrics"][PASS_LOSS])


def check_glove(strategy: str | Strategy, options: GloveOptions, workers: int) -> None:
    """Raise the UserError that `train_glove` would, before hours of counting."""
    chosen = Strategy.parse(strategy)
    check_together(chosen, options, workers)
    if chosen.most_workers != 1:
        check_capacity(_cost(chosen), workers, allow_overload=options.allow_overload)


def _cost(strategy: Strategy) -> MemoryCost:
    """What the workers take before anything is known of the corpus: threads share one process, the others are many."""
    if strategy.facts.in_threads:
        return MemoryCost(per_worker=Amount(tasks=1))
    return of_processes(others=strategy.processes(0).get("server", 0) + 1)  # and the template
