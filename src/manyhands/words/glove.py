"""`train_glove`: from shuffled co-occurrence records to word vectors, by the strategy that you name.

* `single`: one thread, the published rule record by record; with `batch` above 1 the reference of the three below.
* `hogwild`: threads or processes that all do the same on one memory, without locks; `order=locked` and `order=turns`
  are there to compare with.
* `allreduce`, `mirrored`: every worker holds the model and takes its part of each batch; rows touched travel.
* `tensor`: every worker holds some dimensions of every vector and takes all records; scalars travel.
* `ps`: parameter servers hold the rows; workers pull those of their part of a batch, and push what moves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from manyhands.cluster.capacity import Amount, Cost, of_processes
from manyhands.cluster.room import require_room
from manyhands.cluster.signals import signal_of
from manyhands.draw.bars import Bars
from manyhands.errors import UserError
from manyhands.facts import Split, Truth
from manyhands.strategy import Strategy
from manyhands.words.glove_hogwild import train_in_processes, train_in_threads
from manyhands.words.glove_kernels import train_block
from manyhands.words.glove_model import GloveModel, GloveOptions
from manyhands.words.glove_passes import AfterPass, Passes, Work
from manyhands.words.glove_reader import RecordReader, count_records

__all__ = ["GloveOptions", "GloveResult", "check_glove", "train_glove"]

_BLOCK = 1 << 16  # records read at once: a megabyte


@dataclass(frozen=True, kw_only=True, slots=True)
class GloveResult:
    """What came out: parameters after the last finished pass, of words and of contexts, row by row."""

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
    """Whether Ctrl-C ended it before the last pass was over."""

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
) -> GloveResult:
    """Train on a file of shuffled records, in its order in every pass.

    `after_pass(number, mean_cost)` is called in this thread after each pass. Ctrl-C keeps what the last whole pass
    gave (`interrupted`); before the first is over it is raised. Raises UserError for what makes no sense, DataError
    for a bad file, NonFinite when training breaks, WorkerFailed naming the first worker that failed.
    """
    chosen = Strategy.parse(strategy)
    train = _trainer(chosen, options, workers)
    if not isinstance(vocabulary_size, int) or vocabulary_size < 1:
        raise UserError(f"vocabulary_size={vocabulary_size!r} must be a whole number of at least 1")
    work = Work(
        path=Path(records).absolute(),
        num_records=count_records(Path(records)),
        vocabulary_size=vocabulary_size,
        options=options,
        workers=workers,
    )
    interrupted, began = False, time.monotonic()
    with Passes(work, bars, after_pass) as passes:
        try:
            train(work, passes)
        except (KeyboardInterrupt, SystemExit) as stop:
            if passes.kept is None or signal_of(stop) is None:
                raise
            interrupted = True
    seconds = time.monotonic() - began
    assert passes.kept is not None
    return GloveResult(
        costs=passes.costs,
        word=passes.kept.word,
        context=passes.kept.context,
        word_bias=passes.kept.word_bias,
        context_bias=passes.kept.context_bias,
        seconds=seconds,
        records_per_s=work.num_records * len(passes.costs) / seconds,
        interrupted=interrupted,
    )


_Train = Callable[[Work, Passes], None]


def check_glove(strategy: str | Strategy, options: GloveOptions, workers: int) -> None:
    """Raise the UserError that `train_glove` would, before hours of counting."""
    _trainer(Strategy.parse(strategy), options, workers)


def _trainer(strategy: Strategy, options: GloveOptions, workers: int) -> _Train:
    """The function that trains, if strategy, batch and workers go together."""
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers={workers!r} must be a whole number of at least 1")
    alone = strategy.most_workers == 1
    if alone and workers > 1:
        raise UserError(f"workers={workers}: {strategy.word} is one thread; use strategy=hogwild for more")
    if not alone:
        require_room(_cost(strategy), workers, allow_overload=options.allow_overload)
    order = strategy.record_order
    if order is not None and not alone:
        if options.batch > 1:
            raise UserError(
                f"batch={options.batch}: {strategy.word} takes record after record; leave batch at 1"
            )
        train = train_in_threads if strategy.in_threads else train_in_processes
        return lambda work, passes: train(work, passes, order)
    if alone and options.batch == 1:
        return _train_single
    if strategy.split is Split.DIMENSIONS and workers > options.dim:
        raise UserError(
            f"workers={workers}: tensor gives each some of dim={options.dim} dimensions; use fewer workers"
        )
    return _batch_trainer(strategy, options)


def _cost(strategy: Strategy) -> Cost:
    """What the workers take before anything is known of the corpus: threads share one process, the others are many."""
    if strategy.in_threads:
        return Cost(per_worker=Amount(tasks=1))
    return of_processes(others=strategy.processes(0).get("server", 0) + 1)  # and the template


def _batch_trainer(strategy: Strategy, options: GloveOptions) -> _Train:
    from manyhands.words import glove_batches, glove_server  # what single and hogwild never need

    trainers: dict[tuple[Split, Truth], _Train] = {
        (Split.DATA, Truth.ONE_PROCESS): glove_batches.train_here,
        (Split.DATA, Truth.EVERYONE): glove_batches.train_allreduce,
        (Split.DIMENSIONS, Truth.EVERYONE): glove_batches.train_tensor,
        (Split.DATA, Truth.SERVERS): lambda work, passes: glove_server.train_on_servers(
            work, passes, cast(Any, strategy)
        ),
    }
    train = trainers.get((strategy.split, strategy.truth))
    if train is None:
        raise UserError(
            f"strategy {strategy} does not train glove; allowed: hogwild, single, mirrored, allreduce, tensor, ps"
        )
    if options.batch == 1:
        raise UserError(
            f"batch=1: {strategy} works on batches of records, whose duplicate rows are summed; use a batch of 2 or "
            "more, such as 1024"
        )
    if strategy.truth is Truth.EVERYONE and strategy != type(strategy)():
        raise UserError(
            f"strategy {strategy}: glove sends the rows touched, each worker's whole to all, so it has no other "
            f"algorithm and no buckets; use {strategy.word}"
        )
    return train


def _train_single(work: Work, passes: Passes) -> None:
    model = GloveModel(work.vocabulary_size, work.options).initialise()
    shape, settings = model.shape(), work.options.settings()
    with RecordReader(work.path, min(_BLOCK, work.num_records), work.vocabulary_size) as reader:
        for _ in range(work.options.passes):
            cost = 0.0
            for begin in range(0, work.num_records, _BLOCK):
                count = min(_BLOCK, work.num_records - begin)
                cost += train_block(model.values, *reader.read(begin, count), shape, settings)
                passes.advance(count)
            passes.finish(cost, model.snapshot)
