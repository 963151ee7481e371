"""Sparse logistic regression: ours beside scikit-learn's SGDClassifier and Vowpal Wabbit, and its reading of text.

    python benchmarks/regression.py [--rounds 5] [--data FOLDER] [--json benchmarks/results/regression.json]

Work: a9a, where FOLDER holds `a9a.gz` and `a9a.t.gz`, and examples drawn from a known model, with features as frequent
as words are. *learn* is training on examples that are in memory, *file* is from a text file to a trained model, *read*
is from a text file to examples. One thread learns and one reads, as Vowpal Wabbit has it; scikit-learn has one in all.
Everyone has the settings it comes with but for logistic loss and the number of passes. Cases take turns within each
round, and the median over rounds counts; CPU time is that of all threads. The quality is that of the trained model on
examples that it has not seen. A peer that is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.sparse import csr_matrix
from sklearn.datasets import load_svmlight_file
from sklearn.linear_model import SGDClassifier

from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.engine.fitting import fit
from manyhands.workloads.logreg.examples import Labelled, ParsedBlocks
from manyhands.workloads.logreg.labels import Labels, measure
from manyhands.workloads.logreg.model import LogregModel
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.task import LogregTask
from manyhands.workloads.logreg.training import train_logreg

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "regression.json"
DATA = ROOT.parent.parent / "shared" / "data"
PASSES = 5
BITS = 18
LEARNERS = ("sgd", "adagrad", "ftrl")


@dataclass(frozen=True)
class Work:
    """Training and test examples, in memory and as text in both formats."""

    name: str
    train: Rows
    test: Rows
    libsvm: Path
    vowpal: Path
    vowpal_test: Path


@dataclass(frozen=True)
class Case:
    """What is timed, and what gives the margins of the test examples of the model it made (None: there is none)."""

    part: str
    name: str
    run: Callable[[], Any]
    margins: Callable[[Any], Any] | None
    examples: int


def write(rows: Rows, path: Path, mark: str) -> Path:
    """Examples as text: LIBSVM with an empty mark, Vowpal Wabbit's with `|f `."""
    with path.open("w") as file:
        for row in range(len(rows)):
            span = slice(rows.starts[row], rows.starts[row + 1])
            pairs = zip(rows.indices[span].tolist(), rows.values[span].tolist(), strict=True)
            file.write(f"{rows.labels[row]:+.0f} {mark}" + " ".join(f"{i}:{x:.6g}" for i, x in pairs) + "\n")
    return path


def prepared(name: str, train: Rows, test: Rows, folder: Path) -> Work:
    return Work(
        name=name,
        train=train,
        test=test,
        libsvm=write(train, folder / f"{name}.svm", ""),
        vowpal=write(train, folder / f"{name}.vw", "|f "),
        vowpal_test=write(test, folder / f"{name}.t.vw", "|f "),
    )


def blocks(path: Path) -> list[Rows]:
    return list(RowFile(path, Reading(threads=1)).blocks())


def read(path: Path) -> Rows:
    return Rows.join(blocks(path))


def drawn(examples: int, features: int, seed: int) -> Rows:
    """Texts of 20 to 60 words, as frequent as Zipf says, each text of length 1, with labels of a known model."""
    random = np.random.default_rng(seed)
    truth = np.random.default_rng(0).normal(size=features) * 6
    lengths = random.integers(20, 60, examples)
    words = np.minimum(random.zipf(1.3, lengths.sum()), 10**9) * 2654435761 % features
    starts = np.concatenate([[0], np.cumsum(lengths)])
    parts = [np.unique(words[a:b]) for a, b in pairwise(starts)]
    lengths = np.array([len(part) for part in parts])
    starts, indices = np.concatenate([[0], np.cumsum(lengths)]), np.concatenate(parts)
    values = np.repeat(1 / np.sqrt(lengths), lengths)
    margins = np.add.reduceat(truth[indices] * values, starts[:-1])
    labels = np.where(margins + random.logistic(size=examples) > 0, 1.0, -1.0)
    return Rows(
        starts=starts.astype(np.int64),
        indices=indices.astype(np.int32),
        values=values.astype(np.float32),
        labels=labels.astype(np.float32),
        weights=np.ones(examples, np.float32),
        size=features,
    )


def matrix(rows: Rows, columns: int) -> csr_matrix:
    return csr_matrix((rows.values.astype(np.float64), rows.indices, rows.starts), (len(rows), columns))


def our_cases(work: Work) -> list[Case]:
    labels = Labels(-1.0, 1.0)
    block = Labelled(work.train, labels.targets(work.train.labels, work.name))
    total = PASSES * len(work.train)

    def learn(learner: str) -> LogregModel:
        task = LogregTask.of(ParsedBlocks([block]), LogregOptions(learner=learner, passes=PASSES))
        run = fit(task, "single")
        return LogregModel(table=run.model.state_dict()["rows"][:, 0].clone().numpy(), labels=labels)

    def margins(model: LogregModel) -> Any:
        return model.margins(work.test)

    def from_file(path: Path) -> LogregModel:
        return train_logreg(path, LogregOptions(passes=PASSES), reading=Reading(threads=1)).model

    return [
        *(Case("learn", f"manyhands {one}", lambda one=one: learn(one), margins, total) for one in LEARNERS),  # type: ignore[misc]
        Case("file", "manyhands adagrad, LIBSVM", lambda: from_file(work.libsvm), margins, total),
        Case("file", "manyhands adagrad, VW", lambda: from_file(work.vowpal), margins, total),
        Case("read", "manyhands, LIBSVM", lambda: blocks(work.libsvm), None, len(work.train)),
        Case("read", "manyhands, VW", lambda: blocks(work.vowpal), None, len(work.train)),
    ]


