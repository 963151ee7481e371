"""`manyhands train gbdt` and `compare gbdt`: gradient boosting of trees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.errors import num_of
from manyhands.workloads import compiled_workload as seam
from manyhands.workloads.compiled_workload import TableRows, TrainEnd
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.task_options import narrowed, option

if TYPE_CHECKING:
    from manyhands.engine.training import Keeping
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.gbdt.row_sources import RowSource
    from manyhands.workloads.gbdt.training import TableChoice

_HELD_OUT = 0.2  # of the embedded sets
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class _Table(seam.TableOptions, GbdtOptions):
    train: str = option(
        "breast-cancer",
        "rows as CSV, LIBSVM or Vowpal Wabbit text, plain or gzip, .npy or .parquet; or a built-in set: breast-cancer, "
        "diabetes",
        metavar="FILE",
    )
    target: str | None = seam.target_option()

    def source(self, path: str, *, is_known: bool = False) -> RowSource:
        """Rows to train on, or others, of which it `is_known` by those what a table of them has."""
        from manyhands.data.row_files import Reading
        from manyhands.data.table_files import TableReading
        from manyhands.workloads.gbdt.row_sources import open_source

        reading = Reading(threads=len(os.sched_getaffinity(0)), skip_bad=self.skip_bad)
        table = TableReading(skip_bad=self.skip_bad) if is_known else self.table_reading()
        return open_source(path, reading, self.target, scanned=not is_known, table=table)

    def table(
        self, valid: str | None = None, fraction: float | None = None, start: Any = None
    ) -> TableChoice:
        from manyhands.workloads.gbdt.row_sources import EMBEDDED
        from manyhands.workloads.gbdt.text_format import read_model
        from manyhands.workloads.gbdt.training import TableChoice

        if fraction is None:
            fraction = _HELD_OUT if self.train in EMBEDDED and valid is None else 0.0
        return TableChoice(
            train=self.source(self.train),
            valid=self.source(valid, is_known=True) if valid is not None else None,
            valid_fraction=fraction,
            categorical=seam.listed(self.categorical),
            start=None if start is None else read_model(start),
        )


@dataclass(frozen=True, kw_only=True)
class _TrainGbdt(seam.WorkerOptions, _Table):
    valid: str | None = option(None, "rows to evaluate on after each tree, as --train", metavar="FILE")
    valid_fraction: float | None = option(None, "share of rows to hold out", shown="0; 0.2 of built-in sets")
    start: Path | None = option(None, "continue from this model, ours or LightGBM's", metavar="MODEL")
    test: str | None = option(None, "rows to test the final model on, as --train", metavar="FILE")
    workers: int = option(1, "processes, each with some of the rows", at_least=1)


@dataclass(frozen=True, kw_only=True)
class _CompareGbdt(_Table):
    strategies: str = option("single; mirrored; allreduce", "what to compare")


@contextmanager
def _compared(asked: _CompareGbdt, _out: Path) -> Iterator[seam.ComparedTask]:
    # Imported here, as below, so that help texts do not wait for torch and compiled code.
    from manyhands.observe.draw.bars import Bars
    from manyhands.workloads.gbdt.training import gbdt_task

    options = narrowed(GbdtOptions, asked)
    with Bars() as bars, gbdt_task(asked.table(), options, shared=True, bars=bars) as task:
        yield seam.ComparedTask(task=task)


def _train(asked: _TrainGbdt, keep: Keeping, bars: Bars) -> TrainEnd:
    from manyhands.workloads.gbdt.bin_table import Holdout
    from manyhands.workloads.gbdt.model import measure_model
    from manyhands.workloads.gbdt.text_format import MODEL_TEXT, write_model
    from manyhands.workloads.gbdt.training import train_gbdt

    test = asked.source(asked.test, is_known=True) if asked.test is not None else None
    table, options = asked.table(asked.valid, asked.valid_fraction, asked.start), narrowed(GbdtOptions, asked)
    how: dict[str, Any] = {"strategy": asked.strategy, "workers": asked.workers}
    result = train_gbdt(table, options, bars=bars, keep=keep, **how)
    model, file = result.model, keep.out / MODEL_TEXT
    write_model(model, file)
    by_gain, by_split = model.importance("gain"), model.importance("split")
    order = sorted(range(model.columns), key=lambda at: (-by_gain[at], at))
    measured = measure_model(model, test, labels=result.labels) if test is not None else {}
    if test is None and result.valid_rows:
        held = Holdout(fraction=table.valid_fraction, seed=options.seed) if table.valid is None else None
        quality = measure_model(model, table.valid or table.train, held, result.labels)["quality"]
        measured = {"quality": quality}
    summary = {
        **result.full_summary(),
        "trees": len(model.trees) // model.classes,  # of each class, where there are several
        "labels": list(model.labels),
        "features": model.columns,
        "valid_loss": result.valid_losses[result.trees_kept - 1] if result.valid_losses else None,
        "importance": [
            {"feature": model.names[at], "gain": float(by_gain[at]), "splits": int(by_split[at])}
            for at in order
            if by_split[at]
        ],
        **measured,
        **how,
        "model": str(file),
    }
    predict = ("predict", keep.out, asked.test or asked.train, "--out", "predictions.txt")
    return TrainEnd(
        summary=summary,
        shown=_shown(summary),
        notes=[
            f"{num_of(one.left_out, 'bad row')} of {one.name} left out"
            for one in (table.train, table.valid, test)
            if one is not None and one.left_out
        ],
        interrupted=f"the model has {summary['trees']} of {asked.trees} trees" * result.interrupted,
        next={"predict rows": predict},
    )


def _shown(summary: dict[str, Any]) -> list[str | TableRows]:
    held_out = f" + {summary['valid_rows']:,} held out" if summary["valid_rows"] else ""
    is_several = summary["objective"] == "multiclass"
    trees = f"{len(summary['labels'])} × {summary['trees']}" if is_several else summary["trees"]
    lines: list[str | TableRows] = [
        f"gbdt · {summary['objective']} · {summary['strategy']} · {num_of(summary['workers'], 'worker')} · "
        f"{summary['rows']:,} rows{held_out} · {summary['features']:,} features · {trees} trees in "
        f"{summary['train_seconds']:.2f} s ({summary['seconds']:.1f} s with reading and starting)"
    ]
    if summary["train_losses"]:
        name = "squared error" if summary["objective"] == "regression" else "log loss"
        valid = f"  held out {summary['valid_loss']:.4f}" if summary["valid_loss"] is not None else ""
        first, last = summary["train_losses"][0], summary["train_losses"][-1]
        lines.append(f"{name}  train {first:.4f} → {last:.4f}{valid}")
    if summary.get("test_rows"):
        shown = ("accuracy", "auc", "log_loss", "rmse", "r2")
        parts = [f"{key} {summary[key]:.4f}" for key in shown if summary.get(key) is not None]
        lines.append(f"test  {'  '.join(parts)}  of {summary['test_rows']:,} rows")
    if summary["importance"]:
        best = summary["importance"][:_SHOWN]
        rows = [(one["feature"], f"{one['gain']:,.1f}", f"{one['splits']:,}") for one in best]
        lines.append(TableRows(head=("feature", "gain", "splits"), rows=rows))
    return [*lines, f"model   {summary['model']}"]


GBDT = seam.CompiledWorkload(
    name="gbdt",
    help="Train gradient-boosted trees: a number, two labels or several, from a table of any size.",
    options_type=_TrainGbdt,
    train=_train,
    files=("model.txt",),
    compare_help="Compare strategies on gradient boosting of trees.",
    compared_type=_CompareGbdt,
    compared=_compared,
)
