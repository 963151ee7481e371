"""From a CSV file of 1 GB to a model and to predictions within `--memory 512MiB`, as commands do it.

    python benchmarks/tables.py [--size 1GB] [--memory 512MiB] [--workloads gbdt,logreg,svd]
                                [--json benchmarks/results/tables.json]

The file has 40 columns of numbers, some of them missing, 4 of text, and a label. Each command is a process of its own;
its memory is looked at every 20 ms: what is resident in all, and what is anonymous (not the pages of files, which the
system takes back). `more` is the peak of anonymous memory beyond that of the same command on a file of 1 MB: what
`--memory` is about, without the interpreter and its libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import csv as arrow_csv

from manyhands.errors import format_bytes
from manyhands.strategy import parse_size

RESULTS = Path(__file__).resolve().parent / "results" / "tables.json"
NUMBERS, TEXTS, CATEGORIES, AT_ONCE = 40, 4, 30, 50_000
COMMANDS: dict[str, tuple[str, ...]] = {
    "gbdt": ("--train", "{file}", "--target", "happy", "--drop", "id", "--trees", "20", "--workers", "1"),
    "logreg": ("--train", "{file}", "--target", "happy", "--drop", "id", "--passes", "2"),
    "svd": ("--path", "{file}", "--drop", "id,happy", "--skip-bad", "--rank", "5", "--workers", "1"),
}


def write_table(path: Path, num_bytes: int, seed: int = 0) -> int:
    """A CSV file of about so many bytes; its rows."""
    draw, rows = np.random.default_rng(seed), 0
    effects = np.random.default_rng(0).normal(size=(TEXTS, CATEGORIES))
    with path.open("wb") as file:
        while file.tell() < num_bytes:
            count = AT_ONCE if num_bytes > 10**7 else 1_000
            values = draw.normal(size=(count, NUMBERS)).round(3)
            codes = draw.integers(0, CATEGORIES, (count, TEXTS))
            score = (
                values[:, 0]
                - values[:, 1] * values[:, 2]
                + sum(effects[at][codes[:, at]] for at in range(TEXTS))
            )
            values[draw.random(count) < 0.01, 3] = np.nan
            happy = draw.random(count) < 1 / (1 + np.exp(-score))
            columns: dict[str, Any] = {"id": np.arange(rows, rows + count)}
            columns |= {f"x{at}": pyarrow.array(values[:, at], from_pandas=True) for at in range(NUMBERS)}
            names = np.array([f"kind {number}" for number in range(CATEGORIES)])
            columns |= {f"t{at}": names[codes[:, at]] for at in range(TEXTS)}
            columns["happy"] = np.where(happy, "yes", "no")
            table = pyarrow.table(columns)
            arrow_csv.write_csv(table, file, arrow_csv.WriteOptions(include_header=not rows))
            rows += count
    return rows


def measured(*words: str) -> dict[str, Any]:
    """One command: CPU-seconds, and peaks of memory in bytes."""
    before, peaks = _cpu_seconds(), {"resident": 0, "anonymous": 0}
    with subprocess.Popen([sys.executable, "-m", "manyhands", *words], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for name, field in (("resident", "VmRSS"), ("anonymous", "RssAnon")):
                peaks[name] = max(peaks[name], _status(process.pid, field))
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return {"cpu_seconds": round(_cpu_seconds() - before, 1), **peaks}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _status(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def measure(folder: Path, num_bytes: int, memory: str, workloads: list[str]) -> dict[str, Any]:
    """Every command of these workloads on a small file and on the large one."""
    small, large = folder / "small.csv", folder / "large.csv"
    write_table(small, 1 << 20, seed=1)
    rows, found = write_table(large, num_bytes), []
    for name in workloads:
        words = COMMANDS[name]
        for step in ("train", "predict"):
            peaks = {}
            for file in (small, large):
                out = str(folder / f"{name}-{file.stem}")
                train = [word.format(file=file) for word in words]
                asked = ["train", name, *train, "--memory", memory, "--out", out]
                if step == "predict":
                    skip = ["--skip-bad"] if name == "svd" else []
                    asked = ["predict", out, str(file), "--out", str(folder / "answers.txt"), *skip]
                peaks[file.stem] = measured(*asked)
            more = peaks["large"]["anonymous"] - peaks["small"]["anonymous"]
            found.append(
                {"workload": name, "step": step, **peaks["large"], "small": peaks["small"], "more": more}
            )
            shown = {key: format_bytes(found[-1][key]) for key in ("resident", "anonymous", "more")}
            print(name, step, f"{found[-1]['cpu_seconds']} CPU-seconds", shown, flush=True)
        summary = json.loads((folder / f"{name}-large" / "summary.json").read_text())
        found[-2]["figures"] = {
            key: summary[key] for key in ("bad_rows", "bad_lines", "rows") if key in summary
        }
    return {
        "file_bytes": large.stat().st_size,
        "rows": rows,
        "columns": NUMBERS + TEXTS,
        "memory": memory,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "found": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--workloads", default=",".join(COMMANDS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="manyhands-tables-") as folder:
        result = measure(Path(folder), parse_size(asked.size), asked.memory, asked.workloads.split(","))
    asked.json.write_text(json.dumps(result, indent=2) + "\n")
    most = max(row["more"] for row in result["found"])
    limit = parse_size(asked.memory)
    print(f"the most is {format_bytes(most)} of {format_bytes(limit)}")
    if most > limit:
        raise SystemExit("more than --memory allows")


if __name__ == "__main__":
    main()
