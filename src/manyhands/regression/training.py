"""`train_logreg`: one file, one strategy, one model.

* `single`: one example after the other, in the order of the file.
* `hogwild`: the same by several threads or processes on one table; `order=locked` and `order=turns` to compare with.
* `allreduce`, `mirrored`, `central`, `ps`: batches, through `manyhands.fit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.cluster.capacity import Amount, Cost, of_processes
from manyhands.cluster.room import require_room as require_host_room
from manyhands.cluster.signals import signal_of
from manyhands.data.row_files import Reading, RowFile
from manyhands.draw.bars import Bars
from manyhands.errors import UserError
from manyhands.facts import Split, Truth
from manyhands.regression.examples import Examples
from manyhands.regression.kernels import WIDTHS
from manyhands.regression.model import LogregModel
from manyhands.regression.online import SAVING_BYTES, OnlineLearner, mean_loss, require_room
from manyhands.regression.options import LogregOptions
from manyhands.regression.spool import Spool, SpooledRows
from manyhands.strategy import Strategy

__all__ = ["LogregResult", "train_logreg"]

AfterPass = Callable[[int, float], None]


@dataclass(kw_only=True, slots=True)
class LogregResult:
    """A trained model and how it came about."""

    model: LogregModel
    rate: float
    """The learning rate, as given or as found for the file."""
    progressive: list[float]
    """The mean loss of each pass, of every example before the update with it."""
    examples: int
    """Of one pass."""
    bad_lines: int
    seconds: float
    interrupted: bool = False
    """Whether Ctrl-C ended it early; the model is that after the last whole pass."""

    @property
    def examples_per_s(self) -> float:
        """Examples learned from, in all passes, over the whole time with its reading."""
        return self.examples * len(self.progressive) / self.seconds if self.seconds else 0.0


def train_logreg(
    path: Path | str,
    options: LogregOptions | None = None,
    *,
    strategy: str | Strategy = "single",
    workers: int = 1,
    reading: Reading | None = None,
    memory_bytes: int = 2 << 30,
    bars: Bars | None = None,
    after_pass: AfterPass | None = None,
) -> LogregResult:
    """Learn from the examples of a file, plain or gzip, LIBSVM or Vowpal Wabbit; `-` is stdin.

    Parsed examples are kept for later passes where they take no more than `memory_bytes`. `after_pass` is called with
    the number of a pass, from 1, and its progressive loss. Ctrl-C (or a signal that `cluster.signals` raises) in a
    later pass than the first gives the model of the last whole pass; in the first it is raised. UserError for what
    makes no sense and for files that are wrong.
    """
    options, chosen = options or LogregOptions(), Strategy.parse(strategy)
    if not isinstance(workers, int) or workers < 1:
        raise UserError(f"workers={workers!r} must be a whole number of at least 1")
    if chosen.most_workers is not None and workers > chosen.most_workers:
        raise UserError(f"workers={workers}: {chosen.word} is one process; use strategy=hogwild for more")
    if chosen.split is Split.DIMENSIONS:
        raise UserError(
            f"strategy {chosen} splits vectors, and a feature has one weight here; use hogwild or ps"
        )
    if memory_bytes < 0:
        raise UserError(f"memory_bytes={memory_bytes} must be at least 0")
    # threads take the blocks as they are parsed; processes find them in files, and go through those again and again
    order = chosen.record_order
    is_here = order is not None and (chosen.in_threads or workers == 1)
    if chosen.most_workers != 1:
        cost = Cost(per_worker=Amount(tasks=1)) if is_here else of_processes()
        require_host_room(cost, workers, allow_overload=options.allow_overload)
    file = RowFile(path, reading)
    examples = Examples(file, memory_bytes, options.passes) if is_here else Examples(file, 0, 1)
    job = _Job(
        examples, options, chosen, workers, bars or Bars(), after_pass or (lambda _number, _loss: None)
    )
    began = time.monotonic()
    if order is None:
        table = _in_batches(job)
    elif is_here:
        table = _here(job, order)
    else:
        table = _in_processes(job, order)
    return _result(job, table, time.monotonic() - began)


@dataclass(slots=True)
class _Job:
    """What was asked for, and what is known of it so far."""

    examples: Examples
    options: LogregOptions
    strategy: Strategy
    workers: int
    bars: Bars
    after_pass: AfterPass
    progressive: list[float] = field(default_factory=list)
    rate: float = 0.0
    interrupted: bool = False

    def finish_pass(self, loss: float) -> None:
        """A whole pass is done."""
        self.progressive.append(loss)
        self.after_pass(len(self.progressive), loss)


def _result(job: _Job, table: NDArray[np.float32], seconds: float) -> LogregResult:
    reading, labels = job.examples.file.reading, job.examples.labels
    assert labels is not None, "examples were seen"
    return LogregResult(
        model=LogregModel(table=table, labels=labels, bits=reading.bits, hash=reading.hash),
        rate=job.rate,
        progressive=job.progressive,
        examples=job.examples.count,
        bad_lines=job.examples.file.bad_lines,
        seconds=seconds,
        interrupted=job.interrupted,
    )


def _here(job: _Job, order: str) -> NDArray[np.float32]:
    """In this process, by one thread or several."""
    table: NDArray[np.float32] | None = None
    with (
        OnlineLearner(job.options, order, job.workers) as learner,
        job.bars.phase("learning", None, "examples") as phase,
    ):
        try:
            for number in range(1, job.options.passes + 1):
                size, sums = 0, np.zeros(2)
                total = job.examples.count * job.options.passes or None  # known after the first pass
                for stretch in job.examples.stretches():
                    sums += learner.learn(stretch, partial(phase.advance, total=total))
                    size = max(size, *(block.rows.size for block in stretch))
                table = learner.weights(size)
                job.rate = learner.rate or 0.0
                job.finish_pass(mean_loss(sums, number))
        except (KeyboardInterrupt, SystemExit) as stop:
            if signal_of(stop) is None or table is None or not job.progressive:
                raise
            job.interrupted = True
    assert table is not None, "there is at least one pass"
    return table


def _row_bytes(job: _Job) -> int:
    """All that worker processes, servers and this process keep of one feature, until the model is saved."""
    width = WIDTHS[job.options.learner]  # the weight and the learner's state
    if job.strategy.truth is Truth.ONE_MEMORY:
        kept = width + 2 + 2  # one table for all, two saved passes, the model and its copy
    else:
        # Each worker and server has a copy, with a gradient, what is sent of it, and the model that it began with.
        servers = job.strategy.kept_copies if job.strategy.truth is Truth.SERVERS else 0
        kept = (job.workers + servers) * (width + 3) + 3
    return 4 * kept + SAVING_BYTES


def _spool(job: _Job, spool: Spool) -> SpooledRows:
    """Parse everything into files that the worker processes map."""
    with job.bars.phase("reading", None, "bytes") as phase:
        for stretch in job.examples.stretches(phase.advance):
            for block in stretch:
                spool.add(block)
    rows = spool.finish()
    require_room(rows.size, _row_bytes(job))
    job.rate = job.options.settled(rows.scale).rate or 0.0
    return rows


def _in_processes(job: _Job, order: str) -> NDArray[np.float32]:
    from manyhands.regression.crew import learn_in_processes

    with Spool() as spool:
        rows = _spool(job, spool)
        learned = learn_in_processes(
            rows, job.options, order, job.workers, bars=job.bars, on_pass=job.finish_pass
        )
    job.interrupted = learned.interrupted
    return learned.table


def _in_batches(job: _Job) -> NDArray[np.float32]:
    from manyhands.regression.batches import learn_in_batches

    with Spool() as spool:
        rows = _spool(job, spool)
        learned = learn_in_batches(
            rows, job.options, job.strategy, job.workers, bars=job.bars, on_pass=job.finish_pass
        )
    job.interrupted = learned.interrupted
    return learned.table
