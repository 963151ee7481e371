"""`manyhands train gbdt`, `compare gbdt`, and what `predict` does with such a model: gradient boosting of trees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    from manyhands.workloads.gbdt.model import GbdtModel
    from manyhands.workloads.gbdt.options import GbdtOptions
    from manyhands.workloads.gbdt.task import GbdtTask
    from manyhands.workloads.gbdt.training import GbdtResult, TableChoice

__all__ = ["add_gbdt"]

_EMBEDDED = "breast-cancer"
_HELD_OUT = 0.2  # of the embedded sets
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class _Boosting:
    """What is learned from what, one option each."""

    train: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Rows: LIBSVM or Vowpal Wabbit text, plain or gzip, .npy or .parquet; or an embedded set: "
            "breast-cancer, diabetes.",
        ),
    ] = _EMBEDDED
    label: Annotated[
        str | None,
        typer.Option(
            help="Column of the labels in npy and Parquet: a number from 0, or a name.",
            show_default="column 0; label, target or y",
        ),
    ] = None
    categorical: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="Columns of categories, by number or name: 3,7.")
    ] = None
    objective: Annotated[
        str, typer.Option(help="binary, regression, or auto: what the labels look like.")
    ] = "auto"
    trees: Annotated[int, typer.Option(help="Trees at most.")] = 100
    rate: Annotated[float, typer.Option(help="Learning rate: what a new tree is multiplied by.")] = 0.1
    num_leaves: Annotated[int, typer.Option(help="Leaves of a tree at most.")] = 31
    max_depth: Annotated[int, typer.Option(help="Splits from root to leaf at most; 0: any number.")] = 0
    min_data_in_leaf: Annotated[int, typer.Option(help="Rows of a leaf at least.")] = 20
    lambda_l2: Annotated[float, typer.Option(help="L2 penalty on the values of leaves.")] = 0.0
    max_bin: Annotated[int, typer.Option(help="Bins of a feature at most, up to 255.")] = 255
    parallel: Annotated[
        str, typer.Option(help="data: histograms of all features are summed; voting: of those elected.")
    ] = "data"
    top_k: Annotated[int, typer.Option(help="With voting, features that each worker votes for.")] = 20


@dataclass(frozen=True, kw_only=True)
class _GbdtRun(_Boosting):
    """And how it is measured, where it ends, and by whom."""

    valid: Annotated[
        str | None, typer.Option(metavar="FILE", help="Rows to measure on after each tree, read likewise.")
    ] = None
    valid_fraction: Annotated[
        float | None,
        typer.Option(help="Hold out this share of the rows instead.", show_default="0; 0.2 of embedded sets"),
    ] = None
    early_stopping: Annotated[
        int, typer.Option(help="End after so many trees that were no better on the rows held out; 0: never.")
    ] = 0
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", help="Go on with this model, ours or LightGBM's: its trees come first."
        ),
    ] = None
    test: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rows to measure the model on at the end, read likewise."),
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(
            help="single, allreduce or mirrored.", show_default="single for one worker, else allreduce"
        ),
    ] = None
    workers: Annotated[int, typer.Option(help="Processes, each with a part of the rows.")] = 1
    seed: Annotated[
        int, typer.Option(help="Fixes which rows are held out, and which the bins are made of.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class _TrainGbdt(KeptRun, _GbdtRun):
    """The options of `train gbdt`."""


@dataclass(frozen=True, kw_only=True)
class _CompareGbdt(_Boosting, Compared):
    """The options of `compare gbdt`."""

    strategies: Annotated[str, typer.Option(help="What to compare, separated by semicolons.")] = (
        "single; mirrored; allreduce"
    )


def add_gbdt(train_app: typer.Typer, compare_app: typer.Typer) -> None:
    """Offer `train gbdt` and `compare gbdt`."""
    add_command(train_app, "gbdt", _TrainGbdt, _train)
    add_command(compare_app, "gbdt", _CompareGbdt, _compare)


def _compare(asked: _CompareGbdt) -> None:
    """Compare strategies on gradient boosting of trees."""

    @contextmanager
    def build(_out: Path) -> Iterator[GbdtTask]:
        from manyhands.observe.draw.bars import Bars
        from manyhands.workloads.gbdt.training import gbdt_task

        options = _options(asked, seed=asked.seed, allow_overload=asked.allow_overload)
        with Bars() as bars, gbdt_task(_table(asked), options, shared=True, bars=bars) as task:
            yield task

    run_comparison("gbdt", build, asked)


def _train(asked: _TrainGbdt) -> None:
    """Train gradient-boosted trees: a number or two labels, from a table of any size."""
    start_own_workers()
    from manyhands.workloads.gbdt.text_format import MODEL_TEXT, write_model
    from manyhands.workloads.gbdt.training import train_gbdt

    strategy = asked.strategy or ("single" if asked.workers == 1 else "allreduce")
    early = {"early_stopping": asked.early_stopping, "seed": asked.seed}
    options = _options(asked, allow_overload=asked.allow_overload, **early)
    table = replace(_table(asked, asked.valid, asked.valid_fraction), start=_start(asked.start))
    test = _source(asked, asked.test) if asked.test is not None else None
    out = asked.out or fresh_directory("gbdt")
    check_writable(asked.json_file)
    keep = keeping(asked, out, MODEL_TEXT)
    shown = Shown("gbdt", strategy, asked.workers)
    with watched(asked, keep, shown, lambda: "there is no model") as (end, bars):
        result = train_gbdt(table, options, strategy=strategy, workers=asked.workers, bars=bars, keep=keep)
        write_model(result.model, out / MODEL_TEXT)
    summary = {
        **result.summary,
        **_summary(result),
        **_measured(result, test),
        "strategy": strategy,
        "workers": asked.workers,
        "model": str(out / MODEL_TEXT),
    }
    leave_summary(asked, out, summary)
    _print(summary)
    if result.interrupted:
        grown = f"{summary['trees']} of {asked.trees} trees"
        raise interrupted(keep, end, f"the model is that after {grown}")
    leave_report(out)
    rows = asked.test or asked.train
    print_next(what_it_says_of_rows=("predict", out, rows, "--out", "predictions.txt"))


def _source(asked: _Boosting, path: str) -> Any:
    from manyhands.data.row_files import Reading
    from manyhands.workloads.gbdt.row_sources import open_source

    return open_source(path, Reading(threads=len(os.sched_getaffinity(0))), asked.label)


def _table(asked: _Boosting, valid: str | None = None, fraction: float | None = None) -> TableChoice:
    from manyhands.workloads.gbdt.row_sources import EMBEDDED
    from manyhands.workloads.gbdt.training import TableChoice

    usual = _HELD_OUT if asked.train in EMBEDDED and valid is None else 0.0
    return TableChoice(
        train=_source(asked, asked.train),
        valid=_source(asked, valid) if valid is not None else None,
        valid_fraction=usual if fraction is None else fraction,
        categorical=tuple(one.strip() for one in asked.categorical.split(",")) if asked.categorical else (),
    )


def _start(path: Path | None) -> GbdtModel | None:
    from manyhands.workloads.gbdt.text_format import read_model

    return None if path is None else read_model(path)


def _options(asked: _Boosting, **more: Any) -> GbdtOptions:
    from manyhands.workloads.gbdt.options import GbdtOptions

    return GbdtOptions(
        objective=asked.objective,
        trees=asked.trees,
        rate=asked.rate,
        num_leaves=asked.num_leaves,
        max_depth=asked.max_depth,
        min_data_in_leaf=asked.min_data_in_leaf,
        lambda_l2=asked.lambda_l2,
        max_bin=asked.max_bin,
        parallel=asked.parallel,
        top_k=asked.top_k,
        **more,
    )


def _summary(result: GbdtResult) -> dict[str, Any]:
    model = result.model
    by_gain, by_split = model.importance("gain"), model.importance("split")
    order = sorted(range(model.columns), key=lambda at: (-by_gain[at], at))
    return {
        "objective": result.objective,
        "trees": len(model.trees),
        "trees_grown": result.trees_grown,
        "rows": result.rows,
        "valid_rows": result.valid_rows,
        "features": model.columns,
        "train_losses": result.train_losses,
        "valid_losses": result.valid_losses,
        "valid_loss": result.valid_losses[result.trees_kept - 1] if result.valid_losses else None,
        "importance": [
            {"feature": model.names[at], "gain": float(by_gain[at]), "splits": int(by_split[at])}
            for at in order
            if by_split[at]
        ],
        "seconds": result.seconds,
        "train_seconds": result.train_seconds,
        "interrupted": result.interrupted,
    }


def _measured(result: GbdtResult, test: Any) -> dict[str, Any]:
    """How good the model is on the rows of a file."""
    if test is None:
        return {}
    from manyhands.workloads.gbdt.measuring import measure_model

    return measure_model(result.model, test)


def _print(summary: dict[str, Any]) -> None:
    out = Console()
    rows = f"{summary['rows']:,} rows" + (
        f" + {summary['valid_rows']:,} held out" if summary["valid_rows"] else ""
    )
    out.print(
        f"gbdt · {summary['objective']} · {summary['strategy']} · {summary['workers']} workers · {rows} · "
        f"{summary['features']:,} features · {summary['trees']} trees in {took(summary)}",
        highlight=False,
    )
    name = "log loss" if summary["objective"] == "binary" else "squared error"
    if summary["train_losses"]:
        line = f"{name}  train {summary['train_losses'][0]:.4f} → {summary['train_losses'][-1]:.4f}"
        if summary["valid_loss"] is not None:
            line += f"  held out {summary['valid_loss']:.4f}"
        out.print(line, highlight=False)
    if summary.get("test_rows"):
        shown = ("accuracy", "auc", "log_loss", "rmse", "r2")
        parts = [f"{key} {summary[key]:.4f}" for key in shown if summary.get(key) is not None]
        out.print(f"test  {'  '.join(parts)}  of {summary['test_rows']:,} rows", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("feature", "gain", "splits"):
        table.add_column(heading, justify="left" if heading == "feature" else "right")
    for one in summary["importance"][:_SHOWN]:
        table.add_row(one["feature"], f"{one['gain']:,.1f}", f"{one['splits']:,}")
    if summary["importance"]:
        out.print(table, highlight=False, markup=False)
    out.print(f"model   {summary['model']}", highlight=False, soft_wrap=True)
