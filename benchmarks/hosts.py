"""Steps between hosts: `python benchmarks/hosts.py [--hosts-workers 2x1,2x2,4x1] [--rates 1,10,25]`; needs root.

Network namespaces stand for hosts, each on cores of its own, behind a cable that token buckets hold to a rate
(`loopback`: to none). The same perceptron is trained by each way in turn, with as many rows a worker as make computing
take a quarter of the time that the cable needs for an all-reduce, as much, and three times as much: what a step takes,
beside the larger of computing (all workers at once, no exchange) and of the bytes on the cable, beside what the order
of a synchronous step allows, and beside DistributedDataParallel on Gloo. The ways of a cell follow one another in the
same processes, some rounds.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from cables import (
    cores_of,
    inside,
    on_the_cable,
    places,
    run_ranks,
    switched_hosts,
    two_namespaces,
    why_no_namespaces,
)
from manyhands.strategies.allreduce.strategy import AllReduce
from netlink import quantity

RESULT = Path(__file__).parent / "results" / "hosts.json"
WIDTH, LAYERS, WARM, START_S = 512, 16, 3, 15.0
RATE, SUBNET = 1e-3, "10.231.79."
ALONE, PEER, OURS, ONE_LINK = "alone", "ddp gloo", "allreduce", "one link a pair"
FRAMES = 1514 / 1448  # bytes on the cable for one of ours, in frames of 1,500 bytes with TCP and IPv4
BOUNDS = {"communication": 0.25, "balanced": 1.0, "compute": 3.0}
"""By what a step is bound by: the time to compute, as a multiple of that of an all-reduce on the cable."""


@dataclass(frozen=True)
class Job:
    """What one set of processes measures: hosts with workers, and a cable."""

    hosts: int
    per_host: int
    rate: str  # in Gbit/s, or "loopback"
    rows: tuple[int, ...]  # a worker's; none: by `BOUNDS`
    ways: tuple[str, ...]
    rounds: int
    cores: int  # of each host; 0: as many as there are for all of them
    until: float  # of `time.time`: nothing begins after that

    @property
    def world(self) -> int:
        return self.hosts * self.per_host

    @property
    def name(self) -> str:
        return f"{self.hosts}x{self.per_host} at {self.rate}"

    @property
    def steps(self) -> int:
        return WARM + {"1": 4}.get(self.rate, 15)

    @property
    def shape(self) -> str | None:
        """The rate as `tc` spells it."""
        return None if self.rate == "loopback" else f"{self.rate}gbit"

    def cable_s(self, num_bytes: int) -> float:
        """How long the bytes of an all-reduce take that crosses each host's cable as seldom as possible."""
        return 2 * (self.hosts - 1) / self.hosts * num_bytes / quantity(self.shape or "25gbit")

    def formula_bytes(self, way: str, num_bytes: int) -> float | None:
        """What one host sends in a step, by the way's formula; None where it has none here."""
        if way in (PEER, ALONE, ONE_LINK) or way.startswith("ps"):
            return None
        if "algorithm=ring" in way:  # one link of the ring leaves each host
            return 2 * (self.world - 1) / self.world * num_bytes
        return 2 * (self.hosts - 1) / self.hosts * num_bytes * (0.5 if "bf16" in way else 1)


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def data(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2 * batch, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, 1)


class Meter:
    """Reads the cable once a step, so that what is sent before the first and after the last does not count."""

    def __init__(self) -> None:
        self.readings: list[int] = []
        self.outside_s: list[
            float
        ] = []  # of a plain loop: forward and the optimizer's step, when nothing can be sent

    def read(self) -> None:
        self.readings.append(on_the_cable()[0])

    def bytes_per_step(self, steps: int) -> float:
        # Not the first readings: before the first step, the loss is tried on parts of a batch.
        counted = self.readings[WARM - steps :]
        return (counted[-1] - counted[0]) / (len(counted) - 1)


