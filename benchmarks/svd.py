"""Truncated SVD: ours beside scikit-learn's `randomized_svd` and scipy's `svds`, at equal error.

    python benchmarks/svd.py [--rounds 5] [--scale 1] [--data FOLDER] [--json benchmarks/results/svd.json]
    python benchmarks/svd.py --memory-only [--scale 1]      # measure the memory of the last again, and keep the rest

Work: scikit-learn's digits; a9a, where FOLDER holds `a9a.gz`; a table; two sparse matrices with the columns of a
vocabulary, of which one has far more than rows; and an npy file that is larger than the memory that we are given. The
peers have the settings they come with, and read the npy file through a map that numpy makes, with all the memory of
the host. An error is the largest relative error of the singular values, against LAPACK's eigenvalues of AᵀA; ours is
run with the error that the peer reached as its tolerance. Each is one process whose linear algebra has `--threads`
threads. Both take turns within each round and the median over rounds counts, of seconds and of CPU-seconds; what is
compiled is compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import sparse
from scipy.sparse.linalg import svds
from sklearn.datasets import load_digits, load_svmlight_file
from sklearn.utils.extmath import randomized_svd
from threadpoolctl import threadpool_limits

from manyhands.workloads.svd.in_memory import truncated_svd
from manyhands.workloads.svd.options import SvdOptions
from manyhands.workloads.svd.product_kernels import warm
from manyhands.workloads.svd.training import train_svd

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "svd.json"
DATA = ROOT.parent.parent / "shared" / "data"
RANK = 10
LEAST_ERROR = 1e-11  # what a reference of squares is good for

Solve = Callable[[], Any]
"""Gives singular values."""


@dataclass(frozen=True)
class Work:
    """One matrix; `path` where it is read from a file, within `memory_bytes`."""

    name: str
    matrix: Any
    exact: Any
    path: Path | None = None
    memory_bytes: int = 4 << 30

    def peers(self) -> dict[str, Solve]:
        """What others do with it."""
        return {
            "randomized_svd": lambda: randomized_svd(self.matrix, RANK, random_state=0)[1],
            "svds": lambda: np.sort(svds(self.matrix, RANK)[1])[::-1],
        }

    def ours(self, tolerance: float) -> Any:
        """Our result."""
        options = SvdOptions(rank=RANK, tolerance=tolerance, passes=1000, memory_bytes=self.memory_bytes)
        return (
            truncated_svd(self.matrix, options) if self.path is None else train_svd(self.path, options).model
        )

    def error(self, values: Any) -> float:
        """The largest relative one."""
        return float(np.max(np.abs(values - self.exact) / self.exact))


def exact_values(matrix: Any) -> Any:
    """Of the smaller of AᵀA and AAᵀ."""
    short = matrix if matrix.shape[1] <= matrix.shape[0] else matrix.T
    gram = short.T @ short
    dense = gram.toarray() if sparse.issparse(gram) else np.asarray(gram)
    return np.sqrt(np.linalg.eigvalsh(dense)[::-1][:RANK])


def falling(rows: int, columns: int, seed: int) -> Iterator[Any]:
    """Blocks of rows of a table whose singular values fall like 1/√i, as those of many measured tables do."""
    draw = np.random.default_rng(seed)
    turn = np.linalg.qr(draw.normal(size=(columns, columns)))[0] / np.sqrt(np.arange(1, columns + 1))[:, None]
    for begin in range(0, rows, 4096):
        yield draw.normal(size=(min(4096, rows - begin), columns)) @ turn


def words(rows: int, columns: int, per_row: int) -> Any:
    """Documents of words that are as frequent as words are."""
    draw = np.random.default_rng(4)
    chosen = (columns ** draw.random((rows, per_row))).astype(np.int64) - 1
    starts = np.arange(0, rows * per_row + 1, per_row)
    found = sparse.csr_matrix((np.ones(chosen.size), chosen.reshape(-1), starts), (rows, columns))
    found.sum_duplicates()
    found.data = np.log1p(found.data)
    return found


def works(folder: Path, data: Path, scale: float) -> Iterator[Work]:
    """The matrices, one after another."""
    table = load_digits().data
    yield Work("digits, 1,797 × 64", table, exact_values(table))
    if (data / "a9a.gz").exists():
        found, _ = load_svmlight_file(str(data / "a9a.gz"))
        yield Work("a9a, 32,561 × 123, sparse", found, exact_values(found))
    else:
        print(f"a9a.gz is not in {data}; it is left out")
    rows = int(20_000 * scale)
    table = np.concatenate(list(falling(rows, 1500, 1)))
    yield Work(f"table, {rows:,} × 1,500", table, exact_values(table))
    rows = int(40_000 * scale)
    found = words(rows, 20_000, 60)
    yield Work(f"words, {rows:,} × 20,000, sparse", found, _exact_sparse(found))
    rows = int(10_000 * scale)
    found = words(rows, 100_000, 60)
    yield Work(f"words, {rows:,} × 100,000, sparse", found, _exact_sparse(found))
    rows = int(100_000 * scale)
    path = folder / "large.npy"
    gram = write_large(path, rows)
    exact = np.sqrt(np.linalg.eigvalsh(gram)[::-1][:RANK])
    mapped = np.load(path, mmap_mode="r")
    name = f"npy file of {mapped.nbytes / 1e9:.2g} GB, {rows:,} × 1,200; ours within 128 MiB"
    yield Work(name, mapped, exact, path, 128 << 20)


def write_large(path: Path, rows: int) -> Any:
    """Write the table that is larger than the memory that we are given; its AᵀA."""
    gram = np.zeros((1200, 1200))
    out = np.lib.format.open_memmap(path, "w+", np.float64, (rows, 1200))
    begin = 0
    for block in falling(rows, 1200, 2):
        out[begin : begin + len(block)] = block
        gram += block.T @ block
        begin += len(block)
    out.flush()
    return gram


def _exact_sparse(found: Any) -> Any:
    """ARPACK's to the last digit, where the columns are too many for LAPACK."""
    return np.sort(svds(found, RANK, tol=0, maxiter=10_000, random_state=1)[1])[::-1]


