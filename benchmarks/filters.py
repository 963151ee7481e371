"""Fewer bytes between workers and servers of `ps`, and the same optimum: names for key lists, kkt and significant.

    python benchmarks/filters.py [--data FOLDER] [--steps 400] [--json benchmarks/results/filters.json]

*The minimum*: L1 logistic regression on 1,000 texts of RCV1 (`rcv1_small.vw.gz` in FOLDER), by proximal gradient
descent with two workers, each with half of the examples, and two servers; a step is an epoch. The minimum is that of
scikit-learn's LIBLINEAR, in double precision; ours is in single. *Online*: the same examples by FTRL in batches of 100,
judged by the log loss of other texts. Bytes are the contents of messages, of all workers, per epoch: lists or names of
rows and gradients that go to servers, and values that come from them.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.engine.training import Keeping
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.optim import ProximalSGD
from manyhands.workloads.logreg.options import LogregOptions
from manyhands.workloads.logreg.training import train_logreg

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "filters.json"
DATA = ROOT.parent.parent / "shared" / "data"
L1 = 1e-3
QUIET = mh.Options(progress="none")
PASSES = 20
STRATEGY = "ps servers=2 link=tcp"
CASES = {
    "nothing": "keys=listed",
    "names for key lists": "keys=named",
    "significant:0.001": "keys=listed filter=significant:0.001",
    "significant:0.01": "keys=listed filter=significant:0.01",
    "kkt": "keys=listed filter=kkt",
    "names and kkt": "filter=kkt",
    "all, significant:0.001": "filter=kkt+significant:0.001",
    "all, significant:0.01": "filter=kkt+significant:0.01",
}

Block = tuple[Tensor, Tensor, Tensor, Tensor]
"""For every entry the row of the table, the example of the block and the value; for every example its label."""


class Margins(nn.Module):
    """A weight per feature, all 0 at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 1, _weight=torch.zeros(size, 1), sparse=True)

    def forward(self, rows: Tensor, of: Tensor, values: Tensor, examples: int) -> Tensor:
        return torch.zeros(examples).index_add(0, of, self.table(rows).squeeze(1) * values)


def log_loss(model: nn.Module, block: Block) -> Tensor:
    rows, of, values, labels = block
    return F.binary_cross_entropy_with_logits(model(rows, of, values, len(labels)), labels)


def read_rows_of(block: Block) -> Tensor:
    return block[0]


def first(blocks: list[Block]) -> Block:
    [block] = blocks  # each worker has one
    return block


def proximal(parameters: Any, rate: float) -> ProximalSGD:
    return ProximalSGD(parameters, lr=rate, l1=L1)


def examples_of(path: Path) -> tuple[csr_matrix, NDArray[np.float32]]:
    """The examples, with a column for each feature that occurs, and their labels, 0 or 1."""
    rows = Rows.join(list(RowFile(path, Reading(threads=1)).blocks()))
    whole = csr_matrix((rows.values.astype(np.float64), rows.indices, rows.starts))
    return whole[:, np.unique(rows.indices)], (rows.labels > 0).astype(np.float32)


def blocks_of(matrix: csr_matrix, labels: NDArray[np.float32], count: int) -> list[Block]:
    found = []
    for part in np.array_split(np.arange(matrix.shape[0]), count):
        own = matrix[part].tocoo()
        arrays = (
            own.col.astype(np.int64),
            own.row.astype(np.int64),
            own.data.astype(np.float32),
            labels[part],
        )
        rows, of, values, targets = (torch.from_numpy(np.ascontiguousarray(one)) for one in arrays)
        found.append((rows, of, values, targets))
    return found


def objective(matrix: csr_matrix, labels: NDArray[np.float32], weights: NDArray[np.float64]) -> float:
    margins = matrix @ weights
    losses = np.logaddexp(0, margins) - margins * labels
    return float(losses.mean() + L1 * np.abs(weights).sum())


