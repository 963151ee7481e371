"""`train_gbdt`: rows, one strategy, one model.

Rows are read and put into bins once, by the caller's process; then it is a run of `manyhands.fit`, one step a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyhands.engine.fitting import await_workers, fit_or_kept
from manyhands.engine.options import EarlyStopping, Options, StoppingCount
from manyhands.engine.training import Keeping, Kept
from manyhands.errors import DataError, UserError
from manyhands.native.warming import prepare, spent_s
from manyhands.observe.draw.bars import Bars, bar_view
from manyhands.strategy import Strategy
from manyhands.workloads.gbdt.bin_table import (
    BinnedRows,
    Holdout,
    RowSample,
    bin_rows,
    sample_rows,
    shared_folder,
)
from manyhands.workloads.gbdt.binning import BinTable, bundled_layout, own_columns
from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import RowBlock, RowSource, model_names
from manyhands.workloads.gbdt.task import VALID_LOSS, GbdtTask, check_strategy
from manyhands.workloads.logreg.labels import PAIRS

__all__ = ["GbdtResult", "TableChoice", "gbdt_task", "train_gbdt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChoice:
    """What is learned from and measured on."""

    train: RowSource
    valid: RowSource | None = None
    valid_fraction: float = 0.0
    """The share of the rows of `train` that is held out, where there is no `valid`."""
    categorical: tuple[str, ...] = ()
    """Columns whose values are categories: names, or numbers from 0."""
    start: GbdtModel | None = None
    """A model to go on with: its trees come first, and new ones are grown on what it leaves."""

    def __post_init__(self) -> None:
        if self.valid is not None and self.valid_fraction:
            raise UserError("valid and valid_fraction were both given; leave out one")
        Holdout(fraction=self.valid_fraction)
        for name, source in (("train", self.train), ("valid", self.valid)):
            if source is not None and source.is_read_once:
                raise UserError(f"{name}: gbdt reads rows twice or more; give a file, not stdin")


@dataclass(kw_only=True, slots=True)
class GbdtResult:
    """A trained model and how it came about."""

    model: GbdtModel
    objective: str
    rows: int
    valid_rows: int
    trees_grown: int
    """In this training."""
    trees_kept: int
    """Fewer, where early stopping looked further than the best."""
    train_losses: list[float]
    """The mean loss before each tree."""
    valid_losses: list[float]
    """That of rows held out after each tree; empty where there are none."""
    seconds: float
    """Reading, binning and training; compiling kernels, where they were missing, not counted."""
    train_seconds: float
    """Growing trees alone."""
    interrupted: bool = False
    """Whether Ctrl-C ended it early; the model is the one that was kept."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """That of `fit`; of an interrupted run there is none."""


def train_gbdt(
    table: TableChoice,
    options: GbdtOptions | None = None,
    *,
    strategy: str | Strategy = "single",
    workers: int = 1,
    bars: Bars | None = None,
    keep: Keeping | None = None,
) -> GbdtResult:
    """Grow trees on a table; with `keep`, the run has a directory, and Ctrl-C keeps what is done, to be resumed.

    UserError for what makes no sense and for files that are wrong.
    """
    options, chosen = options or GbdtOptions(), Strategy.parse(strategy)
    check_strategy(chosen, workers)
    if options.early_stopping and table.valid is None and not table.valid_fraction:
        raise UserError("early_stopping needs rows to measure on: give valid, or valid_fraction such as 0.1")
    prepare("gbdt")
    bars, began = bars or Bars(), time.monotonic() - spent_s()
    await_workers(chosen, ["manyhands.workloads.gbdt.preload_gbdt"], compiled=True)  # while rows are read
    with gbdt_task(table, options, shared=chosen.most_workers != 1, bars=bars, threads=workers) as task:
        learned_at = time.monotonic()
        state, rows, summary = _learn(task, chosen, workers, bars, keep)
        train_seconds = time.monotonic() - learned_at
        return _result(
            task,
            table,
            state,
            rows,
            seconds=time.monotonic() - spent_s() - began,
            train_seconds=float(summary.get("seconds", train_seconds)),
            summary=summary,
        )


@contextmanager
def gbdt_task(
    table: TableChoice, options: GbdtOptions, *, shared: bool, bars: Bars | None = None, threads: int = 1
) -> Iterator[GbdtTask]:
    """The task of a table: read twice, the second time into bins, which are in files where they are `shared`.

    The bounds of bins are found by `threads` threads.
    """
    bars = bars or Bars()
    with bars.phase("reading", None, "rows") as phase:
        first = _first_pass(table, options, phase.advance, threads)
    with (
        shared_folder(shared) as folder,
        shared_folder(shared) as valid_folder,
        bars.phase("binning", first.sample.rows, "rows") as phase,
    ):
        yield GbdtTask(
            train=_binned(first, folder, phase.advance, threads),
            valid=_binned_held(first, table.valid, valid_folder),
            bins=first.bins,
            start_trees=len(table.start.trees) if table.start is not None else 0,
            largest_weight=float(first.sample.weights.max()),
            gbdt=first.options,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstPass:
    """What going through the rows once has decided."""

    source: RowSource
    holdout: Holdout
    sample: RowSample
    bins: BinTable
    options: GbdtOptions
    targets: NDArray[np.float64]
    score: Callable[[RowBlock], NDArray[np.float64] | float]
    """What a row's score begins with."""


