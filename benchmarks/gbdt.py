"""Gradient boosting: ours beside LightGBM and scikit-learn's HistGradientBoosting, on one and two threads or workers.

    python benchmarks/gbdt.py [--rounds 5] [--rows 200000] [--trees 100] [--data FOLDER] [--json FILE]

Work: a9a, where FOLDER holds `a9a.gz` and `a9a.t.gz` (123 columns of 0 and 1), rows of 28 numbers drawn from a known
model, and the same as regression. Everyone begins with a matrix in memory and ends with a model, binning included, and
has the same number of trees, leaves, bins and rows in a leaf. *whole* is all of that; *trees* is ours without reading,
binning and starting workers. Cases take turns within each round, and the median over rounds counts; CPU time is that of
all threads and workers. The quality is that of the model on rows that it has not seen. A peer that is not installed is
left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_svmlight_file
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import r2_score, roc_auc_score
from threadpoolctl import threadpool_limits

from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "gbdt.json"
DATA = ROOT.parent.parent / "shared" / "data"
LEAVES, LEAST_ROWS, RATE, BINS = 31, 20, 0.1, 255


@dataclass(frozen=True)
class Work:
    """Rows to learn from and rows to measure on."""

    name: str
    objective: str
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    def quality(self, predicted: np.ndarray) -> float:
        return float((roc_auc_score if self.objective == "binary" else r2_score)(self.test[1], predicted))


@dataclass(frozen=True)
class Case:
    """What is timed; it gives predictions of the test rows and, where it is known, the seconds of the trees alone."""

    name: str
    hands: int
    run: Callable[[], tuple[Callable[[], np.ndarray], float | None]]


def drawn(rows: int, objective: str) -> Work:
    random = np.random.default_rng(0)
    values = random.normal(size=(rows + rows // 4, 28)).astype(np.float32).astype(np.float64)
    score = (
        values[:, 0] * values[:, 1]
        + np.sin(3 * values[:, 2])
        + np.abs(values[:, 3])
        + values[:, 4:8].sum(1) / 2
    )
    noise = random.logistic(size=len(values))
    labels = (score + noise > score.mean()).astype(float) if objective == "binary" else score + noise / 4
    name = f"{rows // 1000:,}k rows of 28 numbers"
    return Work(name, objective, (values[:rows], labels[:rows]), (values[rows:], labels[rows:]))


def a9a(folder: Path) -> Work:
    parts = [load_svmlight_file(str(folder / name), n_features=123) for name in ("a9a.gz", "a9a.t.gz")]
    train, test = ((values.toarray(), (labels > 0).astype(float)) for values, labels in parts)
    return Work("a9a", "binary", train, test)


def ours(work: Work, trees: int, workers: int) -> Case:
    options = GbdtOptions(
        objective=work.objective, trees=trees, num_leaves=LEAVES, min_data_in_leaf=LEAST_ROWS, rate=RATE
    )

    def run() -> tuple[Callable[[], np.ndarray], float]:
        table = TableChoice(train=ArraySource(*work.train))
        strategy = "single" if workers == 1 else "allreduce"
        found = train_gbdt(table, options, strategy=strategy, workers=workers)
        return lambda: found.model.predict(RowBlock(labels=None, dense=work.test[0])), found.train_seconds

    return Case("manyhands", workers, run)


def scikit_learn(work: Work, trees: int, threads: int) -> Case:
    is_binary = work.objective == "binary"
    kind = HistGradientBoostingClassifier if is_binary else HistGradientBoostingRegressor

    def run() -> tuple[Callable[[], np.ndarray], None]:
        model = kind(
            max_iter=trees, early_stopping=False, learning_rate=RATE, max_leaf_nodes=LEAVES, max_bins=BINS
        )
        with threadpool_limits(threads):
            model.fit(*work.train)
        rows = work.test[0]
        return (lambda: model.predict_proba(rows)[:, 1]) if is_binary else (lambda: model.predict(rows)), None

    return Case("scikit-learn", threads, run)


def light(work: Work, trees: int, threads: int) -> Case:
    import lightgbm

    settings = {
        "objective": work.objective,
        "num_threads": threads,
        "num_leaves": LEAVES,
        "min_data_in_leaf": LEAST_ROWS,
        "learning_rate": RATE,
        "max_bin": BINS,
        "verbose": -1,
    }

    def run() -> tuple[Callable[[], np.ndarray], None]:
        dataset = lightgbm.Dataset(
            *work.train, params={"verbose": -1, "num_threads": threads, "max_bin": BINS}
        )
        booster = lightgbm.train(settings, dataset, trees)
        return lambda: booster.predict(work.test[0]), None

    return Case("LightGBM", threads, run)


def cpu_s() -> float:
    """Of this process and of children that have ended."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def timed(work: Work, cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    quality = {
        (case.name, case.hands): work.quality(case.run()[0]()) for case in cases
    }  # compiles, fills caches
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for case in cases:
            began, worked = time.monotonic(), cpu_s()
            _, trees_s = case.run()
            took = time.monotonic() - began
            times.setdefault((case.name, case.hands), []).append((took, cpu_s() - worked, trees_s or took))
    middle = {
        key: [statistics.median(column) for column in zip(*found, strict=True)]
        for key, found in times.items()
    }
    return [
        {
            "work": work.name,
            "objective": work.objective,
            "case": name,
            "hands": hands,
            "whole_s": round(middle[name, hands][0], 4),
            "least_s": round(min(one[0] for one in times[name, hands]), 4),
            "most_s": round(max(one[0] for one in times[name, hands]), 4),
            "cpu_s": round(middle[name, hands][1], 4),
            "trees_s": round(middle[name, hands][2], 4) if name == "manyhands" else None,
            "times_scikit_learn": round(middle["scikit-learn", hands][0] / middle[name, hands][0], 3),
            "quality": round(quality[name, hands], 5),
        }
        for name, hands in middle
    ]


def show(rows: list[dict[str, Any]], skipped: list[str]) -> None:
    columns = (
        "work",
        "objective",
        "case",
        "hands",
        "whole_s",
        "trees_s",
        "cpu_s",
        "times_scikit_learn",
        "quality",
    )
    table = Table(title=f"gradient boosting, {len(os.sched_getaffinity(0))} cores")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right" if column not in columns[:3] else "left")
    for row in rows:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    console = Console()
    console.print(table)
    for reason in skipped:
        console.print(f"left out: {reason}")


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--trees", type=int, default=100)
    arguments = parser.parse_args()
    works, skipped, rows = [drawn(arguments.rows, "binary"), drawn(arguments.rows, "regression")], [], []
    if (arguments.data / "a9a.gz").exists():
        works.insert(0, a9a(arguments.data))
    else:
        skipped.append(f"a9a, which is not in {arguments.data}")
    makers = [ours, scikit_learn]
    if importlib.util.find_spec("lightgbm") is not None:
        makers.append(light)
    else:
        skipped.append("LightGBM, which is not installed: pip install manyhands[peers]")
    for work in works:
        cases = [make(work, arguments.trees, hands) for hands in (1, 2) for make in makers]
        rows += timed(work, cases, arguments.rounds)
    show(rows, skipped)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "trees": arguments.trees,
        "rounds": arguments.rounds,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(machine | {"skipped": skipped, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
