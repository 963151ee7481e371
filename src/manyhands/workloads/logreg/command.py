"""`manyhands train logreg` and `compare logreg`: a logistic regression of sparse examples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import UserError, num_of
from manyhands.strategy import Strategy
from manyhands.workloads.compiled_workload import (
    ComparedTask,
    CompiledWorkload,
    TableOptions,
    TrainEnd,
    WorkerOptions,
    target_option,
)
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.task_options import memory_option, narrowed, option

if TYPE_CHECKING:
    from manyhands.data.row_files import Reading, RowFile
    from manyhands.engine.training import Keeping
    from manyhands.observe.draw.bars import Bars


@dataclass(frozen=True, kw_only=True)
class _Examples(TableOptions, LogregOptions):
    train: str = option(
        ...,
        "examples as CSV, LIBSVM or Vowpal Wabbit, plain or gzip, .npy or .parquet; - is stdin",
        metavar="FILE",
    )
    target: str | None = target_option()
    file_format: str = option("auto", "libsvm or vw; auto: chosen by the first line", flag="--format")
    bits: int | None = option(None, "hash features into 2^bits weights", shown="no hashing")
    hash_names: str = option(
        "numbers", "numbers: hash only vw names that are not numbers; all: hash every name", flag="--hash"
    )

    @property
    def reading(self) -> Reading:
        from manyhands.data.row_files import Reading

        given: dict[str, Any] = {"format": self.file_format, "bits": self.bits, "hash": self.hash_names}
        return Reading(**given, skip_bad=self.skip_bad, threads=len(os.sched_getaffinity(0)))

    @property
    def examples(self) -> RowFile:
        from manyhands.workloads.logreg.example_tables import open_examples

        return open_examples(self.train, self.reading, self.table_reading(label=self.target))


@dataclass(frozen=True, kw_only=True)
class _TrainLogreg(WorkerOptions, _Examples):
    test: str | None = option(None, "examples to test the model on, in the same format", metavar="FILE")
    strategy: str = option(
        "single", "single, hogwild, allreduce, mirrored, central, local or ps, with settings"
    )
    workers: int = option(0, "threads or processes", at_least=0, shown="1 for single, else one per core")
    memory: int = memory_option("memory for parsed examples; the rest goes to temporary files", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reading  # noqa: B018 - which checks what it is made of
        if self.test is not None and self.test != "-" and not Path(self.test).is_file():
            raise UserError(f"--test {self.test}: no such file")


@dataclass(frozen=True, kw_only=True)
class _CompareLogreg(_Examples):
    strategies: str = option("single; hogwild; allreduce; ps consistency=async", "what to compare")


@contextmanager
def _compared(asked: _CompareLogreg, _out: Path) -> Iterator[ComparedTask]:
    # Imported here, as below, so that help texts do not wait for torch and compiled code.
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.logreg.examples import Examples, Spool, parse_examples
    from manyhands.workloads.logreg.task import LogregTask

    with Spool() as spool:
        with Bars() as bars, bars.phase("reading", None, "bytes") as phase:
            parsed = parse_examples(Examples(asked.examples), 0, spool, phase.advance)
        yield ComparedTask(task=LogregTask.of(parsed, narrowed(LogregOptions, asked)))


def _train(asked: _TrainLogreg, keep: Keeping, bars: Bars) -> TrainEnd:
    import numpy as np

    from manyhands.workloads.logreg.model import MODEL_FILE
    from manyhands.workloads.logreg.training import train_logreg

    how: dict[str, Any] = {"strategy": asked.strategy, "workers": asked.workers}
    options = narrowed(LogregOptions, asked)
    result = train_logreg(asked.examples, options, **how, memory_bytes=asked.memory, bars=bars, keep=keep)
    model, file = result.model, keep.out / MODEL_FILE
    model.save(file)
    measured: dict[str, Any] = dict.fromkeys(("accuracy", "auc", "log_loss"))
    tested_examples, bad_lines, passes = 0, 0, len(result.progressive_loss)
    if asked.test is not None:
        tested = model.file(asked.test, asked.reading)
        with bars.phase("testing", None, "examples") as phase:
            found = model.evaluate(tested, phase.advance)
        quality = found.quality("test examples", model.labels)
        measured = {**found.figures, "quality": quality}
        tested_examples, bad_lines = found.examples, tested.bad_lines
    summary = {
        **measured,
        **result.full_summary(),
        "test_examples": tested_examples,
        "learner": asked.learner,
        "l1": asked.l1,
        "l2": asked.l2,
        "passes": passes,
        "bits": model.bits,
        "features": model.weight.shape[-1],
        "features_used": int((np.atleast_2d(model.weight) != 0).any(axis=0).sum()),
        "labels": list(model.labels),
        "strategy": str(Strategy.parse(asked.strategy)),
        "workers": asked.workers,
        "test_bad_lines": bad_lines,
        "model": str(file),
    }
    bad = (result.bad_lines, asked.train), (bad_lines, asked.test)
    files = [one for one in (asked.test, asked.train) if one not in (None, "-")]
    return TrainEnd(
        summary=summary,
        shown=_shown(summary),
        notes=[f"{num_of(count, 'bad row')} of {where} left out" for count, where in bad if count],
        interrupted=f"the model was trained for {passes} of {asked.passes} passes" * result.interrupted,
        next={
            "predict examples": ("predict", keep.out, [*files, "FILE"][0], "--out", "probabilities.txt"),
            "in fewer bits": ("export", keep.out, "--precision", "int8"),
            "the same over HTTP": ("serve", keep.out),
        },
    )


def _shown(summary: dict[str, Any]) -> list[str]:
    several = f"{len(summary['labels'])} labels · " if len(summary["labels"]) > 2 else ""
    lines = [
        f"logreg · {summary['learner']} · {summary['strategy']} · {num_of(summary['workers'], 'worker')} · "
        f"{summary['examples']:,} examples · {several}"
        f"{summary['features_used']:,} of {summary['features']:,} features · "
        f"{summary['passes']} passes in {summary['seconds']:.1f} s · {summary['examples_per_s']:,.0f} examples/s",
        f"progressive log loss  {'  '.join(f'{loss:.4f}' for loss in summary['progressive_loss'])}",
    ]
    if summary["test_examples"]:
        area = f"auc {'-' if summary['auc'] is None else format(summary['auc'], '.4f')}  "
        lines.append(
            f"test  accuracy {summary['accuracy']:.4f}  {area * (len(summary['labels']) == 2)}"
            f"log loss {summary['log_loss']:.4f}  "
            f"of {summary['test_examples']:,} examples"
        )
    return [*lines, f"model  {summary['model']}"]


LOGREG = CompiledWorkload(
    name="logreg",
    help="Train a sparse logistic regression: two labels or several, any number of features.",
    options_type=_TrainLogreg,
    train=_train,
    files=("model.safetensors",),
    compare_help="Compare strategies on a sparse logistic regression.",
    compared_type=_CompareLogreg,
    compared=_compared,
)
