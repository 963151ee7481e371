"""`train_gbdt`: rows, one strategy, one model.

Rows are read and put into bins once, by the caller's process; then it is a run of `manyhands.fit`, one step a tree.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.engine.fitting import await_workers
from manyhands.engine.options import EarlyStopping, StoppingCount
from manyhands.engine.training import Keeping
from manyhands.errors import DataError, UserError
from manyhands.native.warming import prepare, spent_s
from manyhands.observe.draw.bars import Bars
from manyhands.strategy import Strategy
from manyhands.workloads.compiled_training import CompiledResult, TrainedRun, train_compiled
from manyhands.workloads.gbdt.bin_table import BinnedRows, Holdout, OnRows, RowSample, bin_rows, sample_rows
from manyhands.workloads.gbdt.binning import bundled_layout, own_columns
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
    categorical: tuple[str, ...] = ()  # columns whose values are categories: names, or numbers from 0
    start: GbdtModel | None = None
    """A model to continue: its trees come first, and new ones are grown on what it leaves."""

    def __post_init__(self) -> None:
        if self.valid is not None and self.valid_fraction:
            raise UserError("valid and valid_fraction were both given; leave out one")
        Holdout(fraction=self.valid_fraction)
        for name, source in (("train", self.train), ("valid", self.valid)):
            if source is not None and source.is_read_once:
                raise UserError(f"{name}: gbdt reads its rows more than once; give a file, not stdin")


@dataclass(kw_only=True, slots=True)
class GbdtResult(CompiledResult):
    """A trained model and how it came about."""

    model: GbdtModel
    objective: str
    rows: int
    valid_rows: int
    bad_rows: int  # rows to train on that were wrong and left out
    trees_grown: int  # in this training
    trees_kept: int  # fewer, where early stopping looked further than the best
    train_losses: list[float]  # the mean before each tree
    valid_losses: list[float]  # that of rows held out after each tree; empty where there are none
    train_seconds: float  # growing trees alone


def train_gbdt(
    table: TableChoice,
    options: GbdtOptions | None = None,
    *,
    strategy: str | Strategy = "single",
    workers: int = 1,
    bars: Bars | None = None,
    keep: Keeping | None = None,
) -> GbdtResult:
    """Grow trees on a table; with `keep`, the run has a directory, as `train_compiled` says.

    UserError for what makes no sense and for files that are wrong.
    """
    options, chosen = options or GbdtOptions(), Strategy.parse(strategy)
    check_strategy(chosen, workers)
    if options.early_stopping and table.valid is None and not table.valid_fraction:
        raise UserError("early_stopping needs held-out rows: give valid, or valid_fraction such as 0.1")
    prepare("gbdt")
    bars, began = bars or Bars(), time.monotonic() - spent_s()
    await_workers(chosen, ["manyhands.workloads.gbdt.preload_gbdt"], compiled=True)  # while rows are read
    with gbdt_task(table, options, shared=chosen.most_workers != 1, bars=bars, threads=workers) as task:
        learned_at, bar = time.monotonic(), bars.phase("boosting", options.trees, "trees")
        how: Any = {"workers": workers, "epochs": options.trees, "options": options, "keep": keep}
        trained = train_compiled(task, chosen, **how, shown=(bar, float))
        train_seconds = float(trained.summary.get("seconds", time.monotonic() - learned_at))
        return _result(task, table, trained, train_seconds, time.monotonic() - spent_s() - began)


@contextmanager
def gbdt_task(
    table: TableChoice, options: GbdtOptions, *, shared: bool, bars: Bars | None = None, threads: int = 1
) -> Iterator[GbdtTask]:
    """The task of a table: read twice, the second time into bins, which are in files where they are `shared`.

    The bounds of bins are found by `threads` threads.
    """
    bars = bars or Bars()
    with bars.phase("reading", None, "rows") as phase:
        first = _FirstPass(table, options, phase.advance, threads)
    with ExitStack() as stack, bars.phase("binning", first.sample.rows, "rows") as phase:
        prefix, folders = "manyhands-gbdt-", ["", ""]  # files, where several processes map them
        if shared:
            folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)) for _ in folders]
        yield GbdtTask(
            train=first.binned(folders[0], phase.advance, threads),
            valid=first.binned_held(table.valid, folders[1]),
            bins=first.bins,
            start_trees=len(table.start.trees) if table.start is not None else 0,
            largest_weight=float(first.sample.weights.max()),
            gbdt=first.options,
        )


class _FirstPass:
    """Goes through the rows to train on once, and decides; UserError where there is nothing to learn from them."""

    def __init__(self, table: TableChoice, options: GbdtOptions, on_rows: OnRows, threads: int) -> None:
        holdout, source = Holdout(fraction=table.valid_fraction, seed=options.seed), table.train
        _names(table)  # which may be rejected
        if table.start is not None:
            source = source.for_names(table.start.names, table.start.encoding)
        sample, where = sample_rows(source, holdout, options.seed, on_rows), source.name
        table.train.left_out = source.left_out
        if holdout.fraction and not sample.held_weights.any():
            raise DataError(f"{where}: no held-out row has a positive weight; use a larger valid_fraction")
        if table.start is not None:
            sample, options = _continued(table.start, sample, options)
        categorical = _columns(table.categorical, source, sample.columns)
        self.bins = sample.bins(options.max_bin, categorical, where, threads)
        self.options = replace(options, objective=_objective(options.objective, sample, where))
        self.source, self.holdout, self.sample = source, holdout, sample
        self._targets = _targets(sample.labels, self.options.objective, where)
        bias = float(np.average(self._targets, weights=sample.weights))  # predicted best without any tree
        if self.options.objective == "binary":
            if not 0 < bias < 1:
                raise DataError(f"{where}: the rows of one label have no weight; objective=binary needs both")
            bias = float(np.log(bias / (1 - bias)))
        self._start, self._bias = table.start, bias

    def _score(self, block: RowBlock) -> NDArray[np.float64] | float:  # what a row's begins with
        return self._bias if self._start is None else self._start.scores(block)

    def binned(self, folder: str, on_rows: OnRows, threads: int) -> BinnedRows:
        advance = iter([on_rows])  # where rows are gone through twice, the bar shows the first time

        def read() -> Iterator[RowBlock]:
            return self.holdout.only(self.source.blocks(next(advance, None)), held=False)

        layout, labels = bundled_layout(self.bins, self.sample.blocks), (self._targets, self.sample.weights)
        return bin_rows(read, self.bins, layout, labels, folder, self._score, threads)

    def binned_held(self, valid: RowSource | None, folder: str) -> BinnedRows | None:
        """The rows to measure on: those of `valid`, or those that were held out; None where there are none."""
        source, sample = self.source, self.sample
        labels, weights = sample.held_labels, sample.held_weights
        if valid is not None:
            source = valid.for_names(source.names, source.encoding)
            held = sample_rows(source, Holdout(), self.options.seed)
            if held.columns != sample.columns and held.blocks[0].dense is not None:
                own = f"{self.source.name} {sample.columns}"
                raise DataError(f"{valid.name} has {held.columns} columns, {own}")
            labels, weights = held.labels, held.weights
        if not len(labels):
            return None

        def read() -> Iterator[RowBlock]:
            return source.blocks() if valid is not None else self.holdout.only(source.blocks(), held=True)

        targets = _targets(labels, self.options.objective, source.name, _pair(sample.labels))
        layout = own_columns(self.bins)  # rows held out need not exclude what others do
        return bin_rows(read, self.bins, layout, (targets, weights), folder, self._score)


def _continued(start: GbdtModel, sample: RowSample, options: GbdtOptions) -> tuple[RowSample, GbdtOptions]:
    """What fits the model that training continues; UserError where table or objective are of another kind."""
    kinds = {"regression": "regression", "binary sigmoid:1": "binary"}
    if start.objective not in kinds or options.objective not in ("auto", kinds[start.objective]):
        raise UserError(
            f"start: the model's objective is {start.objective!r}, but {options.objective} was given; "
            "only regression and binary models can be continued"
        )
    is_sparse = sample.blocks[0].sparse is not None
    if start.columns != sample.columns and not (is_sparse and start.columns > sample.columns):
        raise UserError(f"start: the model has {start.columns} columns, but the table has {sample.columns}")
    return replace(sample, columns=start.columns), replace(options, objective=kinds[start.objective])


def _result(
    task: GbdtTask, table: TableChoice, trained: TrainedRun, train_seconds: float, seconds: float
) -> GbdtResult:
    options, state = task.gbdt, trained.values
    grown = best = int((state["num_leaves"].numpy() > 0).sum())
    valid: list[float] = state["valid_loss"].numpy()[:grown].tolist() if task.valid is not None else []
    if options.early_stopping and valid:
        # Up to the least loss that came before `early_stopping` trees without a lesser one.
        count = StoppingCount(EarlyStopping(metric=VALID_LOSS, patience=options.early_stopping))
        any(count.add(number, {VALID_LOSS: loss}) for number, loss in enumerate(valid, 1))
        best = max(count.best_step, 1)
    bias = 0.0 if table.start is not None else float(task.train.opened()[3][0])
    model = GbdtModel.of(state, best, task.bins, options, bias, _names(table))
    earlier = table.start.trees if table.start is not None else ()
    return GbdtResult(
        model=replace(
            model,
            trees=earlier + model.trees,
            label_index=table.train.label_index,
            encoding=table.start.encoding if table.start is not None else table.train.encoding,
            parameters=_parameters(options, best),
        ),
        objective=options.objective,
        rows=task.train.rows,
        valid_rows=task.valid.rows if task.valid is not None else 0,
        bad_rows=table.train.left_out,
        trees_grown=grown,
        trees_kept=best,
        train_losses=[row["loss"] for row in trained.rows if "loss" in row],
        valid_losses=valid,
        seconds=seconds,
        train_seconds=train_seconds,
        interrupted=not trained.summary,
        summary=trained.summary,
    )


def _parameters(options: GbdtOptions, trees: int) -> dict[str, Any]:
    """What the trees were grown with, in the words of a model file."""
    renamed = {"rate": "learning_rate", "min_gain": "min_gain_to_split"}
    renamed["min_sum_hessian"] = "min_sum_hessian_in_leaf"
    others = ("objective", "trees", "parallel", "early_stopping", "allow_overload")
    kept = {renamed.get(name, name): one for name, one in asdict(options).items() if name not in others}
    return {
        "boosting": "gbdt",
        "objective": options.objective,
        "tree_learner": "serial" if options.parallel == "data" else options.parallel,
        "num_iterations": trees,
        **kept,
        "max_depth": options.max_depth or -1,
    }


def _columns(asked: Sequence[str], source: RowSource, columns: int) -> frozenset[int]:
    """Which columns hold categories: those asked for, and those of text."""
    names, encoding = source.names, source.encoding
    found = (
        {at for at, name in enumerate(encoding.names) if name in encoding.categories} if encoding else set()
    )
    for one in asked:
        if names is not None and one in names:
            found.add(list(names).index(one))
        elif one.isdecimal() and len(one) < 19 and int(one) < columns:
            found.add(int(one))
        else:
            called = f"names {', '.join(list(names)[:5])}, … or " if names else ""
            raise UserError(f"categorical={one!r}: no such column; use {called}numbers 0 to {columns - 1}")
    return frozenset(found)


def _names(table: TableChoice) -> Sequence[str] | None:
    if table.start is not None:
        return table.start.names
    return None if table.train.names is None else model_names(table.train.names, table.train.name)


def _pair(labels: NDArray[np.float64]) -> tuple[float, float] | None:
    seen = set(np.unique(labels).tolist())
    return next((pair for pair in PAIRS if seen == set(pair)), None)


def _objective(asked: str, sample: RowSample, where: str) -> str:
    pair = _pair(sample.labels)
    if asked == "auto":
        return "binary" if pair is not None else "regression"
    if asked == "binary" and pair is None:
        seen = np.unique(sample.labels)
        shown = ", ".join(f"{value:g}" for value in seen[:5]) + (", …" if len(seen) > 5 else "")
        raise DataError(
            f"{where} has labels {shown}; objective=binary needs two: -1 and 1, 0 and 1, or 1 and 2; use regression"
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
        raise DataError(f"{where} has label {labels[wrong][0]:g} besides {pair[0]:g} and {pair[1]:g}")
    found: NDArray[np.float64] = (labels == pair[1]).astype(np.float64)
    return found
