"""The seam between a workload with a training of its own and the command line, which asks for none by its name.

A workload says which options it has, how it trains with them and what came out; `cli/train_command.py` makes
`manyhands train NAME` and `manyhands compare NAME` of that: where the run is kept, its page, signals, summary, report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from manyhands.strategy import Strategy
from manyhands.workloads.task_options import option

if TYPE_CHECKING:
    from torch import nn

    from manyhands.data.table_files import TableReading
    from manyhands.engine.kernel_task import KernelTask
    from manyhands.engine.training import Keeping
    from manyhands.observe.draw.bars import Bars

Chosen = TypeVar("Chosen")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Who trains: the last options of a workload, filled in once they are checked."""

    strategy: str = option("", "single, allreduce or mirrored", shown="single for 1 worker, else allreduce")
    workers: int = option(0, "processes", at_least=0, shown="one per core")

    def __post_init__(self) -> None:
        """A worker for each core, as far as the strategy takes them; one worker is `single`, more are `allreduce`."""
        super().__post_init__()  # type: ignore[misc]  # of the workload's own options, which checks them
        workers, cores = self.workers, len(os.sched_getaffinity(0))
        if not workers:
            most = Strategy.parse(self.strategy).most_workers if self.strategy else None
            workers = min(cores, most or cores)
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "strategy", self.strategy or ("single" if workers == 1 else "allreduce"))


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What of a table is read: CSV, Parquet."""

    categorical: str | None = option(
        None,
        "categorical columns besides those of text, by name or number of the feature: zip,7",
        metavar="COLUMNS",
    )
    drop: str | None = option(None, "columns of a table to leave out, by name: id,name", metavar="COLUMNS")
    skip_bad: bool = option(False, "skip invalid lines or rows and count them", flag="--skip-bad")

    def table_reading(self, **more: Any) -> TableReading:
        from manyhands.data.table_files import TableReading

        columns = listed(self.categorical), listed(self.drop)
        return TableReading(categorical=columns[0], drop=columns[1], skip_bad=self.skip_bad, **more)


def listed(text: str | None) -> tuple[str, ...]:
    """The words between commas."""
    return tuple(one.strip() for one in text.split(",")) if text else ()


def target_option() -> Any:
    shown = "the one called label, target or y; column 0 without names"
    return option(None, "label column of a table or npy file: a name, or a number from 0", shown=shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRows:
    """A table that is printed at the end of a training."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True  # in all columns but the first


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainEnd:
    """How a training ended, to its end or by a signal."""

    summary: Mapping[str, Any]
    shown: Sequence[str | TableRows]  # what is printed
    notes: Sequence[str] = ()  # what goes to stderr
    interrupted: str = ""  # what the result of a run is that a signal ended, in words; empty: none did
    next: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """What to do next: the words of a command by what it gives."""
    is_summary_of_run: bool = True
    """Whether `summary` is what RUN/summary.json holds, instead of the one of `fit`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedTask:
    """The task of a comparison."""

    task: KernelTask
    score: Callable[[nn.Module], Mapping[str, float]] | None = None
    """What a trained model is worth besides, by name; more is better."""
    scores: tuple[str, ...] = ()  # the names


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledWorkload(Generic[Chosen]):
    """One workload: its options, its training, and its task for comparisons."""

    name: str
    help: str  # what `manyhands train NAME` does: a sentence
    options_type: type[Chosen]
    """The options of `train`; they have `strategy` and `workers`, as `WorkerOptions`."""
    train: Callable[[Chosen, Keeping, Bars], TrainEnd]
    files: tuple[str, ...]  # its own files in a run's directory; the first is the model
    compare_help: str
    compared_type: type
    """The options of `compare`: those of this name that every comparison has get other defaults here."""
    compared: Callable[[Any, Path], AbstractContextManager[ComparedTask]]
    """The task of these options, with what it needs beside the directory of the comparison."""