def perceptron(before_loss: Callable[[], None], batch: int) -> mh.Task:
    """The task; `before_loss` is called before each gradient."""

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        before_loss()
        return (model(batch[0]) - batch[1]).square().mean()

    return mh.Task(
        model=build,
        loss=loss,
        data=data(batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=batch,
    )


def train_ours(strategy: str, rows: int, job: Job, meter: Meter) -> list[float]:
    AllReduce.streams = 1 if strategy == ONE_LINK else 2
    strategy = OURS if strategy == ONE_LINK else strategy
    task = perceptron(meter.read, rows * job.world)
    options = mh.Options(insecure=True, progress="none")
    at = [row["at_s"] for row in mh.fit(task, strategy, steps=job.steps, options=options).history.steps]
    return [late - early for early, late in pairwise(at)][WARM - 1 :]


def train_plainly(
    rows: int, steps: int, meter: Meter, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> list[float]:
    """A loop of torch's own on as many rows."""
    torch.manual_seed(0)
    model = wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = data(rows)
    took = []
    for step in range(steps):
        meter.read()
        begin, first = time.perf_counter(), step % 2 * rows
        optimizer.zero_grad()
        loss = (model(x[first : first + rows]) - y[first : first + rows]).square().mean()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        took.append(end - begin)
        meter.outside_s.append(forward - begin + end - backward)
    return took[WARM:]


def sized_rows(job: Job) -> dict[str, int]:
    """How many rows a worker has, by what a step is bound by; the same on all ranks."""
    if job.rows:
        return {str(rows): rows for rows in job.rows}
    few, many = 8, 264
    took = torch.tensor(
        [statistics.median(train_plainly(rows, WARM + 5, Meter())) for rows in (few, many)],
        dtype=torch.float64,
    )
    dist.all_reduce(took, dist.ReduceOp.MAX)
    each_s = max(1e-9, float(took[1] - took[0]) / (many - few))
    cable_s = job.cable_s(sum(parameter.nbytes for parameter in build().parameters()))
    sized: dict[int, str] = {}  # of names that want as few rows as there may be, the first
    for name, share in BOUNDS.items():
        sized.setdefault(max(few, few + 8 * round((share * cable_s - float(took[0])) / each_s / 8)), name)
    return {name: rows for rows, name in sized.items()}


def in_time(until: float) -> bool:
    """Whether rank 0 says that something may begin; all begin at once."""
    left = torch.tensor([until - time.time()], dtype=torch.float64)
    dist.broadcast(left, 0)
    return float(left) > 0


def work(job: Job, port: int, result: Path) -> None:
    """One of the processes: every way in turn, a line for each."""
    rank = int(os.environ["RANK"])
    cores = cores_of(rank // job.per_host, job.hosts)[: job.cores or None]
    os.sched_setaffinity(0, cores)
    threads = max(1, len(cores) // job.per_host)
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", f"tcp://{SUBNET}1:{port}", rank=rank, world_size=job.world)
    sized = sized_rows(job)
    for _ in range(job.rounds):
        for bound, rows in sized.items():
            for way in (ALONE, PEER, *job.ways):
                if not in_time(job.until):
                    return
                meter = Meter()
                if way in (ALONE, PEER):
                    wrap = DistributedDataParallel if way == PEER else nn.Identity()
                    took = train_plainly(rows, job.steps, meter, wrap)
                else:
                    took = train_ours(way, rows, job, meter)
                if rank == job.world - 1:  # a worker in this process under every way
                    line = {"bound": bound, "rows": rows, "way": way, "threads": threads, "cores": len(cores)}
                    line |= {"step_s": statistics.median(took), "sent": meter.bytes_per_step(job.steps)}
                    line["outside_s"] = statistics.median(meter.outside_s[WARM:] or [0.0])
                    with result.open("a") as lines:
                        lines.write(json.dumps(line) + "\n")
    dist.destroy_process_group()


def the_hosts(job: Job) -> AbstractContextManager[list[str]]:
    """The namespaces that stand for hosts, by name."""
    few = job.rate in ("1", "loopback")
    bucket = ["burst", "256kb" if few else "512kb", "latency", "100ms"]
    if job.hosts == 2:
        return two_namespaces(SUBNET, job.shape, bucket)
    return switched_hosts(job.hosts, SUBNET, job.shape, bucket)


def measured(job: Job, port: int) -> Iterator[dict[str, Any]]:
    """The cells of a job, as far as there was time."""
    num_bytes = sum(parameter.nbytes for parameter in build().parameters())
    with the_hosts(job) as names, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "lines"
        own = [sys.executable, sys.argv[0], "--work", json.dumps(asdict(job)), str(port + 1), str(result)]
        commands = [[*inside(names[rank // job.per_host]), *own] for rank in range(job.world)]
        environments = [places(SUBNET, port, rank, job.world) for rank in range(job.world)]
        try:
            run_ranks(commands, environments, max(START_S, job.until - time.time()) + START_S)
        except SystemExit as error:
            print(f"{job.name}: {error}", flush=True)
        text = result.read_text() if result.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    for bound in dict.fromkeys(line["bound"] for line in lines):
        found = [line for line in lines if line["bound"] == bound]
        step_s: dict[str, list[float]] = {}
        for line in found:
            step_s.setdefault(line["way"], []).append(line["step_s"])
        if set(step_s) == {ALONE, PEER, *job.ways}:
            yield cell(job, found, step_s, num_bytes)


def cell(
    job: Job, lines: list[dict[str, Any]], step_s: dict[str, list[float]], num_bytes: int
) -> dict[str, Any]:
    median = {way: statistics.median(times) for way, times in step_s.items()}
    shaped = job.shape is not None
    outside_s = statistics.median(line["outside_s"] for line in lines if line["way"] == ALONE)
    framed_s = job.cable_s(num_bytes) * FRAMES
    bound_s = max(median[ALONE], job.cable_s(num_bytes)) if shaped else median[ALONE]
    return {
        "hosts": job.hosts,
        "per_host": job.per_host,
        "rate": job.rate,
        "bound": lines[0]["bound"],
        "rows": lines[0]["rows"],
        "threads": lines[0]["threads"],
        "cores_per_host": lines[0]["cores"],
        "gradient_bytes": num_bytes,
        "cable_s": job.cable_s(num_bytes) if shaped else None,
        # Nothing leaves before backward, nor does the optimizer step before all is there; and the last layer's bytes
        # leave when backward ends.
        "in_order_s": max(median[ALONE] + framed_s / LAYERS, outside_s + framed_s) if shaped else None,
        "over_bound": median[job.ways[0]] / bound_s,
        "peer_over_ours": median[PEER] / median[job.ways[0]],
        "ways": [
            {
                "way": way,
                "step_s": median[way],
                "sent_bytes": statistics.median(line["sent"] for line in lines if line["way"] == way),
                "formula_bytes": job.formula_bytes(way, num_bytes),
                "step_s_rounds": step_s[way],
            }
            for way in median
        ],
    }


def show(row: dict[str, Any]) -> None:
    cable = f"{row['cable_s'] * 1e3:6.1f} ms" if row["cable_s"] else "     –   "
    print(
        f"{row['hosts']}x{row['per_host']} {row['rate']:>8s} {row['bound']:13s} {row['rows']:5d} rows, cable {cable}, "
        f"in order {1e3 * (row['in_order_s'] or 0):6.1f} ms, "
        f"ours ÷ bound {row['over_bound']:5.2f}, DDP ÷ ours {row['peer_over_ours']:5.2f}"
    )
    for one in row["ways"]:
        by = f"{one['formula_bytes'] / 1e6:8.2f}" if one["formula_bytes"] else "       –"
        print(
            f"    {one['way']:36s} {one['step_s'] * 1e3:8.1f} ms  {one['sent_bytes'] / 1e6:8.2f} MB sent {by}"
        )
    sys.stdout.flush()


def main() -> None:
    """Measure the cells, print them and keep them; the slowest cables last, with the time that the others left."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--hosts-workers", default="2x1,2x2,4x1", help="hosts x workers of each")
    reader.add_argument("--rates", default="1,10,25,loopback", help="in Gbit/s, or loopback: not shaped")
    reader.add_argument("--rows", default="", help="a worker's, instead of those by what a step is bound by")
    reader.add_argument(
        "--ways", default=OURS, help="strategies, separated by ; the first is compared, and `one link a pair`"
    )
    reader.add_argument("--rounds", type=int, default=2)
    reader.add_argument(
        "--cores", type=int, default=0, help="of each host; by default all that there are for it"
    )
    reader.add_argument("--minutes", type=float, default=8.0, help="nothing begins after that")
    reader.add_argument("--json", type=Path, default=RESULT)
    reader.add_argument("--work", nargs=3, metavar=("JOB", "PORT", "FILE"), help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.work:
        work(Job(**json.loads(asked.work[0])), int(asked.work[1]), Path(asked.work[2]))
        return
    end = time.time() + 60 * asked.minutes
    rows = tuple(map(int, filter(None, asked.rows.split(","))))
    ways = tuple(way.strip() for way in asked.ways.split(";"))
    jobs = [
        Job(*map(int, shape.split("x")), rate, rows, ways, asked.rounds, asked.cores, end)
        for rate in reversed(asked.rates.split(","))
        for shape in asked.hosts_workers.split(",")
    ]
    cells: list[dict[str, Any]] = []
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    result |= {"torch": torch.__version__, "rounds": asked.rounds, "load_before": os.getloadavg()[0]}
    if why := why_no_namespaces():
        print(f"nothing can be measured here: {why}")
        asked.json.write_text(json.dumps({**result, "refused": why, "cells": []}) + "\n")
        return
    for number, job in enumerate(jobs):
        left = max(0.0, end - time.time() - START_S)
        limited = replace(job, until=time.time() + START_S + left / (len(jobs) - number))
        try:
            for row in measured(limited, 29500 + 8 * number):
                cells.append(row)
                show(row)
        except OSError as error:  # of the kernel, which was asked for hosts
            print(f"{job.name}: {error}", flush=True)
        asked.json.write_text(json.dumps({**result, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
