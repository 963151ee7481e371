"""`manyhands train logreg` and `compare logreg`: a logistic regression of sparse examples."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from manyhands.cli.command_options import (
    add_command,
    check_writable,
    fresh_directory,
    print_next,
)
from manyhands.cli.compare_command import Compared, run_comparison
from manyhands.cli.environment import start_own_workers
from manyhands.cli.kept_runs import KeptRun, Shown, interrupted, keeping, leave_summary, watched
from manyhands.cli.runs import leave_report

if TYPE_CHECKING:
    from manyhands.data.row_files import Reading
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.logreg.metrics import Metrics
    from manyhands.workloads.logreg.options import LogregOptions
    from manyhands.workloads.logreg.task import LogregTask
    from manyhands.workloads.logreg.training import LogregResult

__all__ = ["add_logreg"]

_Format = Annotated[str, typer.Option("--format", help="libsvm or vw; auto looks at the first line.")]
_SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that are wrong and count them.")]


@dataclass(frozen=True, kw_only=True)
class _Learning:
    """What is learned from what, one option each."""

    train: Annotated[
        str,
        typer.Option(metavar="FILE", help="Examples, LIBSVM or Vowpal Wabbit, plain or gzip; - is stdin."),
    ]
    file_format: _Format = "auto"
    bits: Annotated[
        int | None,
        typer.Option(help="Hash features into a table of 2^bits.", show_default="none: the index is the row"),
    ] = None
    hash_names: Annotated[
        str,
        typer.Option(
            "--hash", help="Names of vw files that are numbers: numbers, as they are, or all: hashed."
        ),
    ] = "numbers"
    learner: Annotated[str, typer.Option(help="sgd, adagrad or ftrl.")] = "adagrad"
    passes: Annotated[int, typer.Option(help="Passes over the examples.")] = 5
    rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate.", show_default="as fits the values: 0.1, or 0.5 for sgd, if they are 1"
        ),
    ] = None
    l1: Annotated[float, typer.Option(help="Penalty λ·|w|: of each example; of all of them with ftrl.")] = 0.0
    l2: Annotated[float, typer.Option(help="Penalty λ/2·w², likewise.")] = 0.0
    no_bias: Annotated[bool, typer.Option("--no-bias", help="Learn no weight that every example has.")] = (
        False
    )
    batch: Annotated[int, typer.Option(help="Examples in a step of allreduce, mirrored, central and ps.")] = (
        256
    )
    skip_bad: _SkipBad = False


@dataclass(frozen=True, kw_only=True)
class _LogregRun(_Learning):
    """And how it is measured, and by whom."""

    test: Annotated[
        str | None, typer.Option(metavar="FILE", help="Examples to measure the model on, read likewise.")
    ] = None
    strategy: Annotated[
        str,
        typer.Option(help="How: single, hogwild, allreduce, mirrored, central, local or ps, with settings."),
    ] = "single"
    workers: Annotated[
        int | None, typer.Option(help="Threads or processes.", show_default="1 for single, else one a core")
    ] = None
    memory: Annotated[
        str, typer.Option(help="Keep parsed examples in memory up to this; else in temporary files.")
    ] = "2GiB"
    seed: Annotated[int, typer.Option(help="Fixes the order of examples where batches are drawn.")] = 0


@dataclass(frozen=True, kw_only=True)
class _TrainLogreg(KeptRun, _LogregRun):
    """The options of `train logreg`."""


@dataclass(frozen=True, kw_only=True)
class _CompareLogreg(_Learning, Compared):
    """The options of `compare logreg`."""

    strategies: Annotated[str, typer.Option(help="What to compare, separated by semicolons.")] = (
        "single; hogwild; allreduce; ps consistency=async"
    )


def add_logreg(train_app: typer.Typer, compare_app: typer.Typer) -> None:
    """Offer `train logreg` and `compare logreg`."""
    add_command(train_app, "logreg", _TrainLogreg, _train)
    add_command(compare_app, "logreg", _CompareLogreg, _compare)


def _compare(asked: _CompareLogreg) -> None:
    """Compare strategies on a sparse logistic regression."""

    @contextmanager
    def build(_out: Path) -> Iterator[LogregTask]:
        from manyhands.data.row_files import RowFile
        from manyhands.observe.draw.bars import Bars
        from manyhands.workloads.logreg.examples import Examples
        from manyhands.workloads.logreg.spool import Spool
        from manyhands.workloads.logreg.task import LogregTask
        from manyhands.workloads.logreg.training import parse_examples

        options = _options(asked, asked.seed, asked.allow_overload)
        with Spool() as spool:
            with Bars() as bars, bars.phase("reading", None, "bytes") as phase:
                examples = Examples(RowFile(asked.train, _reading(asked)))
                parsed = parse_examples(examples, 0, spool, phase.advance)
            yield LogregTask.of(parsed, options)

    run_comparison("logreg", build, asked)


def _train(asked: _TrainLogreg) -> None:
    """Train a sparse logistic regression: two labels, any number of features."""
    start_own_workers()
    from manyhands.errors import UserError
    from manyhands.strategy import Strategy, parse_size
    from manyhands.workloads.logreg.model import MODEL_FILE
    from manyhands.workloads.logreg.training import train_logreg

    strategy = Strategy.parse(asked.strategy)
    usual = min(_cores(), strategy.most_workers or _cores())
    workers = usual if asked.workers is None else asked.workers
    reading, options = _reading(asked), _options(asked, asked.seed, asked.allow_overload)
    out = asked.out or fresh_directory("logreg")
    check_writable(asked.json_file)
    if asked.test is not None and asked.test != "-" and not Path(asked.test).is_file():
        raise UserError(f"--test {asked.test}: there is no such file")
    keep, file = keeping(asked, out, MODEL_FILE), out / MODEL_FILE

    def kept() -> str:
        return f"the model is in {file}" if file.exists() else "there is no model"

    with watched(asked, keep, Shown("logreg", asked.strategy, workers), kept) as (end, bars):
        result = train_logreg(
            asked.train,
            options,
            strategy=strategy,
            workers=workers,
            reading=reading,
            memory_bytes=parse_size(asked.memory),
            bars=bars,
            keep=keep,
        )
        result.model.save(file)
        metrics, bad_lines = _measure(result, asked.test, reading, bars)
    summary = {
        **result.summary,
        **_summary(result, options, metrics),
        "strategy": str(strategy),
        "workers": workers,
        "test_bad_lines": bad_lines,
        "model": str(file),
    }
    leave_summary(asked, out, summary)
    _print(summary)
    if result.interrupted:
        raise interrupted(keep, end, f"the model is that after {summary['passes']} of {asked.passes} passes")
    leave_report(out)
    files = [file for file in (asked.test, asked.train) if file not in (None, "-")]
    print_next(
        what_it_answers=("predict", out, [*files, "FILE"][0], "--out", "probabilities.txt"),
        in_fewer_bits=("export", out, "--precision", "int8"),
        the_same_over_HTTP=("serve", out),
    )


def _reading(asked: _Learning) -> Reading:
    from manyhands.data.row_files import Reading

    return Reading(
        format=asked.file_format,
        bits=asked.bits,
        hash=asked.hash_names,
        skip_bad=asked.skip_bad,
        threads=_cores(),
    )


def _options(asked: _Learning, seed: int, allow_overload: bool) -> LogregOptions:
    from manyhands.workloads.logreg.options import LogregOptions

    return LogregOptions(
        learner=asked.learner,
        passes=asked.passes,
        rate=asked.rate,
        l1=asked.l1,
        l2=asked.l2,
        bias=not asked.no_bias,
        batch=asked.batch,
        seed=seed,
        allow_overload=allow_overload,
    )


def _measure(
    result: LogregResult, test: str | None, reading: Reading, bars: Bars
) -> tuple[Metrics | None, int]:
    if test is None:
        return None, 0
    file = result.model.file(test, reading)
    with bars.phase("testing", None, "examples") as phase:
        return result.model.evaluate(file, phase.advance), file.bad_lines


def _summary(result: LogregResult, options: Any, metrics: Metrics | None) -> dict[str, Any]:
    return {
        "accuracy": metrics.accuracy if metrics else None,
        "auc": metrics.auc if metrics else None,
        "log_loss": metrics.log_loss if metrics else None,
        "test_examples": metrics.examples if metrics else 0,
        "learner": options.learner,
        "rate": result.rate,
        "l1": options.l1,
        "l2": options.l2,
        "passes": len(result.progressive),
        "progressive_loss": result.progressive,
        "examples": result.examples,
        "bad_lines": result.bad_lines,
        "bits": result.model.bits,
        "features": int(result.model.weight.size),
        "features_used": int((result.model.weight != 0).sum()),
        "labels": [result.model.labels.no, result.model.labels.yes],
        "seconds": result.seconds,
        "examples_per_s": result.examples_per_s,
        "interrupted": result.interrupted,
    }


def _print(summary: dict[str, Any]) -> None:
    out = Console()
    out.print(
        f"logreg · {summary['learner']} · {summary['strategy']} · {summary['workers']} workers · "
        f"{summary['examples']:,} examples · {summary['features_used']:,} of {summary['features']:,} features · "
        f"{summary['passes']} passes in {summary['seconds']:.1f} s · {summary['examples_per_s']:,.0f} examples/s",
        highlight=False,
    )
    losses = "  ".join(f"{loss:.4f}" for loss in summary["progressive_loss"])
    out.print(f"progressive log loss  {losses}", highlight=False)
    if summary["test_examples"]:
        area = "-" if summary["auc"] is None else f"{summary['auc']:.4f}"
        out.print(
            f"test  accuracy {summary['accuracy']:.4f}  auc {area}  log loss {summary['log_loss']:.4f}  "
            f"of {summary['test_examples']:,} examples",
            highlight=False,
        )
    out.print(f"model  {summary['model']}", highlight=False, soft_wrap=True)
    for what in ("bad_lines", "test_bad_lines"):
        if summary[what]:
            where = "of the test file " if what.startswith("test") else ""
            print(f"manyhands: {summary[what]} bad lines {where}were left out", file=sys.stderr)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
