"""`train_logreg`: one file, one strategy, one model.

* `single`: one example after the other, in the order of the file.
* `hogwild`: the same by several threads or processes on one table; `order=locked` and `order=turns` to compare with.
* `allreduce`, `mirrored`, `central`, `local`, `ps`: batches.

All of them are runs of `manyhands.fit` on examples that were parsed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.row_files import Reading, RowFile
from manyhands.engine.fitting import fit_or_kept
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.run import PASS_LOSS
from manyhands.engine.training import Keeping, Kept
from manyhands.errors import UserError, format_bytes
from manyhands.facts import Truth
from manyhands.native.segment import available_bytes
from manyhands.native.warming import prepare, spent_s
from manyhands.observe.draw.bars import Bars, bar_view
from manyhands.places.local.capacity import Amount, MemoryCost, of_processes
from manyhands.places.local.capacity import check_capacity as require_host_room
from manyhands.strategy import Strategy
from manyhands.workloads.logreg.examples import Examples, Spool, parse_examples
from manyhands.workloads.logreg.logreg_kernels import WIDTHS
from manyhands.workloads.logreg.model import LogregModel
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.task import LogregTask, check_strategy, table_of

__all__ = ["AfterPass", "LogregResult", "check_capacity", "row_bytes", "train_logreg"]

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
    """Reading and learning; compiling kernels, where they were missing, not counted."""
    interrupted: bool = False
    """Whether Ctrl-C ended it early; the model is the one that was kept."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """That of `fit`; of an interrupted run there is none."""

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
    keep: Keeping | None = None,
) -> LogregResult:
    """Learn from the examples of a file, plain or gzip, LIBSVM or Vowpal Wabbit; `-` is stdin.

    Parsed examples are kept in memory where they take no more than `memory_bytes` and threads learn, else in temporary
    files. `after_pass` is called with the number of a pass, from 1, and its progressive loss. With `keep`, the run has
    a directory: Ctrl-C (or a signal that `places.local.signals` raises) then keeps what is done, and the run can be
    resumed; without one, or before anything is kept, it is raised. UserError for what makes no sense and for files
    that are wrong.
    """
    options, chosen = options or LogregOptions(), Strategy.parse(strategy)
    check_strategy(chosen, workers)
    if memory_bytes < 0:
        raise UserError(f"memory_bytes={memory_bytes} must be at least 0")
    here = chosen.facts.record_order is not None and chosen.facts.in_threads
    if chosen.most_workers != 1:
        cost = MemoryCost(per_worker=Amount(tasks=1)) if here else of_processes()
        require_host_room(cost, workers, allow_overload=options.allow_overload)
    prepare("logreg")
    bars, began = bars or Bars(), time.monotonic() - spent_s()
    examples = Examples(RowFile(path, reading))
    with Spool() as spool:
        with bars.phase("reading", None, "bytes") as phase:
            parsed = parse_examples(examples, memory_bytes if here else 0, spool, phase.advance)
        check_capacity(parsed.size, row_bytes(chosen, options.learner, workers))
        task = LogregTask.of(parsed, options)
        learned = _learn(task, chosen, workers, bars, after_pass, keep)
    reading, labels = examples.file.reading, examples.labels
    assert labels is not None, "examples were seen"
    return LogregResult(
        model=LogregModel(table=learned.table, labels=labels, bits=reading.bits, hash=reading.hash),
        rate=task.logreg.rate or 0.0,
        progressive=[
            row["metrics"][PASS_LOSS] for row in learned.rows if PASS_LOSS in row.get("metrics", {})
        ],
        examples=parsed.examples,
        bad_lines=examples.file.bad_lines,
        seconds=time.monotonic() - spent_s() - began,
        interrupted=not learned.summary,
        summary=learned.summary,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learned:
    table: Any
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]


def _learn(
    problem: LogregTask,
    strategy: Strategy,
    workers: int,
    bars: Bars,
    after_pass: AfterPass | None,
    keep: Keeping | None,
) -> _Learned:
    """Learn through `fit`; after Ctrl-C the table is that of the last checkpoint, and if there is none it is raised."""
    options = problem.logreg
    task = problem.for_strategy(strategy, workers)
    asked = keep.options if keep is not None else Options(resume_command="")
    passes = task.passes
    assert passes is not None, "both kinds have them"

    def heard(rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if after_pass is not None and PASS_LOSS in row.get("metrics", {}):
                after_pass(row["step"] // passes.steps, row["metrics"][PASS_LOSS])

    phase = bars.phase("learning", problem.samples * options.passes, "examples")
    view = partial(bar_view, phase, lambda step: step * problem.samples / passes.steps)
    asked = replace(asked, view=view, on_rows=heard, allow_overload=options.allow_overload)
    ended = fit_or_kept(
        task, strategy, workers=workers, epochs=options.passes, seed=options.seed, options=asked, keep=keep
    )
    if isinstance(ended, Kept):
        return _Learned(table=_table(task, ended.values), rows=ended.rows, summary={})
    table = _table(task, ended.model.state_dict())
    return _Learned(table=table, rows=list(ended.history), summary=ended.summary)


def _table(task: AnyTask, values: Mapping[str, Tensor]) -> Any:
    """The bias and the weights, of what the task keeps."""
    return values["rows"][:, 0].clone().numpy() if task.compiled else table_of(values)


_SAVING_BYTES = 12  # of a feature: its weight without the bias, the file's bytes, and a copy of these
_ITEM = 4  # single precision


def row_bytes(strategy: Strategy, learner: str, workers: int) -> int:
    """All that workers, servers and this process keep of one feature, until the model is saved."""
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
    """UserError where what is kept of so many features does not fit in memory, as one absurd index may make it.

    `row_bytes` is all that is kept of one feature until the model is saved, copies included.
    """
    needed, room = size * row_bytes, available_bytes()
    if needed > room:
        raise UserError(
            f"a weight for every feature up to {size - 1} takes {format_bytes(needed)} with its copies, but only "
            f"{format_bytes(room)} is available; hash the features into fewer with a number of bits, such as 24"
        )