def _first_pass(
    table: TableChoice, options: GbdtOptions, on_rows: Callable[[int], None], threads: int
) -> _FirstPass:
    """Read the rows to train on; UserError where there is nothing to learn from them."""
    holdout, source = Holdout(fraction=table.valid_fraction, seed=options.seed), table.train
    _names(table)  # which may be refused
    if table.start is not None:
        source = source.for_names(table.start.names)
    sample = sample_rows(source, holdout, options.seed, on_rows)
    if holdout.fraction and not sample.held_weights.any():
        raise DataError(f"{source.name}: no row that is held out has a weight; use a larger valid_fraction")
    if table.start is not None:
        sample, options = _going_on(table.start, sample, options)
    categorical = _columns(table.categorical, source.names, sample.columns)
    bins = sample.bins(options.max_bin, categorical, source.name, threads)
    options = replace(options, objective=_objective(options.objective, sample, source.name))
    targets = _targets(sample.labels, options.objective, source.name)
    bias = _bias(targets, sample.weights, options.objective, source.name)
    score = table.start.scores if table.start is not None else partial(_always, bias)
    return _FirstPass(
        source=source,
        holdout=holdout,
        sample=sample,
        bins=bins,
        options=options,
        targets=targets,
        score=score,
    )


def _binned(first: _FirstPass, folder: str, on_rows: Callable[[int], None], threads: int) -> BinnedRows:
    advance = iter([on_rows])  # where rows are gone through twice, the bar shows the first time

    def read() -> Iterator[RowBlock]:
        return _only(first.source.blocks(next(advance, None)), first.holdout, held=False)

    layout = bundled_layout(first.bins, first.sample.blocks)
    labels = first.targets, first.sample.weights
    return bin_rows(read, first.bins, layout, labels, folder, first.score, threads)


def _binned_held(first: _FirstPass, valid: RowSource | None, folder: str) -> BinnedRows | None:
    """The rows to measure on: those of `valid`, or those that were held out; None where there are none."""
    source, sample = first.source, first.sample
    if valid is not None:
        source = valid.for_names(source.names)
        held = sample_rows(source, Holdout(), first.options.seed)
        if held.columns != sample.columns and held.blocks[0].dense is not None:
            raise DataError(f"{valid.name} has {held.columns} columns, {first.source.name} {sample.columns}")
        labels, weights = held.labels, held.weights
    elif sample.held_out:
        labels, weights = sample.held_labels, sample.held_weights
    else:
        return None

    def read() -> Iterator[RowBlock]:
        return source.blocks() if valid is not None else _only(source.blocks(), first.holdout, held=True)

    targets = _targets(labels, first.options.objective, source.name, _pair(sample.labels))
    layout = own_columns(first.bins)  # rows held out need not exclude what others do
    return bin_rows(read, first.bins, layout, (targets, weights), folder, first.score)