def sklearn_cases(work: Work) -> list[Case]:
    columns = max(work.train.size, work.test.size)
    train, test = matrix(work.train, columns), matrix(work.test, columns)

    def learn(average: bool) -> SGDClassifier:
        model = SGDClassifier(loss="log_loss", max_iter=PASSES, tol=None, average=average)
        return model.fit(train, work.train.labels)

    def margins(model: SGDClassifier) -> Any:
        return model.decision_function(test)

    name = "scikit-learn SGDClassifier"
    total = PASSES * len(work.train)
    return [
        Case("learn", name, lambda: learn(False), margins, total),
        Case("learn", f"{name}, averaged", lambda: learn(True), margins, total),
        Case(
            "read",
            "scikit-learn, LIBSVM",
            lambda: load_svmlight_file(str(work.libsvm)),
            None,
            len(work.train),
        ),
    ]


def vowpal_cases(work: Work, folder: Path) -> list[Case]:
    import vowpalwabbit

    model, cache, found = folder / "vw.model", folder / "vw.cache", folder / "vw.found"

    def learn() -> None:
        vowpalwabbit.Workspace(
            f"-d {work.vowpal} --loss_function logistic -b {BITS} --passes {PASSES} --holdout_off -k "
            f"--cache_file {cache} -f {model} --quiet"
        ).finish()

    def margins(_nothing: None) -> Any:
        vowpalwabbit.Workspace(f"-d {work.vowpal_test} -t -i {model} -r {found} --quiet").finish()
        return np.array([float(line.split()[0].split(":")[-1]) for line in found.read_text().splitlines()])

    name = f"Vowpal Wabbit {vowpalwabbit.__version__}"
    return [Case("file", name, learn, margins, PASSES * len(work.train))]


def timed(cases: list[Case], work: Work, rounds: int) -> list[dict[str, Any]]:
    targets = (work.test.labels > 0).astype(np.float32)
    quality: dict[str, dict[str, float | None]] = {}
    for case in cases:  # compiles, and fills caches
        made = case.run()
        if case.margins is not None:
            found = measure(np.asarray(case.margins(made), np.float64), targets)
            quality[case.name] = {
                "log_loss": round(found.log_loss, 4),
                "accuracy": round(found.accuracy, 4),
                "auc": round(found.auc or 0.0, 4),
            }
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for _ in range(rounds):
        for case in cases:
            began, worked = time.monotonic(), time.process_time()
            case.run()
            cpu.setdefault(case.name, []).append(time.process_time() - worked)
            wall.setdefault(case.name, []).append(time.monotonic() - began)
    return [
        {
            "work": work.name,
            "part": case.part,
            "case": case.name,
            "examples_per_s": round(case.examples / statistics.median(wall[case.name])),
            "examples_per_cpu_s": round(case.examples / statistics.median(cpu[case.name])),
            **quality.get(case.name, {}),
        }
        for case in cases
    ]


def show(rows: list[dict[str, Any]], skipped: list[str]) -> None:
    columns = ("work", "part", "case", "examples_per_s", "examples_per_cpu_s", "log_loss", "accuracy", "auc")
    table = Table(title=f"logistic regression, {PASSES} passes, {len(os.sched_getaffinity(0))} cores")
    for column in columns:
        table.add_column(
            column.replace("_", " "), justify="left" if column in ("work", "part", "case") else "right"
        )
    for row in sorted(rows, key=lambda row: (row["work"], row["part"])):
        shown = (row.get(column, "") for column in columns)
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in shown))
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
    parser.add_argument("--examples", type=int, default=40_000, help="drawn for training")
    arguments = parser.parse_args()
    rows, skipped = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works = [prepared("drawn", drawn(arguments.examples, 1 << 17, 1), drawn(10_000, 1 << 17, 2), folder)]
        if (arguments.data / "a9a.gz").exists():
            works.append(
                prepared("a9a", read(arguments.data / "a9a.gz"), read(arguments.data / "a9a.t.gz"), folder)
            )
        else:
            skipped.append(f"a9a, which is not in {arguments.data}")
        has_vowpal = importlib.util.find_spec("vowpalwabbit") is not None
        if not has_vowpal:
            skipped.append("Vowpal Wabbit, which is not installed: pip install manyhands[peers]")
        for work in works:
            cases = our_cases(work) + sklearn_cases(work)
            cases += vowpal_cases(work, folder) if has_vowpal else []
            rows += timed(cases, work, arguments.rounds)
    show(rows, skipped)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "passes": PASSES,
        "rounds": arguments.rounds,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(machine | {"skipped": skipped, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
