"""`manyhands train svd`, `compare svd`, and `predict` of what came out: truncated SVD and PCA of a matrix in a file."""

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
from rich.table import Table

from manyhands.cli.command_options import (
    add_command,
    check_writable,
    fresh_directory,
    print_next,
)
from manyhands.cli.compare_command import Compared, run_comparison
from manyhands.cli.environment import start_own_workers
from manyhands.cli.kept_runs import KeptRun, Shown, interrupted, keeping, leave_summary, took, watched
from manyhands.cli.runs import leave_report

if TYPE_CHECKING:
    from manyhands.workloads.svd.options import SvdOptions
    from manyhands.workloads.svd.task import SvdTask
    from manyhands.workloads.svd.training import SvdResult

__all__ = ["add_svd"]

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class _Decomposing:
    """What is decomposed how, one option each."""

    path: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The matrix: LIBSVM (plain or gzip), npy or Parquet.",
            show_default="scikit-learn's digits",
        ),
    ] = None
    rank: Annotated[int, typer.Option(help="How many singular values and components.")] = 10
    center: Annotated[bool, typer.Option("--center", help="Subtract the mean of each column first: PCA.")] = (
        False
    )
    tolerance: Annotated[float, typer.Option(help="Relative error of the singular values to end at.")] = 1e-8
    passes: Annotated[int, typer.Option(help="Passes over the matrix at most.")] = 100
    memory: Annotated[
        str, typer.Option(help="What all workers together may hold; a larger matrix is read in every pass.")
    ] = "2GiB"


@dataclass(frozen=True, kw_only=True)
class _SvdRun(_Decomposing):
    """And by whom."""

    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="one a core")] = None
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How: single, allreduce or mirrored.", show_default="single for one worker, else allreduce"
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Draws the vectors that the iteration begins with.")] = 0


@dataclass(frozen=True, kw_only=True)
class _TrainSvd(KeptRun, _SvdRun):
    """The options of `train svd`."""


@dataclass(frozen=True, kw_only=True)
class _CompareSvd(_Decomposing, Compared):
    """The options of `compare svd`."""

    strategies: Annotated[str, typer.Option(help="What to compare, separated by semicolons.")] = (
        "single; allreduce; mirrored"
    )


def add_svd(train_app: typer.Typer, compare_app: typer.Typer) -> None:
    """Offer `train svd` and `compare svd`."""
    add_command(train_app, "svd", _TrainSvd, _train)
    add_command(compare_app, "svd", _CompareSvd, _compare)


def _compare(asked: _CompareSvd) -> None:
    """Compare strategies on a truncated SVD."""

    @contextmanager
    def build(_out: Path) -> Iterator[SvdTask]:
        from manyhands.observe.draw.bars import Bars
        from manyhands.workloads.svd.task import SvdTask
        from manyhands.workloads.svd.training import stored

        options = _options(asked, asked.seed, asked.allow_overload)
        with Bars() as bars, stored(asked.path, options, bars) as matrix:
            yield SvdTask(matrix=matrix, svd=options, workers=asked.workers)

    run_comparison("svd", build, asked)


def _train(asked: _TrainSvd) -> None:
    """Decompose a matrix: its largest singular values and their components (truncated SVD, PCA)."""
    start_own_workers()
    from manyhands.workloads.svd.model import SVD_FILE
    from manyhands.workloads.svd.training import train_svd

    workers = len(os.sched_getaffinity(0)) if asked.workers is None else asked.workers
    if asked.workers is None and asked.strategy is not None:
        from manyhands.strategy import Strategy

        workers = min(workers, Strategy.parse(asked.strategy).most_workers or workers)
    options = _options(asked, asked.seed, asked.allow_overload)
    strategy = asked.strategy or ("single" if workers == 1 else "allreduce")
    out = asked.out or fresh_directory("svd")
    check_writable(asked.json_file)
    keep = keeping(asked, out, SVD_FILE)
    shown = Shown("svd", strategy, workers)
    with watched(asked, keep, shown, lambda: "there is no result yet") as (end, bars):
        result = train_svd(asked.path, options, workers=workers, strategy=strategy, bars=bars, keep=keep)
        result.model.save(out / SVD_FILE)
    summary = {**result.summary, **_summary(result), "strategy": strategy, "workers": workers}
    summary["model"] = str(out / SVD_FILE)
    leave_summary(asked, out, summary)
    _print(summary, asked)
    if result.interrupted:
        raise interrupted(keep, end, f"the result is that of {_passes(summary)}")
    leave_report(out)
    source = asked.path if asked.path is not None else "FILE"
    print_next(
        rows_projected_on_the_components=("predict", out, source, "--out", "coordinates.txt"),
        the_page_of_the_run=("watch", out),
    )


