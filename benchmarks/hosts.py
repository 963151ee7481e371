"""Two hosts with a slow cable between them: `python benchmarks/hosts.py [--rate 1gbit] [--rounds 3]`; needs root.

Two network namespaces stand for hosts, two processes on each, and a token bucket at each end of the cable for its
speed. The same perceptron is trained by each way in turn: what a step takes, and how many bytes each host puts on
the cable, beside what the way's formula says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from cables import inside, on_the_cable, places, run_ranks, two_namespaces

RESULT = Path(__file__).parent / "results" / "hosts.json"
WIDTH, LAYERS, BATCH, STEPS, WARM = 1024, 4, 32, 14, 4
WORLD, HOSTS = 4, 2
RATE, LIMIT_S = 1e-3, 240.0
ADDRESS = "10.231.79."
WAYS = {
    "hierarchical": "allreduce",
    "ring": "allreduce algorithm=ring",
    "hierarchical, bf16": "allreduce link=tcp codec=bf16",
    "central": "central",
    "ddp gloo": "",
    "ps sync": "ps",
}


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def formula_bytes(way: str, num_bytes: float) -> float | None:
    """What one host sends to the other in a step, by the way's formula; None where it has none here."""
    if way.startswith("hierarchical") or way == "central":  # a ring of the two leaders
        return 2 * (HOSTS - 1) / HOSTS * num_bytes * (0.5 if "bf16" in way else 1)
    if way == "ring":  # one link of the ring leaves each host
        return 2 * (WORLD - 1) / WORLD * num_bytes
    return None


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, WIDTH, generator=generator)
    return x, x.roll(1, 1)


def perceptron(before_loss: Callable[[], None]) -> mh.Task:
    """The task of every way; `before_loss` is called before each gradient."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        before_loss()
        return (model(batch[0]) - batch[1]).square().mean()

    return mh.Task(
        model=build,
        loss=loss,
        data=data(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=BATCH,
    )


class Meter:
    """Reads the cable once a step, so that what is sent before the first and after the last does not count."""

    def __init__(self) -> None:
        self.readings: list[int] = []

    def read(self) -> None:
        self.readings.append(on_the_cable()[0])

    def bytes_per_step(self) -> float:
        # Not the first readings: before the first step, the loss is tried on parts of a batch.
        counted = self.readings[WARM - STEPS :]
        return (counted[-1] - counted[0]) / (len(counted) - 1)


def train_ours(strategy: str, meter: Meter) -> list[float]:
    run = mh.fit(
        perceptron(meter.read), strategy, steps=STEPS, options=mh.Options(insecure=True, progress="none")
    )
    at = [row["at_s"] for row in run.history.steps]
    return [late - early for early, late in pairwise(at)][WARM - 1 :]


def train_ddp(meter: Meter) -> list[float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = data()
    share = BATCH // WORLD
    took = []
    for step in range(STEPS):
        meter.read()
        begin = time.perf_counter()
        first = (step * BATCH + rank * share) % (len(x) - share)
        optimizer.zero_grad()
        (model(x[first : first + share]) - y[first : first + share]).square().mean().backward()
        optimizer.step()
        took.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return took[WARM:]


def work(way: str, result: Path) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    meter = Meter()
    took = train_ours(WAYS[way], meter) if WAYS[way] else train_ddp(meter)
    if os.environ["RANK"] == str(WORLD - 1):  # a worker in this process under every way
        result.write_text(json.dumps({"took": took, "sent": meter.bytes_per_step()}))


def two_hosts(rate: str) -> AbstractContextManager[list[str]]:
    """The namespaces that stand for hosts, by name."""
    return two_namespaces(ADDRESS, rate, ["burst", "256kb", "latency", "100ms"])


def measure(way: str, names: list[str], port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "took"
        own = [sys.executable, __file__, "--work", way, str(result)]
        commands = [[*inside(names[rank * HOSTS // WORLD]), *own] for rank in range(WORLD)]
        run_ranks(commands, [places(ADDRESS, port, rank, WORLD) for rank in range(WORLD)], LIMIT_S)
        measured = json.loads(result.read_text())
    return {"step_s": statistics.median(measured["took"]), "sent": measured["sent"]}


def main() -> None:
    """Measure every way in turn, print a table and keep it."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--json", type=Path, default=RESULT)
    reader.add_argument("--work", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.work:
        work(asked.work[0], Path(asked.work[1]))
        return
    num_bytes = sum(parameter.nbytes for parameter in build().parameters())
    rounds: dict[str, list[Mapping[str, Any]]] = {way: [] for way in WAYS}
    with two_hosts(asked.rate) as names:
        for number in range(asked.rounds):
            for index, way in enumerate(WAYS):
                rounds[way].append(measure(way, names, 29500 + number * len(WAYS) + index))
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rate": asked.rate,
        "hosts": HOSTS,
        "workers": WORLD,
        "gradient_bytes": num_bytes,
        "steps": STEPS - WARM,
        "rounds": asked.rounds,
        "ways": [
            {
                "way": way,
                "strategy": WAYS[way],
                "step_s": statistics.median(one["step_s"] for one in measured),
                "sent_bytes": statistics.median(one["sent"] for one in measured),
                "formula_bytes": formula_bytes(way, num_bytes),
                "step_s_rounds": [one["step_s"] for one in measured],
            }
            for way, measured in rounds.items()
        ],
    }
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["ways"]:
        by = f"{row['formula_bytes'] / 1e6:8.2f}" if row["formula_bytes"] else "       –"
        print(
            f"{row['way']:20s} {row['step_s'] * 1e3:8.1f} ms  {row['sent_bytes'] / 1e6:8.2f} MB sent  {by} by formula"
        )


if __name__ == "__main__":
    main()