def minimum(matrix: csr_matrix, labels: NDArray[np.float32]) -> NDArray[np.float64]:
    strength = 1 / (L1 * matrix.shape[0])
    found = LogisticRegression(
        penalty="l1", solver="liblinear", C=strength, fit_intercept=False, tol=1e-8, max_iter=10**5
    ).fit(matrix, labels)
    weights: NDArray[np.float64] = found.coef_[0]
    return weights


def moved(run: Path) -> dict[str, int]:
    """The bytes of a run that went to servers and came from them."""
    events = read_run_events(run / "events")
    assert not events.notes, events.notes
    bytes_of = {"worker": 0, "server": 0}
    for role in events.roles:
        sent = role.records[role.records["kind"] == EventKind.SEND]
        bytes_of[role.name.split("-")[0].split()[0]] += int(sent["num_bytes"].sum())
    return {"pushed": bytes_of["worker"], "pulled": bytes_of["server"]}


def descended(
    case: str, settings: str, matrix: csr_matrix, labels: NDArray[np.float32], steps: int
) -> dict[str, Any]:
    rate = 1.9 * 4 * matrix.shape[0] / float(svds(matrix, 1)[1][0]) ** 2  # below 2/L
    task = mh.Task(
        model=partial(Margins, matrix.shape[1]),
        loss=log_loss,
        data=blocks_of(matrix, labels, 2),
        collate=first,
        optimizer=partial(proximal, rate=rate),
        batch_size=2,
        sparse={"table.weight": read_rows_of},
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = mh.fit(task, f"{STRATEGY} {settings}", workers=2, steps=steps, out=out, options=QUIET)
        sums = moved(out)
    weights = run.model.state_dict()["table.weight"][:, 0].numpy().astype(np.float64)
    return {
        "case": case,
        "strategy": f"{STRATEGY} {settings}",
        **{name: round(count / steps) for name, count in sums.items()},
        "objective": objective(matrix, labels, weights),
        "weights_used": int((weights != 0).sum()),
    }


def online(case: str, settings: str, data: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = LogregOptions(learner="ftrl", l1=0.3, passes=PASSES, batch=100)
        keep = Keeping(out=Path(folder) / "run")
        strategy, file = f"{STRATEGY} {settings}", data / "rcv1_small.vw.gz"
        result = train_logreg(file, options, strategy=strategy, workers=2, keep=keep)
        sums = moved(keep.out)
    test = result.model.evaluate(result.model.file(data / "rcv1_small_test.vw.gz"))
    return {
        "case": case,
        "strategy": f"{STRATEGY} {settings}",
        **{name: round(count / PASSES) for name, count in sums.items()},
        "test_log_loss": test.log_loss,
        "weights_used": int((result.model.table[1:] != 0).sum()),
    }


def main() -> None:
    """Train every case, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    matrix, labels = examples_of(arguments.data / "rcv1_small.vw.gz")
    best = minimum(matrix, labels)
    least = objective(matrix, labels, best)
    console = Console()
    table = Table("case", "pushed", "pulled", "above the minimum", "weights", title="bytes per epoch")
    results: dict[str, list[dict[str, Any]]] = {"minimum": [], "online": []}
    for case, settings in CASES.items():
        row = descended(case, settings, matrix, labels, arguments.steps)
        row["above"] = row["objective"] / least - 1
        results["minimum"].append(row)
        shown = (f"{row['pushed']:,}", f"{row['pulled']:,}", f"{row['above']:.1e}", str(row["weights_used"]))
        table.add_row(case, *shown)
        print(case, *shown, flush=True)
    for case, settings in CASES.items():
        row = online(case, settings, arguments.data)
        results["online"].append(row)
        shown = (
            f"{row['pushed']:,}",
            f"{row['pulled']:,}",
            f"{row['test_log_loss']:.4f}",
            str(row["weights_used"]),
        )
        table.add_row(f"online: {case}", *shown)
        print("online", case, *shown, flush=True)
    console.print(table)
    found = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "l1": L1,
        "steps": arguments.steps,
        "passes": PASSES,
        "examples": matrix.shape[0],
        "features": matrix.shape[1],
        "least": least,
        "least_weights": int((best != 0).sum()),
        **results,
    }
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
