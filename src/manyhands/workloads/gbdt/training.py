"""`train_gbdt`: rows, one strategy, one model.

Rows are read and put into bins once, by the caller's process; then it is a run of `manyhands.fit`, one step a tree.
"""

from __future__ import annotations

import logging
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
from manyhands.errors import DataError, UserError, format_bytes, num_of
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
from manyhands.workloads.logreg.labels import NO_LABELS, PAIRS, Labels, labels_of

_log = logging.getLogger("manyhands")
_MOST_GUESSED = 32  # labels that are integers: of more, they are guessed to be a number
_ROW_BYTES = 56  # labels, targets and weights, with copies, and in which leaf it is
_CLASS_BYTES = 32  # scores with those of the beginning, gradient and hessian
_READING_BYTES = 96 << 20  # blocks of rows that are read, and what allocators keep of them
_LEAST_SHARE = 1e-15  # of a class without rows to train on


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
    labels: Labels  # of its classes, in order; none of a number
    rows: int
    valid_rows: int
    bad_rows: int  # rows to train on that were wrong and left out
    trees_grown: int  # in this training; of several classes, for each
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
    """The task of a table: read twice, the second time into bins, which are in files where they are `shared` or large.

    The bounds of bins are found by `threads` threads.
    """
    bars = bars or Bars()
    with bars.phase("reading", None, "rows") as phase:
        first = _FirstPass(table, options, phase.advance, threads)
    if first.guess:
        _log.warning("manyhands: %s", first.guess)
    with ExitStack() as stack, bars.phase("binning", first.sample.rows, "rows") as phase:
        prefix, folders = "manyhands-gbdt-", ["", ""]  # files, where several processes map them
        if shared or first.needs_files():
            folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)) for _ in folders]
        task = GbdtTask(
            train=first.binned(folders[0], phase.advance, threads),
            valid=first.binned_held(table.valid, folders[1]),
            bins=first.bins,
            start_trees=len(table.start.trees) if table.start is not None else 0,
            largest_weight=float(first.sample.weights.max()),
            labels=first.labels,
            note=first.guess,
            gbdt=first.options,
        )
        del first  # whose copies of labels and weights are not needed any more
        yield task


class _FirstPass:
    """Goes through the rows to train on once, and decides; UserError where there is nothing to learn from them."""

    def __init__(self, table: TableChoice, options: GbdtOptions, on_rows: OnRows, threads: int) -> None:
        holdout, source = Holdout(fraction=table.valid_fraction, seed=options.seed), table.train
        _names(table)  # which may be rejected
        if table.start is not None:
            source = source.for_names(table.start.names, table.start.encoding, table.start.labels)
        sample, where = sample_rows(source, holdout, options.seed, on_rows), source.name
        table.train.left_out = source.left_out
        if holdout.fraction and not sample.held_weights.any():
            raise DataError(f"{where}: no held-out row has a positive weight; use a larger valid_fraction")
        if table.start is not None:
            sample, options = _continued(table.start, sample, options)
        categorical = _columns(table.categorical, source, sample.columns)
        self.bins = sample.bins(options.max_bin, categorical, where, threads, options.min_data_in_bin)
        known = table.start.labels if table.start is not None else NO_LABELS
        seen = np.unique(np.concatenate([sample.labels, sample.held_labels]))
        objective, self.labels, self.guess = _objective(options.objective, seen, source, known)
        self.options = replace(options, objective=objective)
        self.source, self.holdout, self.sample = source, holdout, sample
        self._targets = _targets(sample.labels, self.labels, source)
        self._start, self._bias = table.start, _biases(objective, self._targets, sample.weights, self.labels)
        if objective == "binary" and not np.isfinite(self._bias).all():
            raise DataError(f"{where}: the rows of one label have no weight; objective=binary needs both")

    def _score(
        self, block: RowBlock
    ) -> NDArray[np.float64]:  # what a row's begins with, a row for each class
        return self._bias[:, None] if self._start is None else self._start.scores(block).T

    def needs_files(self) -> bool:
        """Whether bins do not fit into the memory beside what else is kept of rows; UserError where that does not."""
        rows = self.sample.rows + len(self.sample.held_labels)
        needed, room = rows * (_ROW_BYTES + _CLASS_BYTES * len(self._bias)), self.options.memory_bytes
        if needed > room:
            raise UserError(
                f"memory={format_bytes(room)}: {rows:,} rows need {format_bytes(needed)} besides their bins; give more "
                "memory or fewer rows"
            )
        sampled = sum(block.values.nbytes for block in self.sample.blocks if block.sparse is None)
        return needed + rows * len(self.bins.features) + sampled + _READING_BYTES > room

    def binned(self, folder: str, on_rows: OnRows, threads: int) -> BinnedRows:
        advance = iter([on_rows])  # where rows are gone through twice, the bar shows the first time

        def read() -> Iterator[RowBlock]:
            return self.holdout.only(self.source.blocks(next(advance, None)), held=False)

        layout, labels = bundled_layout(self.bins, self.sample.blocks), (self._targets, self.sample.weights)
        self.sample = replace(self.sample, blocks=[])  # they are not needed any more
        return bin_rows(read, self.bins, layout, labels, folder, self._score, threads)

    def binned_held(self, valid: RowSource | None, folder: str) -> BinnedRows | None:
        """The rows to measure on: those of `valid`, or those that were held out; None where there are none."""
        source, sample = self.source, self.sample
        labels, weights = sample.held_labels, sample.held_weights
        if valid is not None:
            source = valid.for_names(source.names, source.encoding, self.labels)
            held = sample_rows(source, Holdout(), self.options.seed)
            valid.left_out = source.left_out
            if held.columns != sample.columns and held.blocks[0].dense is not None:
                own = f"{self.source.name} {sample.columns}"
                raise DataError(f"{valid.name} has {held.columns} columns, {own}")
            labels, weights = held.labels, held.weights
        if not len(labels):
            return None

        def read() -> Iterator[RowBlock]:
            return source.blocks() if valid is not None else self.holdout.only(source.blocks(), held=True)

        targets = _targets(labels, self.labels, source)
        layout = own_columns(self.bins)  # rows held out need not exclude what others do
        return bin_rows(read, self.bins, layout, (targets, weights), folder, self._score)


