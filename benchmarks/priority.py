"""What `order=priority` gains: `python benchmarks/priority.py [--rate 1gbit] [--rounds 5]`; the live part needs root.

(a) In the simulator, over bandwidths, beside the bound 1 + t_f / (t_f + t_b) over a good overlap.
(b) Live: two network namespaces stand for hosts, one process on each, and a token bucket at each end of the cable for
    its speed. The same perceptron is trained by order=arrival with the usual buckets and smaller ones, order=priority
    with the usual credit and a larger one, and torch's DDP over Gloo with the smaller buckets in turn; all but
    order=priority overlap the exchange with backward alone. Forward and backward are timed alone,
    in both processes at once: from them follow the bound, and what the simulator expects.
(c) How many pushes queue up at a server, when all workers begin at the same shard and when they are staggered.
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
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from cables import inside, places, run_ranks
from hosts import ADDRESS, two_hosts
from manyhands.strategies.allreduce.priority.overlap_model import (
    ORDERS,
    LayeredStep,
    gain_bound,
    step_seconds,
)
from manyhands.strategies.ps.client_core import round_of_shards
from push_bursts import push_at_once

RESULT = Path(__file__).parent / "results" / "priority.json"
WIDTH, LAYERS, STEPS, WARM, WORLD = 1024, 8, 16, 4, 2
LIMIT_S = 300.0
GBIT = (0.1, 0.25, 0.5, 1.0, 1.3, 2.0, 4.0, 10.0)
WAYS = {
    "arrival": "allreduce algorithm=ring",
    "arrival, 4 MiB": "allreduce algorithm=ring buckets=4MiB",
    "priority": "allreduce algorithm=ring order=priority",
    "priority, 4 MiB": "allreduce algorithm=ring order=priority credit=4MiB",
    "ddp gloo": "",
}


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def data(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4 * batch, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, 1)


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def layered(forward_s: float, backward_s: float, num_bytes: int, gbit: float, workers: int) -> LayeredStep:
    """Equal layers, on a link of which an all-reduce gets workers / (2 (workers - 1))."""
    bytes_per_s = gbit * 1e9 / 8 * workers / (2 * (workers - 1))
    return LayeredStep(
        forward_s=[forward_s / LAYERS] * LAYERS,
        backward_s=[backward_s / LAYERS] * LAYERS,
        num_bytes=[num_bytes // LAYERS] * LAYERS,
        bytes_per_s=bytes_per_s,
    )


def simulated(forward_s: float, backward_s: float, num_bytes: int, workers: int) -> list[dict[str, float]]:
    rows = []
    for gbit in GBIT:
        step = layered(forward_s, backward_s, num_bytes, gbit, workers)
        took = {f"{order}_s": step_seconds(step, order) for order in ORDERS}
        gain = took["overlapped_s"] / took["priority_s"]
        rows.append(
            {"gbit": gbit, "exchange_s": step.exchange_s, **took, "gain": gain, "bound": gain_bound(step)}
        )
    return rows


def bursts() -> list[dict[str, int]]:
    rows = []
    for workers, shards in ((4, 2), (4, 4), (8, 4), (16, 4), (16, 16)):
        met = push_at_once(workers, shards, lambda _worker, shards: range(shards))
        staggered = push_at_once(workers, shards, round_of_shards)
        row = {"workers": workers, "shards": shards, "queue": met.longest_queue, "messages": met.messages}
        rows.append(
            {**row, "staggered_queue": staggered.longest_queue, "staggered_messages": staggered.messages}
        )
    return rows


def alone(batch: int) -> tuple[float, float]:
    """Seconds of a forward and of a backward of this worker's share."""
    model, (x, y) = build(), data(batch)
    share = batch // WORLD
    took = []
    for _ in range(8):
        begin = time.perf_counter()
        loss = mean_square(model, (x[:share], y[:share]))
        middle = time.perf_counter()
        loss.backward()
        took.append((middle - begin, time.perf_counter() - middle))
        model.zero_grad()
    return statistics.median(one for one, _ in took[2:]), statistics.median(one for _, one in took[2:])