def _options(asked: _Decomposing, seed: int, allow_overload: bool) -> SvdOptions:
    from manyhands.strategy import parse_size
    from manyhands.workloads.svd.options import SvdOptions

    return SvdOptions(
        rank=asked.rank,
        center=asked.center,
        tolerance=asked.tolerance,
        passes=asked.passes,
        seed=seed,
        memory_bytes=parse_size(asked.memory),
        allow_overload=allow_overload,
    )


def _summary(result: SvdResult) -> dict[str, Any]:
    model = result.model
    return {
        "rows": model.rows,
        "columns": result.columns,
        "entries": result.entries,
        "is_sparse": result.is_sparse,
        "rank": len(model.singular_values),
        "center": model.mean is not None,
        "singular_values": model.singular_values.tolist(),
        "explained_variance": model.explained_variance.tolist() if model.mean is not None else None,
        "explained_ratio": model.explained_ratio.tolist(),
        "error": model.error,
        "converged": model.converged,
        "passes": model.passes,
        "seconds": result.seconds,
        "train_seconds": result.train_seconds,
        "interrupted": result.interrupted,
    }


def _print(summary: dict[str, Any], asked: _TrainSvd) -> None:
    out = Console()
    name = "PCA" if summary["center"] else "SVD"
    kind = "sparse" if summary["is_sparse"] else "dense"
    out.print(
        f"{name} · rank {summary['rank']} · {summary['strategy']} · {summary['workers']} workers · "
        f"{summary['rows']:,} × {summary['columns']:,} {kind} · {_passes(summary)} in "
        f"{took(summary)} · error {summary['error']:.1e}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    part = "variance" if summary["center"] else "squares"
    for column in ("", "singular value", f"part of all {part}", "so far"):
        table.add_column(column, justify="right")
    total = 0.0
    for number, (value, ratio) in enumerate(
        zip(summary["singular_values"], summary["explained_ratio"], strict=True)
    ):
        total += ratio
        if number < _SHOWN:
            table.add_row(str(number + 1), f"{value:.6g}", f"{ratio:.2%}", f"{total:.2%}")
    out.print(table)
    if summary["rank"] > _SHOWN:
        print(f"and {summary['rank'] - _SHOWN} more, which together have {total:.2%}")
    if not summary["converged"] and not summary["interrupted"]:
        print(f"manyhands: {_not_exact(summary, asked)}", file=sys.stderr)
    out.print(f"components  {summary['model']}", highlight=False, soft_wrap=True)


def _passes(summary: dict[str, Any]) -> str:
    return f"{summary['passes']} pass{'es' if summary['passes'] != 1 else ''}"


def _not_exact(summary: dict[str, Any], asked: _TrainSvd) -> str:
    values = summary["singular_values"]
    if values[-1] < 1e-5 * values[0]:
        why = "beside the largest singular value, the smallest are little more than rounding; use a smaller rank"
        return why if asked.center else f"{why}, or --center if the mean of the columns is that large"
    return (
        f"after {_passes(summary)} the singular values have an error of about {summary['error']:.1e}, more "
        f"than --tolerance {asked.tolerance:g}; go on with --resume and more --passes"
    )
