"""`train_logreg`: one file, one strategy, one model.

* `single`: one example after the other, in the order of the file.
* `hogwild`: the same by several threads or processes on one table; `order=locked` and `order=turns` to compare with.
* `allreduce`, `mirrored`, `central`, `local`, `ps`: batches.

All of them are runs of `manyhands.fit` on examples that were parsed before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from manyhands.data.row_files import Reading, RowFile
from manyhands.engine.training import Keeping
from manyhands.errors import UserError, check_count, format_bytes
from manyhands.facts import Truth
from manyhands.native.segment import available_bytes
from manyhands.native.warming import prepare, spent_s
from manyhands.observe.draw.bars import Bars
from manyhands.places.local.host import Amount, MemoryCost, of_processes
from manyhands.places.local.host import check_capacity as check_host_capacity
from manyhands.strategy import Strategy
from manyhands.workloads.compiled_training import AfterPass, CompiledResult, train_compiled
from manyhands.workloads.logreg.example_tables import ExampleTable, open_examples
from manyhands.workloads.logreg.examples import Examples, Spool, parse_examples
from manyhands.workloads.logreg.logreg_kernels import WIDTHS
from manyhands.workloads.logreg.model import LogregModel
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.task import LogregTask, check_strategy, table_of


@dataclass(kw_only=True, slots=True)
class LogregResult(CompiledResult):
    """A trained model and how it came about."""

    model: LogregModel
    rate: float  # the learning rate, as given or as found for the file
    progressive_loss: list[float]  # the mean of each pass, of every example before the update with it
    examples: int  # of one pass
    bad_lines: int
    examples_per_s: float  # learned from, in all passes, over the whole time with its reading


def train_logreg(
    data: Any,
    options: LogregOptions | None = None,
    *,
    strategy: str | Strategy = "single",
    workers: int = 1,
    reading: Reading | None = None,
    memory_bytes: int = 2 << 30,
    bars: Bars | None = None,
    after_pass: AfterPass | None = None,
    keep: Keeping | None = None,
) -> LogregResult:
    """Learn from the examples of a file (LIBSVM, Vowpal Wabbit, CSV, Parquet, npy), `-` is stdin, or of a DataFrame.

    Or of what `open_examples` opened, which may say what of a table is read. Parsed examples are kept in memory where
    they take no more than `memory_bytes` and threads learn, else in temporary files. With `keep`, the run has a
    directory, as `train_compiled` says. UserError for what makes no sense and for files that are wrong.
    """
    options, chosen = options or LogregOptions(), Strategy.parse(strategy)
    check_count("memory_bytes", memory_bytes, 0)
    here = _learns_in_threads(chosen, workers, allow_overload=options.allow_overload)
    prepare("logreg")
    bars, began = bars or Bars(), time.monotonic() - spent_s()
    examples = Examples(data if isinstance(data, RowFile) else open_examples(data, reading))
    with Spool() as spool:
        with bars.phase("reading", None, "bytes") as phase:
            parsed = parse_examples(examples, memory_bytes if here else 0, spool, phase.advance)
        check_capacity(parsed.size, row_bytes(chosen, options.learner, workers) * parsed.outputs)
        problem = LogregTask.of(parsed, options)
        task = problem.for_strategy(chosen, workers)
        assert task.passes is not None, "both kinds have them"
        per_step = problem.samples / task.passes.steps
        bar = bars.phase("learning", problem.samples * options.passes, "examples")
        trained = train_compiled(
            task,
            chosen,
            workers=workers,
            epochs=options.passes,
            options=options,
            shown=(bar, lambda step: step * per_step),
            keep=keep,
            after_pass=after_pass,
        )
    values, seconds, losses = trained.values, time.monotonic() - spent_s() - began, trained.pass_losses
    file, labels, weights = examples.file, examples.labels, table_of(values, parsed.outputs)
    bits, hashed = file.reading.bits, file.reading.hash
    encoding = file.encoding if isinstance(file, ExampleTable) else None
    return LogregResult(
        model=LogregModel(table=weights, labels=labels, bits=bits, hash=hashed, encoding=encoding),
        rate=problem.logreg.rate or 0.0,
        progressive_loss=losses,
        examples=parsed.examples,
        bad_lines=file.bad_lines,
        examples_per_s=parsed.examples * len(losses) / seconds,
        seconds=seconds,
        interrupted=not trained.summary,
        summary=trained.summary,
    )


def _learns_in_threads(strategy: Strategy, workers: int, *, allow_overload: bool) -> bool:
    """Whether threads of this process learn, not processes; UserError for workers that cannot run here."""
    check_strategy(strategy, workers)
    here = strategy.facts.record_order is not None and strategy.facts.in_threads
    if strategy.most_workers != 1:
        cost = MemoryCost(per_worker=Amount(tasks=1)) if here else of_processes()
        check_host_capacity(cost, workers, allow_overload=allow_overload)
    return here


_SAVING_BYTES = 12  # of a feature: its weight without the bias, the file's bytes, and a copy of these
_ITEM = 4  # single precision


def row_bytes(strategy: Strategy, learner: str, workers: int) -> int:
    width = WIDTHS[learner]  # the weight and the learner's state
    if strategy.facts.record_order is not None and (strategy.facts.in_threads or workers == 1):
        kept = width + 3  # the table, its weights, the model and an earlier one
    elif strategy.truth is Truth.ONE_MEMORY:
        kept = 3 * width + 3  # the table of all workers, on its way from them, and where it arrives
    else:
        # Each worker and server has a copy, with a gradient, what is sent of it, and the model that it began with.
        servers = strategy.facts.kept_copies if strategy.truth is Truth.SERVERS else 0
        kept = (workers + servers) * (width + 3) + 3
    return _ITEM * kept + _SAVING_BYTES


def check_capacity(size: int, row_bytes: int) -> None:
    """UserError where what is kept of so many features does not fit in memory, as one absurd index may make it."""
    needed, room = size * row_bytes, available_bytes()
    if needed > room:
        raise UserError(
            f"a weight for every feature up to {size - 1} needs {format_bytes(needed)} with its copies, but only "
            f"{format_bytes(room)} is available; hash the features into fewer with a number of bits, such as 24"
        )
