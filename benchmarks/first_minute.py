"""The first minute of a new user: help, version, the first step of `train digits`, and kernels not compiled yet.

Run: `python benchmarks/first_minute.py`, on a quiet machine. Every line is a new process of the command line. `first`
is with an empty cache of compiled kernels, `second` is the same command again. Beside the seconds of the whole command
stand those that its summary counts as work. `--before TREE` times another source tree (its `src/`) in the same rounds.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from manyhands.observe.record.event_files import read_events
from manyhands.observe.record.events import EventKind

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "benchmarks" / "results" / "first_minute.json"


def command(source: Path, folder: Path, *words: str | Path, module: str = "manyhands") -> float:
    """The seconds that `python -m manyhands WORDS` takes with the package of a tree and the kernels of `folder`."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, *(["-m", module] if module else []), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(source / "src"), "NUMBA_CACHE_DIR": str(folder / "kernels")},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=900,
    )
    return time.monotonic() - began


def first_step(run: Path, began_ns: int) -> float:
    """Seconds until the last worker had done its first step; events are on the clock of all processes."""
    firsts = []
    for file in (run / "events").glob("worker-*.bin"):
        events = read_events(file)
        steps = events[events["kind"] == EventKind.STEP]
        firsts.append(int(steps["start_ns"][0] + steps["duration_ns"][0]))
    return (max(firsts) - began_ns) / 1e9


def measure(source: Path, folder: Path, examples: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """One round of a tree, by name."""
    yield "import torch", {"seconds": command(source, folder, "-c", "import torch", module="")}
    command(source, folder, "--help")  # leaves the files that Python itself compiles
    yield "--help", {"seconds": command(source, folder, "--help")}
    yield "version", {"seconds": command(source, folder, "version")}
    for number, which in enumerate(("first", "second")):
        began_ns, out = time.monotonic_ns(), folder / f"digits-{number}"
        words = ("train", "digits", "--workers", "2", "--steps", "50", "--out", out)
        seconds = command(source, folder, *words)
        yield f"train digits, {which}", {"seconds": seconds, "first_step_s": first_step(out, began_ns)}
    for what, words in (("logreg", ("--train", examples)), ("glove", ())):
        kernels = folder / what
        kernels.mkdir()
        for number, which in enumerate(("first", "second")):
            summary = kernels / f"{number}.json"
            out = kernels / f"out-{number}"
            seconds = command(source, kernels, "train", what, *words, "--out", out, "--json", summary)
            report = json.loads(summary.read_text())
            counted = report["seconds"] if what == "logreg" else report["seconds"]["total"]
            rate = report["examples_per_s"] if what == "logreg" else report["records_per_s"]
            yield f"train {what}, {which}", {"seconds": seconds, "counted_s": counted, "per_s": rate}


def write_examples(path: Path, count: int = 20_000) -> Path:
    drawn = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            features = sorted(drawn.sample(range(1, 124), 14))
            label = "+1" if drawn.random() < 0.4 else "-1"
            file.write(f"{label} {' '.join(f'{feature}:1' for feature in features)}\n")
    return path


def show(rows: list[dict[str, Any]], rounds: int) -> None:
    table = Table(title=f"seconds, median of {rounds}, {len(os.sched_getaffinity(0))} cores")
    for column in ("command", "tree", "whole", "first step", "counted as work", "records or examples/s"):
        table.add_column(column, justify="left" if column in ("command", "tree") else "right")
    for row in rows:
        cells = [
            f"{row[name]:.2f}" if name in row else "" for name in ("seconds", "first_step_s", "counted_s")
        ]
        table.add_row(row["what"], row["tree"], *cells, f"{row['per_s']:,.0f}" if "per_s" in row else "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another source tree to time in the same rounds")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    trees = {**({"before": options.before.resolve()} if options.before else {}), "now": HERE}
    rounds: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for tree, source in trees.items():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                for what, found in measure(source, folder, write_examples(folder / "examples.svm")):
                    rounds.setdefault((what, tree), []).append(found)
                    print(tree, what, {key: round(value, 2) for key, value in found.items()}, flush=True)
    order = list(dict.fromkeys(what for what, _ in rounds))
    rows = [
        {
            "what": what,
            "tree": tree,
            **{
                name: statistics.median(one[name] for one in rounds[what, tree])
                for name in rounds[what, tree][0]
            },
            "rounds": rounds[what, tree],
        }
        for what in order
        for tree in trees
    ]
    show(rows, options.rounds)
    machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