def _going_on(start: GbdtModel, sample: RowSample, options: GbdtOptions) -> tuple[RowSample, GbdtOptions]:
    """What fits the model that training goes on with; UserError where table or objective are of another kind."""
    kinds = {"regression": "regression", "binary sigmoid:1": "binary"}
    if start.objective not in kinds or options.objective not in ("auto", kinds[start.objective]):
        raise UserError(
            f"start: the objective of the model is {start.objective!r}, and {options.objective} was asked for; "
            "training goes on with regression or binary"
        )
    is_sparse = sample.blocks[0].sparse is not None
    if start.columns != sample.columns and not (is_sparse and start.columns > sample.columns):
        raise UserError(f"start: the model has {start.columns} columns, and the table {sample.columns}")
    return replace(sample, columns=start.columns), replace(options, objective=kinds[start.objective])


def _always(bias: float, _block: RowBlock) -> float:
    """What every row's score begins with, where there is no model."""
    return bias


def _learn(
    task: GbdtTask, strategy: Strategy, workers: int, bars: Bars, keep: Keeping | None
) -> tuple[Mapping[str, Tensor], Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Learn through `fit`; after Ctrl-C the trees are those of the last checkpoint, and without one it is raised."""
    options = task.gbdt
    asked = keep.options if keep is not None else Options(resume_command="")
    phase = bars.phase("boosting", options.trees, "trees")
    asked = replace(asked, view=partial(bar_view, phase, float), allow_overload=options.allow_overload)
    ended = fit_or_kept(
        task, strategy, workers=workers, epochs=options.trees, seed=options.seed, options=asked, keep=keep
    )
    if isinstance(ended, Kept):
        return ended.values, ended.rows, {}
    return dict(ended.model.named_buffers()), list(ended.history), ended.summary


def _result(
    task: GbdtTask,
    table: TableChoice,
    state: Mapping[str, Tensor],
    rows: Sequence[Mapping[str, Any]],
    *,
    seconds: float,
    train_seconds: float,
    summary: Mapping[str, Any],
) -> GbdtResult:
    options = task.gbdt
    grown = int((state["num_leaves"].numpy() > 0).sum())
    valid = state["valid_loss"].numpy()[:grown].tolist() if task.valid is not None else []
    best = _best_number(valid, options.early_stopping) if options.early_stopping and valid else grown
    model = GbdtModel.of(
        state,
        best,
        task.bins,
        objective=options.objective,
        bias=0.0 if table.start is not None else float(task.train.opened()[3][0]),
        rate=options.rate,
        names=_names(table),
        parameters=_parameters(options, best),
    )
    if table.start is not None:
        model = replace(model, trees=table.start.trees + model.trees)
    model = replace(model, label_index=table.train.label_index)
    return GbdtResult(
        model=model,
        objective=options.objective,
        rows=task.train.rows,
        valid_rows=task.valid.rows if task.valid is not None else 0,
        trees_grown=grown,
        trees_kept=best,
        train_losses=[row["loss"] for row in rows if "loss" in row],
        valid_losses=valid,
        seconds=seconds,
        train_seconds=train_seconds,
        interrupted=not summary,
        summary=summary,
    )


def _parameters(options: GbdtOptions, trees: int) -> dict[str, Any]:
    """What the trees were grown with, in the words of a model file."""
    return {
        "boosting": "gbdt",
        "objective": options.objective,
        "tree_learner": "serial" if options.parallel == "data" else options.parallel,
        "num_iterations": trees,
        "learning_rate": options.rate,
        "num_leaves": options.num_leaves,
        "max_depth": options.max_depth or -1,
        "min_data_in_leaf": options.min_data_in_leaf,
        "min_sum_hessian_in_leaf": options.min_sum_hessian,
        "lambda_l2": options.lambda_l2,
        "min_gain_to_split": options.min_gain,
        "max_bin": options.max_bin,
        "max_cat_to_onehot": options.max_cat_to_onehot,
        "cat_smooth": options.cat_smooth,
        "cat_l2": options.cat_l2,
        "max_cat_threshold": options.max_cat_threshold,
        "min_data_per_group": options.min_data_per_group,
        "top_k": options.top_k,
        "seed": options.seed,
    }


def _best_number(losses: Sequence[float], patience: int) -> int:
    """How many trees the model keeps: up to the least loss that came before `patience` trees without a lesser one."""
    count = StoppingCount(EarlyStopping(metric=VALID_LOSS, patience=patience))
    for number, loss in enumerate(losses, 1):
        if count.add(number, {VALID_LOSS: loss}):
            break
    return max(count.best_step, 1)


def _only(blocks: Iterator[RowBlock], holdout: Holdout, *, held: bool) -> Iterator[RowBlock]:
    """The rows that are held out, or the others."""
    first = 0
    for block in blocks:
        out = holdout.chosen(first, len(block))
        first += len(block)
        if out.any() if held else not out.all():
            yield block if not out.any() and not held else block.take(out if held else ~out)


def _columns(asked: Sequence[str], names: Sequence[str] | None, columns: int) -> frozenset[int]:
    """Columns by name or number; UserError names one that is not there."""
    found = set()
    for one in asked:
        if names is not None and one in names:
            found.add(list(names).index(one))
        elif one.isdecimal() and len(one) < 19 and int(one) < columns:
            found.add(int(one))
        else:
            called = f"names {', '.join(list(names)[:5])}, … or " if names else ""
            raise UserError(
                f"categorical={one!r}: there is no such column; use {called}numbers from 0 to {columns - 1}"
            )
    return frozenset(found)


def _names(table: TableChoice) -> Sequence[str] | None:
    """Of the model's columns; None where they have none."""
    if table.start is not None:
        return table.start.names
    return None if table.train.names is None else model_names(table.train.names, table.train.name)


def _pair(labels: NDArray[np.float64]) -> tuple[float, float] | None:
    """No and yes, where the labels are two that mean it."""
    seen = set(np.unique(labels).tolist())
    return next((pair for pair in PAIRS if seen == set(pair)), None)


def _objective(asked: str, sample: RowSample, where: str) -> str:
    if asked == "regression":
        return asked
    pair = _pair(sample.labels)
    if asked == "auto":
        return "binary" if pair is not None else "regression"
    if pair is None:
        seen = np.unique(sample.labels)
        shown = ", ".join(f"{value:g}" for value in seen[:5]) + (", …" if len(seen) > 5 else "")
        raise DataError(
            f"{where} has labels {shown}; objective=binary has two: -1 and 1, 0 and 1, or 1 and 2; use regression"
        )
    return asked


def _targets(
    labels: NDArray[np.float64], objective: str, where: str, pair: tuple[float, float] | None = None
) -> NDArray[np.float64]:
    """Numbers, or 0 for no and 1 for yes; of rows held out by the labels of the others."""
    if objective != "binary":
        return labels
    pair = pair or _pair(labels)
    assert pair is not None, "the objective was chosen by them"
    wrong = ~np.isin(labels, pair)
    if wrong.any():
        raise DataError(f"{where} has the label {labels[wrong][0]:g} beside {pair[0]:g} and {pair[1]:g}")
    found: NDArray[np.float64] = (labels == pair[1]).astype(np.float64)
    return found


def _bias(targets: NDArray[np.float64], weights: NDArray[np.float64], objective: str, where: str) -> float:
    """What is predicted best without any tree."""
    mean = float(np.average(targets, weights=weights))
    if objective != "binary":
        return mean
    if not 0 < mean < 1:
        raise DataError(f"{where}: the rows of one label have no weight; objective=binary needs both")
    return float(np.log(mean / (1 - mean)))
