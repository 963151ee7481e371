"""What every strategy promises, measured: bandwidth, faults, convergence, elasticity and ease, as one JSON.

    python benchmarks/scorecard.py --json FILE --numbers      distances to one process alone, in a minute
    python benchmarks/scorecard.py --json FILE [--out FOLDER] [--minutes 6.5] [--cores 4-15] [--lanes 6]
        [--seconds 7 | --steps 200] [--only "ps; single"]

One `manyhands compare digits --faults --elastic` a strategy, several at once, each lane of them pinned to cores of its
own. A short run before tells how many steps last for `--seconds`. The file has what is done so far at every moment.
What the `--minutes` cut off is interrupted, and says so.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from manyhands.facts import Answer
from manyhands.lab.compare.compare_report import machine
from manyhands.lab.proof import largest_difference
from manyhands.strategy import Strategy

# Those with most faults first, so that no lane ends long after the others
STRATEGIES = (
    "ps link=tcp", "ps servers=2 replicas=1", "ps consistency=async", "ps", "ps consistency=bounded:4",
    "allreduce elastic=yes", "allreduce link=tcp", "federated", "pipeline", "tensor", "sharded", "allreduce",
    "mirrored", "central", "local", "hogwild", "single",
)  # fmt: skip
ROUNDS = 12  # of a strategy that counts them
TASK = ("digits", "--learning-rate", "0.001")
TARGET = "accuracy=0.97"
TRIED_STEPS = 60
FEWEST, MOST = 300, 3000  # steps
NUMBER_STEPS = 30
END_S = 30.0  # of a comparison that is to end


def cores_of(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def ours(cores: list[int], *words: str) -> list[str]:
    pinned = ["taskset", "-c", ",".join(map(str, cores))]
    return [*pinned, sys.executable, "-m", "manyhands", *words]


class Lane(threading.Thread):
    """Takes strategies until none is left or the time is up, on cores of its own."""

    def __init__(
        self, cores: list[int], asked: argparse.Namespace, left: queue.SimpleQueue[str], found: Found
    ) -> None:
        super().__init__()
        self.cores, self.asked, self.left, self.found = cores, asked, left, found

    def run(self) -> None:
        while True:
            try:
                strategy = self.left.get_nowait()
            except queue.Empty:
                return
            if time.monotonic() > self.found.deadline:
                self.found.add(strategy, {"problem": "no time was left"})
                continue
            self.found.add(strategy, self.measured(strategy))

    def measured(self, strategy: str) -> dict[str, Any]:
        folder = self.asked.out / strategy.replace(" ", "-").replace("=", "-").replace(":", "-")
        length = ["--rounds", str(ROUNDS)]
        if not strategy.startswith("federated"):
            length = ["--steps", str(self.asked.steps or self.steps(strategy, folder))]
        figures = folder.with_suffix(".json")
        words = [
            "compare",
            *TASK,
            "--faults",
            "--elastic",
            "--strategies",
            strategy,
            *length,
            "--target",
            TARGET,
        ]
        begun = time.monotonic()
        said = self.follow([*words, "--out", str(folder), "--json", str(figures)], folder.with_suffix(".log"))
        took = {"took_s": time.monotonic() - begun, "cores": len(self.cores)}
        if not figures.exists():
            return {**took, "problem": said}
        return {**took, **json.loads(figures.read_text())}

    def steps(self, strategy: str, folder: Path) -> int:
        """So many as last for the seconds asked for."""
        tried = folder.with_suffix(".tried")
        length = ["--steps", str(TRIED_STEPS), "--evaluate-every", str(TRIED_STEPS)]
        workers = [] if strategy == "single" else ["--workers", "2"]
        words = [
            "train",
            *TASK,
            "--strategy",
            strategy,
            *workers,
            *length,
            "--out",
            str(tried),
            "--progress",
            "none",
        ]
        self.follow(words, folder.with_suffix(".tried.log"))
        try:
            each = [json.loads(line) for line in (tried / "metrics.jsonl").read_text().splitlines()]
            times = [row["at_s"] for row in each if row.get("loss") is not None]
            rate = (len(times) / 2) / (times[-1] - times[len(times) // 2])  # the first steps are slow
        except (OSError, LookupError, ZeroDivisionError):
            return FEWEST
        return int(min(MOST, max(FEWEST, self.asked.seconds * rate)))

    def follow(self, words: list[str], log: Path) -> str:
        """Run a command until it ends or the time is up; what it said last."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                ours(self.cores, *words), stdout=file, stderr=file, start_new_session=True
            )
            try:
                process.wait(max(1.0, self.found.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


class Found:
    """What is done so far, in a file."""

    def __init__(self, asked: argparse.Namespace, cores: list[int]) -> None:
        self.deadline = time.monotonic() + 60 * asked.minutes
        self._path: Path = asked.json
        self._lock = threading.Lock()
        self._data: dict[str, Any] = {
            "machine": machine(),
            "task": " ".join(TASK),
            "target": TARGET,
            "lanes": asked.lanes,
            "cores": len(cores),
            "strategies": {},
        }

    def add(self, strategy: str, figures: dict[str, Any]) -> None:
        with self._lock:
            self._data["strategies"][strategy] = figures
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._data, indent=1) + "\n")
            print(f"{strategy}: {figures.get('took_s', 0.0):.0f} s {figures.get('problem', '')}", flush=True)


def numbers(path: Path) -> None:
    """How far the weights of each strategy are from those of one process, in float64: the last column."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 16, generator=draw, dtype=torch.float64)
    widths = [16, 64, 64, 64, 1]
    layers = [nn.Linear(one, other, dtype=torch.float64) for one, other in itertools.pairwise(widths)]
    task = mh.Task(
        model=lambda: nn.Sequential(
            *(part for layer in layers for part in (copy.deepcopy(layer), nn.Tanh()))
        ),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=(inputs, inputs.mean(1, keepdim=True).sin()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=64,
    )
    alone = mh.fit(task, "single", steps=NUMBER_STEPS)
    apart = {}
    for strategy in map(Strategy.parse, STRATEGIES):
        if strategy.facts.promises.same_numbers.answer is Answer.YES and strategy.word != "single":
            run = mh.fit(task, strategy, workers=2, steps=NUMBER_STEPS)
            apart[str(strategy)] = largest_difference(run.model, alone.model)
            print(f"{strategy}: {apart[str(strategy)]:.1e}", flush=True)
    found = {"machine": machine(), "workers": 2, "steps": NUMBER_STEPS, "apart": apart}
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=6.5)
    parser.add_argument("--cores", type=cores_of, default=sorted(os.sched_getaffinity(0)))
    parser.add_argument("--lanes", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=7.0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--only", default="; ".join(STRATEGIES))
    parser.add_argument("--numbers", action="store_true")
    asked = parser.parse_args()
    if asked.numbers:
        numbers(asked.json)
        return
    asked.out = asked.out or Path(tempfile.mkdtemp(prefix="scorecard-"))
    asked.out.mkdir(parents=True, exist_ok=True)
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for strategy in asked.only.split(";"):
        left.put(strategy.strip())
    found = Found(asked, asked.cores)
    each = len(asked.cores) // asked.lanes
    lanes = [Lane(asked.cores[at * each : (at + 1) * each], asked, left, found) for at in range(asked.lanes)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()


if __name__ == "__main__":
    main()
