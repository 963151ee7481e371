"""From calling `fit` to the first step: the first `fit` of a process, and the next ones, beside one `import torch`.

Run: `python benchmarks/startup.py`, on a quiet machine. Every case is a new process that imports torch and manyhands
(both timed) and then fits a small linear model for two steps several times. The first step has come when every worker
has called the loss, which notes the time; the whole `fit`, its end included, is shown beside it. A `warm` script calls
`mh.warm()` before it imports torch. Cases are interleaved, round by round; the median is shown. Beside the times stands
the processor time of a next `fit`: of the script, of the template that it forks its workers from, and of the workers.

`--source FOLDER` times another tree (its `src/`) in the same rounds, for before and after.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results" / "startup.json"
HERE = Path(__file__).resolve().parent.parent
CASES = (("mirrored", 2), ("mirrored", 8), ("ps", 2), ("ps", 8))
WAYS = ("", "warm")
FITS = 6
"""In one process, unless said otherwise."""

# What one case runs: a script, as a user has one.
SCRIPT = """
import json, os, sys, time
strategy, workers, fits, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
began = time.monotonic()
import manyhands as mh
if sys.argv[5]:
    mh.warm()
package_s = time.monotonic() - began
import torch
torch_s = time.monotonic() - began - package_s

def processor_s():
    "Processor seconds so far of this process, of those it has started, and of all that these have waited for."
    ticks, parents = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks[int(name)], parents[int(name)] = sum(map(int, fields[11:15])), int(fields[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[pid] for pid in family) / os.sysconf("SC_CLK_TCK")

def loss(model, batch):
    with open(os.path.join(folder, f"{os.getpid()}"), "a") as file:
        file.write(f"{time.monotonic()}\\n")
    return model(batch).square().mean()

task = mh.Task(
    model=lambda: torch.nn.Linear(4, 1),
    loss=loss,
    data=torch.ones(64, 4),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    batch_size=16,
)
reports = []
seen = set()
for number in range(fits):
    if number == 1:
        spent_s = -processor_s()
    called = time.monotonic()
    mh.fit(task, strategy, workers=workers, steps=2)
    ended = time.monotonic()
    new = [name for name in os.listdir(folder) if name not in seen]
    seen.update(new)
    firsts = [float(open(os.path.join(folder, name)).readline()) for name in new]
    reports.append({"first_step_s": max(firsts) - called, "fit_s": ended - called})
spent_s += processor_s()
print(json.dumps({"torch_s": torch_s, "package_s": package_s, "fits": reports,
    "next_processor_s": spent_s / (fits - 1)}))
"""


def run(source: Path, strategy: str, workers: int, way: str, fits: int = FITS) -> dict[str, float]:
    """One new process; seconds by name."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        notes = Path(folder) / "notes"
        notes.mkdir()
        done = subprocess.run(
            [sys.executable, script, strategy, str(workers), str(fits), str(notes), way],
            # with bytecode, as an installed package has it, whatever the shell says
            env={**os.environ, "PYTHONPATH": str(source / "src"), "PYTHONDONTWRITEBYTECODE": ""},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        )
    report = json.loads(done.stdout.splitlines()[-1])
    first, *next_ones = report["fits"]
    return {
        "torch": report["torch_s"],
        "package": report["package_s"],
        "first": first["first_step_s"],
        "next": statistics.median(one["first_step_s"] for one in next_ones),
        "first_whole": first["fit_s"],
        "next_whole": statistics.median(one["fit_s"] for one in next_ones),
        "next_processor": report["next_processor_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fits", type=int, default=FITS, help="in one process; at least 2")
    parser.add_argument("--source", type=Path, action="append", default=[], help="another tree to time")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    sources = [*options.source, HERE]
    ways = [(source, way) for source in sources for way in (WAYS if source == HERE else WAYS[:1])]
    rounds: dict[tuple[str, int, Path, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for strategy, workers in CASES:
            for source, way in ways:
                found = run(source, strategy, workers, way, options.fits)
                rounds.setdefault((strategy, workers, source, way), []).append(found)
    table = Table(title=f"seconds, median of {options.rounds}, {os.cpu_count()} cores")
    names = tuple(next(iter(rounds.values()))[0])
    for column in ("tree", "strategy", "workers", *names):
        table.add_column(column)
    rows = []
    for (strategy, workers, source, way), seen in rounds.items():
        medians = {name: statistics.median(one[name] for one in seen) for name in names}
        tree = " ".join(["this" if source == HERE else "other", *([way] if way else [])])
        rows.append({"tree": tree, "strategy": strategy, "workers": workers, **medians, "rounds": seen})
        table.add_row(tree, strategy, str(workers), *(f"{medians[name]:.2f}" for name in names))
    Console().print(table)
    options.json.write_text(
        json.dumps({"cores": os.cpu_count(), "python": platform.python_version(), "rows": rows}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
