"""Several classes: accuracy and log loss of our trees and our regression beside LightGBM's and scikit-learn's.

    python benchmarks/classes.py [--data FOLDER] [--json FILE]

Tables: wine (178 rows, 3 classes) and digits (1,797 rows, 10 classes) of scikit-learn, in five folds, so that every row
is predicted once by a model that has not seen it; 12,000 drawn rows of 7 classes; and, where FOLDER holds `mnist`,
10,000 images of 14 × 14, each with 10,000 rows to measure on. Trees: 50 rounds, 31 leaves, everyone's defaults
otherwise. Regressions: standardised columns and the penalty of scikit-learn's C = 1. Everyone has one thread; our trees
are grown by two workers, too, and must be the same. Seconds are those of one run, without repetition: what they
predict counts here, see `gbdt.py` and `regression.py` for speed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import dump_svmlight_file, load_digits, load_wine, make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock
from manyhands.workloads.gbdt.text_format import render_model
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.training import train_logreg

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "classes.json"
DATA = ROOT.parent.parent / "shared" / "data"
ROUNDS, PASSES = 50, 40

Rows = tuple[np.ndarray, np.ndarray]
Learner = Callable[
    [Rows, np.ndarray], np.ndarray
]  # rows with labels, rows to predict; probabilities of these


@dataclass(frozen=True)
class Work:
    """A table, and which of its rows are learned from and measured on."""

    name: str
    values: np.ndarray
    labels: np.ndarray
    splits: list[Rows]


def folded(name: str, values: np.ndarray, labels: np.ndarray) -> Work:
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    return Work(name, values, labels, list(folds.split(values, labels)))


def drawn() -> Work:
    values, labels = make_classification(
        22_000, 54, n_informative=12, n_redundant=8, n_classes=7, n_clusters_per_class=2, random_state=0
    )
    return Work("drawn, 7 classes", values, labels, [(np.arange(12_000), np.arange(12_000, 22_000))])


def mnist(folder: Path) -> Work:
    def part(name: str, count: int) -> Rows:
        pixels = gzip.decompress((folder / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((folder / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        images = np.frombuffer(pixels, np.uint8).reshape(-1, 14, 2, 14, 2)[:count]
        return images.mean(axis=(2, 4)).reshape(-1, 196), np.frombuffer(labels, np.uint8)[:count].astype(int)

    parts = part("train", 10_000), part("t10k", 10_000)
    values, labels = (np.concatenate(both) for both in zip(*parts, strict=True))
    return Work("MNIST, 14 × 14", values, labels, [(np.arange(10_000), np.arange(10_000, 20_000))])


def our_trees(rows: Rows, test: np.ndarray) -> np.ndarray:
    table, options = TableChoice(train=ArraySource(*rows)), GbdtOptions(objective="multiclass", trees=ROUNDS)
    return train_gbdt(table, options).model.predict(RowBlock(labels=None, dense=test))


def same_trees(rows: Rows) -> bool:
    """Whether two workers grow the trees of one."""
    table, options = TableChoice(train=ArraySource(*rows)), GbdtOptions(objective="multiclass", trees=5)
    alone, both = (
        train_gbdt(table, options, strategy=how, workers=count)
        for how, count in (("single", 1), ("allreduce", 2))
    )
    return render_model(alone.model) == render_model(both.model)


def light(rows: Rows, test: np.ndarray) -> np.ndarray:
    settings = {"objective": "multiclass", "num_class": len(set(rows[1])), "num_threads": 1, "verbose": -1}
    dataset = lightgbm.Dataset(*rows, params={"verbose": -1, "num_threads": 1})
    return np.asarray(lightgbm.train(settings, dataset, ROUNDS).predict(test, num_threads=1))


def histograms(rows: Rows, test: np.ndarray) -> np.ndarray:
    return (
        HistGradientBoostingClassifier(max_iter=ROUNDS, early_stopping=False).fit(*rows).predict_proba(test)
    )


def our_regression(rows: Rows, test: np.ndarray) -> np.ndarray:
    scaler = StandardScaler().fit(rows[0])
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder, name)) for name in ("train", "test")]
        dump_svmlight_file(scaler.transform(rows[0]), rows[1], names[0], zero_based=True)
        dump_svmlight_file(scaler.transform(test), np.zeros(len(test)), names[1], zero_based=True)
        options = LogregOptions(passes=PASSES, l2=1 / len(rows[1]))
        model = train_logreg(names[0], options).model
        return np.concatenate([model.probabilities(block) for block in model.file(names[1]).blocks()])


def regression(rows: Rows, test: np.ndarray) -> np.ndarray:
    scaler = StandardScaler().fit(rows[0])
    model = LogisticRegression(max_iter=2000).fit(scaler.transform(rows[0]), rows[1])
    return np.asarray(model.predict_proba(scaler.transform(test)))


LEARNERS: dict[tuple[str, str], Learner] = {
    ("trees", "manyhands"): our_trees,
    ("trees", "LightGBM"): light,
    ("trees", "scikit-learn"): histograms,
    ("regression", "manyhands"): our_regression,
    ("regression", "scikit-learn"): regression,
}


def measured(work: Work, learner: Learner) -> dict[str, Any]:
    chances, own, began = [], [], time.monotonic()
    for train, test in work.splits:
        chances.append(learner((work.values[train], work.labels[train]), work.values[test]))
        own.append(work.labels[test])
    took, found, labels = time.monotonic() - began, np.concatenate(chances), np.concatenate(own)
    return {
        "accuracy": round(float(accuracy_score(labels, found.argmax(axis=1))), 4),
        "log_loss": round(float(log_loss(labels, found)), 4),
        "seconds": round(took, 2),
    }


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER")
    arguments = parser.parse_args()
    works = [
        folded("wine", *load_wine(return_X_y=True)),
        folded("digits", *load_digits(return_X_y=True)),
        drawn(),
    ]
    if (arguments.data / "mnist").exists():
        works.append(mnist(arguments.data / "mnist"))
    rows, table = (
        [],
        Table("work", "kind", "case", "accuracy", "log loss", "seconds", title="several classes"),
    )
    with threadpool_limits(1):
        our_trees((works[0].values, works[0].labels), works[0].values)  # compiles
        for work in works:
            train = work.splits[0][0]
            same = same_trees((work.values[train], work.labels[train]))
            for (kind, case), learner in LEARNERS.items():
                row = {"work": work.name, "kind": kind, "case": case, **measured(work, learner)}
                rows.append(row | ({"same_trees_of_two_workers": same} if learner is our_trees else {}))
                table.add_row(*map(str, row.values()))
    Console().print(table)
    about = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "rounds": ROUNDS,
        "passes": PASSES,
    }
    arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