def timed(solve: Solve) -> tuple[float, float]:
    """Seconds, and CPU-seconds of all threads."""
    began, began_cpu = time.perf_counter(), time.process_time()
    solve()
    return time.perf_counter() - began, time.process_time() - began_cpu


def measure(work: Work, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each peer, ours beside it."""
    for name, solve in work.peers().items():
        error = work.error(solve())
        tolerance = min(max(error, LEAST_ERROR), 0.5)
        first = work.ours(tolerance)
        theirs, ours = [], []
        for _ in range(rounds):
            theirs.append(timed(solve))
            ours.append(timed(partial(work.ours, tolerance)))
        yield {
            "work": work.name,
            "peer": name,
            "peer_s": statistics.median(wall for wall, _ in theirs),
            "peer_cpu_s": statistics.median(cpu for _, cpu in theirs),
            "peer_error": error,
            "ours_s": statistics.median(wall for wall, _ in ours),
            "ours_cpu_s": statistics.median(cpu for _, cpu in ours),
            "ours_error": work.error(first.singular_values),
            "passes": first.passes,
            "peer_spread": [min(theirs)[0], max(theirs)[0]],
            "ours_spread": [min(ours)[0], max(ours)[0]],
        }


def most_memory(path: Path) -> float:
    """MiB that a process has at most which decomposes a file within 128 MiB, beyond one that decomposes digits.

    The peak is that of the process's own memory: `ru_maxrss` begins with that of the process which started it.
    """
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from manyhands.workloads.svd.options import SvdOptions\n"
        "from manyhands.workloads.svd.training import train_svd\n"
        "train_svd(sys.argv[1] or None, SvdOptions(tolerance=1e-4, memory_bytes=128 << 20))\n"
        "lines = Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(int(line.split()[1]) for line in lines if line.startswith('VmHWM:')) / 1024)\n"
    )

    def peak(of: str) -> float:
        done = subprocess.run([sys.executable, "-c", script, of], capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])

    return peak(str(path)) - peak("")


def renew_memory(results: Path, scale: float) -> None:
    """Measure the memory of a process again, on the file of `scale`."""
    result = json.loads(results.read_text())
    rows = int(100_000 * scale)
    if not any(f"{rows:,} × 1,200" in row["work"] for row in result["rows"]):
        sys.exit(f"{results} was measured at another scale; --scale is that of its file")
    with tempfile.TemporaryDirectory() as folder:
        write_large(Path(folder, "large.npy"), rows)
        result["memory_mib"] = most_memory(Path(folder, "large.npy"))
    print(f"memory beyond the start: {result['memory_mib']:.0f} MiB")
    results.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows that are drawn")
    parser.add_argument("--threads", type=int, default=1, help="of linear algebra, for everyone")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--memory-only", action="store_true", help="measure memory alone, and keep the rest")
    asked = parser.parse_args()
    warm()
    if asked.memory_only:
        renew_memory(asked.json, asked.scale)
        return
    torch.set_num_threads(asked.threads)
    limits = threadpool_limits(asked.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for work in works(Path(folder), asked.data, asked.scale):
            for row in measure(work, asked.rounds):
                rows.append(row)
                print(
                    f"{row['work']} · {row['peer']}: {row['peer_s']:.3g} s, ours {row['ours_s']:.3g} s",
                    flush=True,
                )
            if work.path is not None:
                memory = most_memory(work.path)
    limits.restore_original_limits()
    result = {
        "rank": RANK,
        "rounds": asked.rounds,
        "threads": asked.threads,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "memory_mib": memory,
        "rows": rows,
    }
    table = Table("work", "peer", "CPU-s", "error", "ours", "error", "passes", "ratio")
    for row in rows:
        ratio = row["peer_cpu_s"] / row["ours_cpu_s"]
        cells = [
            f"{row['peer_cpu_s']:.4g}",
            f"{row['peer_error']:.1e}",
            f"{row['ours_cpu_s']:.4g}",
            f"{row['ours_error']:.1e}",
        ]
        table.add_row(row["work"], row["peer"], *cells, str(row["passes"]), f"{ratio:.2f}")
    Console().print(table)
    print(f"memory beyond the start: {memory:.0f} MiB")
    asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
