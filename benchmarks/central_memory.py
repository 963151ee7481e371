"""What the workers of `central` and `mirrored` hold in memory: 4 workers, 100 million parameters, AdamW.

Run: `python benchmarks/central_memory.py`. From the first step to the last, PSS is read from /proc/PID/smaps_rollup of
every worker, some ten times a second: shared pages count once over all workers, each worker's own pages fully; those
that a worker still shares with the template process it was forked from count in part. Starting and ending are left out:
an ending interpreter touches every object, and so copies what all had shared. The peak is
that of the sum over workers, with what it was made of at that moment. Memory of their own is the optimizer's state and,
while backward runs, the gradient of a layer on its way into its bucket; shared memory is the gradients and, under
`central`, the parameters. What a run with a model of nothing takes is subtracted: Python, torch and compiled code.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import manyhands as mh
from manyhands.errors import format_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "central-memory.json"
PERIOD_S = 0.05
LAYERS = 24


@dataclass(frozen=True)
class Usage:
    """Proportional set size, in bytes, of all workers together."""

    total: int = 0
    anonymous: int = 0
    shared: int = 0
    file: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(one + two for one, two in zip(self.values(), other.values(), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(one - two for one, two in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        return tuple(asdict(self).values())


def usage_of(pid: int) -> Usage:
    """What one process has now; nothing, if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return Usage()
    sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
    names = ("Pss", "Pss_Anon", "Pss_Shmem", "Pss_File")
    return Usage(*(int(sizes.get(name, 0)) * 1024 for name in names))


def workers() -> list[int]:
    """The children of this process that are workers, which the kernel knows by their names."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = [int(pid) for pid in (task / "children").read_text().split()]
            found += [pid for pid in pids if is_worker(Path(f"/proc/{pid}"))]
        except OSError:  # a thread or a child ended while we looked
            continue
    return found


def is_worker(process: Path) -> bool:
    """The template process that workers are forked from has their command line, but not their name."""
    return (process / "comm").read_text().startswith("worker ")


@dataclass(frozen=True)
class Marks:
    """Files by which workers tell that they have begun to train, and that the last step has come."""

    folder: Path
    workers: int
    steps: int

    def make_loss(self) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
        calls = 0

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:  # now it has gradients and the optimizer's state
                (self.folder / f"began-{os.getpid()}").touch()
            time.sleep(2 * PERIOD_S)  # long enough to be seen
            if calls == self.steps:
                (self.folder / "ended").touch()
            return model(batch).square().mean()

        return loss

    def all_train(self) -> bool:
        return len(list(self.folder.glob("began-*"))) == self.workers and not (self.folder / "ended").exists()


class Watch(threading.Thread):
    """Remembers the moment, of those while all train, at which all workers together held most."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(name="memory watch")
        self._marks = marks
        self.peak = Usage()
        self.samples = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(PERIOD_S):
            if not self._marks.all_train():
                continue
            now = sum(map(usage_of, workers()), Usage())
            if not self._marks.all_train():  # an end that came while we looked
                continue
            self.samples += now.total > 0
            if now.total > self.peak.total:
                self.peak = now

    def stop(self) -> None:
        self._over.set()
        self.join()


def task(width: int, batch_size: int, marks: Marks) -> mh.Task:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))

    return mh.Task(
        model=build,
        loss=marks.make_loss(),
        data=torch.ones(batch_size, width),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=batch_size,
    )


def measure(strategy: str, number_of_workers: int, width: int, steps: int) -> tuple[Usage, int]:
    with tempfile.TemporaryDirectory() as folder:
        marks = Marks(Path(folder), number_of_workers, steps)
        watch = Watch(marks)
        watch.start()
        try:
            mh.fit(
                task(width, 2 * number_of_workers, marks), strategy, workers=number_of_workers, steps=steps
            )
        finally:
            watch.stop()
    return watch.peak, watch.samples


def expected(strategy: str, number_of_workers: int, model_bytes: int) -> dict[str, int]:
    """Copies of the model's size: parameters, AdamW's two moments, gradients."""
    copies = 1 if strategy == "central" else number_of_workers
    return {
        "parameters": copies * model_bytes,
        "optimizer_state": 2 * copies * model_bytes,
        "gradients": number_of_workers * model_bytes,
    }


def compare(strategies: list[str], number_of_workers: int, width: int, steps: int) -> list[dict[str, Any]]:
    rows = []
    model_bytes = LAYERS * width * width * 4
    for strategy in strategies:
        nothing, _ = measure(strategy, number_of_workers, 8, steps)
        peak, samples = measure(strategy, number_of_workers, width, steps)
        wanted = expected(strategy, number_of_workers, model_bytes)
        rows.append(
            {
                "strategy": strategy,
                "expected": wanted | {"total": sum(wanted.values())},
                "peak": asdict(peak - nothing),
                "without_a_model": asdict(nothing),
                "samples": samples,
                "ratio": round((peak - nothing).total / sum(wanted.values()), 3),
            }
        )
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    headings = ["strategy", "parameters", "AdamW state", "gradients", "= expected"]
    for heading in [*headings, "peak", "shared", "own", "peak / expected"]:
        table.add_column(heading, justify="right" if heading != "strategy" else "left")
    for row in rows:
        wanted, peak = row["expected"], row["peak"]
        sizes = [*wanted.values(), peak["total"], peak["shared"], peak["anonymous"]]
        table.add_row(row["strategy"], *map(format_bytes, sizes), f"{row['ratio']:.2f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=2041, help="of each layer; 2041 gives 100 million parameters"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--strategies", nargs="+", default=["central", "mirrored"])
    arguments = parser.parse_args()
    parameters = LAYERS * arguments.width**2
    began = time.monotonic()
    rows = compare(arguments.strategies, arguments.workers, arguments.width, arguments.steps)
    show(
        rows, f"{arguments.workers} workers, {parameters / 1e6:.1f} M parameters, PSS of all workers together"
    )
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    report = machine | {"workers": arguments.workers, "parameters": parameters, "rows": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{time.monotonic() - began:.0f} s; written to {arguments.json}")


if __name__ == "__main__":
    main()