def train_ours(strategy: str, batch: int) -> list[float]:
    task = mh.Task(
        model=build,
        loss=mean_square,
        data=data(batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch_size=batch,
    )
    options = mh.Options(insecure=True, progress="none", check_every=0)
    run = mh.fit(task, strategy, steps=STEPS, options=options)
    at = [row["at_s"] for row in run.history.steps]
    return [late - early for early, late in pairwise(at)][WARM - 1 :]


def train_ddp(batch: int) -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(build(), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = data(batch)
    share, took = batch // WORLD, []
    for step in range(STEPS):
        begin = time.perf_counter()
        first = (step * batch + dist.get_rank() * share) % (len(x) - share)
        optimizer.zero_grad()
        mean_square(model, (x[first : first + share], y[first : first + share])).backward()
        optimizer.step()
        took.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return took[WARM:]


def take_cores_of_one_host() -> None:
    """The hosts are one machine: without cores of its own, each would compute with threads for all of them."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[int(os.environ["RANK"]) :: WORLD] or cores)


def work(way: str, batch: int, result: Path) -> None:
    """One of the processes; rank 0 writes down what it saw."""
    take_cores_of_one_host()
    torch.set_num_threads(1)
    forward_s, backward_s = alone(batch)
    took = train_ours(WAYS[way], batch) if WAYS[way] else train_ddp(batch)
    measured = {"step_s": statistics.median(took), "forward_s": forward_s, "backward_s": backward_s}
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps(measured))


def measure(way: str, batch: int, names: list[str], port: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "took"
        own = [sys.executable, __file__, "--work", way, str(batch), str(result)]
        environments = [places(ADDRESS, port, rank, WORLD) for rank in range(WORLD)]
        run_ranks([[*inside(name), *own] for name in names], environments, LIMIT_S)
        measured: dict[str, float] = json.loads(result.read_text())
    return measured


def live(rate: str, rounds: int, batch: int) -> dict[str, Any]:
    num_bytes = sum(parameter.nbytes for parameter in build().parameters())
    taken: dict[str, list[Mapping[str, float]]] = {way: [] for way in WAYS}
    with two_hosts(rate) as names:
        for number in range(rounds):
            for index, way in enumerate(WAYS):
                taken[way].append(measure(way, batch, names, 29600 + number * len(WAYS) + index))
    every = [one for measured in taken.values() for one in measured]
    forward_s = statistics.median(one["forward_s"] for one in every)
    backward_s = statistics.median(one["backward_s"] for one in every)
    gbit = (
        float(rate.removesuffix("gbit")) if rate.endswith("gbit") else float(rate.removesuffix("mbit")) / 1000
    )
    model = layered(forward_s, backward_s, num_bytes, gbit, WORLD)
    took = {way: statistics.median(one["step_s"] for one in measured) for way, measured in taken.items()}
    return {
        "rate": rate,
        "workers": WORLD,
        "batch": batch,
        "gradient_bytes": num_bytes,
        "rounds": rounds,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "bound": gain_bound(model),
        "step_s": took,
        "step_s_rounds": {way: [one["step_s"] for one in measured] for way, measured in taken.items()},
        "gain_over_arrival": took["arrival"] / took["priority"],
        "gain_over_ddp": took["ddp gloo"] / took["priority"],
        "simulated_s": {order: step_seconds(model, order) for order in ORDERS},
    }


def show(result: Mapping[str, Any]) -> None:
    print(f"{'Gbit/s':>7} {'T_c':>8} {'after':>8} {'overlap':>8} {'priority':>8} {'gain':>6} {'bound':>6}")
    for row in result["simulated"]:
        times = "".join(f" {row[f'{name}_s'] * 1e3:8.0f}" for name in ("exchange", *ORDERS))
        print(f"{row['gbit']:7.2f}{times} {row['gain']:6.2f} {row['bound']:6.2f}")
    for row in result["bursts"]:
        print(
            f"{row['workers']} workers, {row['shards']} shards: queue {row['queue']} → {row['staggered_queue']}, "
            f"{row['messages']} → {row['staggered_messages']} messages' times"
        )
    if (found := result["live"]) is not None:
        steps = ", ".join(f"{way} {seconds * 1e3:.0f} ms" for way, seconds in found["step_s"].items())
        print(f"live at {found['rate']}: forward {found['forward_s'] * 1e3:.0f} ms, backward ", end="")
        print(f"{found['backward_s'] * 1e3:.0f} ms; a step by {steps}")
        print(
            f"gain over arrival {found['gain_over_arrival']:.2f}, over overlapped DDP {found['gain_over_ddp']:.2f}, "
            f"bound over a perfect overlap {found['bound']:.2f}"
        )


def main() -> None:
    """Simulate, measure, print tables and keep them."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", type=int, default=5, help="0: no live part")
    reader.add_argument("--batch", type=int, default=512)
    reader.add_argument("--json", type=Path, default=RESULT)
    reader.add_argument("--work", nargs=3, metavar=("WAY", "BATCH", "FILE"), help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.work:
        work(asked.work[0], int(asked.work[1]), Path(asked.work[2]))
        return
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "layers": LAYERS,
        "simulated_model": {"forward_s": 0.1, "backward_s": 0.2, "gradient_bytes": 32 << 20, "workers": 4},
        "simulated": simulated(0.1, 0.2, 32 << 20, 4),
        "bursts": bursts(),
        "live": live(asked.rate, asked.rounds, asked.batch) if asked.rounds else None,
    }
    show(result)
    asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