def _continued(start: GbdtModel, sample: RowSample, options: GbdtOptions) -> tuple[RowSample, GbdtOptions]:
    """What fits the model that training continues; UserError where table or objective are of another kind."""
    kinds = {"regression": "regression", "binary sigmoid:1": "binary"}
    kinds[f"multiclass num_class:{start.classes}"] = "multiclass"
    if start.objective not in kinds or options.objective not in ("auto", kinds[start.objective]):
        raise UserError(
            f"start: the model's objective is {start.objective!r}, but {options.objective} was given; "
            "only regression, binary and multiclass models can be continued"
        )
    is_sparse = sample.blocks[0].sparse is not None
    if start.columns != sample.columns and not (is_sparse and start.columns > sample.columns):
        raise UserError(f"start: the model has {start.columns} columns, but the table has {sample.columns}")
    return replace(sample, columns=start.columns), replace(options, objective=kinds[start.objective])


def _result(
    task: GbdtTask, table: TableChoice, trained: TrainedRun, train_seconds: float, seconds: float
) -> GbdtResult:
    options, state = task.gbdt, trained.values
    grown = best = int((state["num_leaves"].numpy() > 0).sum()) // task.classes
    valid: list[float] = state["valid_loss"].numpy()[:grown].tolist() if task.valid is not None else []
    if options.early_stopping and valid:
        # Up to the least loss that came before `early_stopping` trees without a lesser one.
        count = StoppingCount(EarlyStopping(metric=VALID_LOSS, patience=options.early_stopping))
        any(count.add(number, {VALID_LOSS: loss}) for number, loss in enumerate(valid, 1))
        best = max(count.best_step, 1)
    biases = task.train.opened()[3][:, 0] * (table.start is None)
    labels = NO_LABELS if task.labels in PAIRS and task.classes == 1 else task.labels
    model = GbdtModel.of(state, best, task.bins, options, biases.tolist(), _names(table), labels)
    earlier = table.start.trees if table.start is not None else ()
    summary = trained.summary
    if summary and task.note:
        summary = {**summary, "notes": [*summary["notes"], task.note]}
    return GbdtResult(
        model=replace(
            model,
            trees=earlier + model.trees,
            label_index=table.train.label_index,
            encoding=table.start.encoding if table.start is not None else table.train.encoding,
            parameters=_parameters(options, best, task.classes),
        ),
        objective=options.objective,
        labels=task.labels,
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
        summary=summary,
    )


def _parameters(options: GbdtOptions, rounds: int, classes: int) -> dict[str, Any]:
    """What the trees were grown with, in the words of a model file."""
    renamed = {"rate": "learning_rate", "min_gain": "min_gain_to_split"}
    renamed["min_sum_hessian"] = "min_sum_hessian_in_leaf"
    others = ("objective", "trees", "parallel", "early_stopping", "memory_bytes", "allow_overload")
    kept = {renamed.get(name, name): one for name, one in asdict(options).items() if name not in others}
    return {
        "boosting": "gbdt",
        "objective": options.objective,
        "tree_learner": "serial" if options.parallel == "data" else options.parallel,
        "num_iterations": rounds,
        **kept,
        **({"num_class": classes} if classes > 1 else {}),
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


def _objective(
    asked: str, seen: NDArray[np.float64], source: RowSource, known: Labels
) -> tuple[str, Labels, str]:
    """The objective, the labels of its classes, and a note where it was guessed; DataError where they do not fit.

    `known` are the labels of a model that training continues, `seen` those of the table.
    """
    names, where = source.label_names, source.name
    guess = ""
    if asked == "auto":
        few = 2 <= len(seen) <= _MOST_GUESSED and bool((seen == np.floor(seen)).all())
        is_class = names is not None or few
        asked = "regression" if not is_class else "binary" if len(seen) == 2 else "multiclass"
        guess = f"objective={asked}: the label has {num_of(len(seen), 'value')}; give --objective to choose"
    if asked == "regression":
        if names is not None:
            raise DataError(
                f"{where}: labels such as {names[0]!r} are names; objective=regression needs numbers"
            )
        return asked, NO_LABELS, guess
    labels = known or labels_of(seen, where, names)
    if asked == "binary" and len(labels) != 2:
        raise DataError(f"{where} has labels {labels.listed}; objective=binary needs two; use multiclass")
    return asked, labels, guess


def _targets(labels: NDArray[np.float64], known: Labels, source: RowSource) -> NDArray[np.float64]:
    """Numbers, or those of classes."""
    if not known:
        return labels
    return known.targets(labels, source.name, names=source.label_names).astype(np.float64)


def _biases(
    objective: str, targets: NDArray[np.float64], weights: NDArray[np.float64], labels: Labels
) -> NDArray[np.float64]:
    """What is predicted best without any tree, for each class; infinite where one of two has no rows."""
    if objective == "multiclass":
        shares = np.bincount(targets.astype(np.int64), weights, len(labels)) / weights.sum()
        return np.asarray(np.log(np.maximum(shares, _LEAST_SHARE)))
    mean = np.average(targets, weights=weights)
    with np.errstate(divide="ignore"):
        return np.array([np.log(mean / (1 - mean)) if objective == "binary" else mean])
