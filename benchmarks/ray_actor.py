"""`ps` beside a Ray actor, over a slow cable: `python benchmarks/ray_actor.py [--rate 1gbit] [--rounds 3]`; needs root.

The parameters are on one host, the workers on another: network namespaces, with the cable of `places/external.py`
between them. In both the same perceptron is trained in plain text, in synchronous steps (each worker has its share of
a batch) and asynchronous ones (each batch is one worker's). The Ray actor is written as well as we can: gradients and
parameters are one flat numpy array each, a call pushes the one and pulls the other, and parameters that all workers
are to have are put into Ray's store once, which then crosses the cable once for all workers of a host. With several
servers or actors each has a part of both, so that some parameters are pulled while gradients of others are still
pushed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import manyhands as mh
from cables import inside, on_the_cable, places, run_ranks, two_namespaces
from hosts import RATE, SUBNET, build, data, perceptron

RESULT = Path(__file__).parent / "results" / "ray-actor.json"
WORKERS, BATCH, STEPS, WARM = 2, 32, 40, 8
PORT = 6421
DEADLINE_S = 600.0
OWN_CLUSTER = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this run alone
    "RAY_raylet_start_wait_time_s": "240",  # a busy machine is no reason to fail
}
SHARDS = 4
WAYS = {
    "ps sync": "ps",
    "ray actor sync": "",
    "ps sync, sharded": f"ps servers={SHARDS}",
    "ray actor sync, sharded": "",
    "ps async": "ps consistency=async",
    "ray actor async": "",
    "ps async, sharded": f"ps consistency=async servers={SHARDS}",
    "ray actor async, sharded": "",
}


def exchanges(way: str) -> int:
    """How many gradients a step is made of."""
    return 1 if "async" in way else WORKERS


def servers(way: str) -> int:
    """How many servers or actors hold the parameters."""
    return SHARDS if "sharded" in way else 1


def formula_bytes(way: str, num_bytes: float) -> tuple[float, float]:
    """What the workers' host sends and receives in a step: each gradient, and parameters for each.

    In synchronous steps `ps` sends one sum, and both fetch once what all workers read.
    """
    pushed = 1 if way.startswith("ps sync") else exchanges(way)
    pulled = 1 if way.startswith(("ps sync", "ray actor sync")) else exchanges(way)
    return pushed * num_bytes, pulled * num_bytes


class CableMeter:
    """Reads the cable before each gradient: when, and what this host has sent and received by then."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, int, int]] = []

    def read(self) -> None:
        self.readings.append((time.monotonic(), *on_the_cable()))


def per_step(readings: list[tuple[float, int, int]], way: str) -> dict[str, float]:
    """Seconds and bytes of a step, from the readings of all workers, by the clock that they share."""
    window = sorted(readings)[WARM * exchanges(way) :]
    steps = (len(window) - 1) / exchanges(way)
    spent = [(late - early) / steps for early, late in zip(window[0], window[-1], strict=True)]
    return dict(zip(("step_s", "sent", "received"), spent, strict=True))


# ── ours ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def take_part(strategy: str, result: Path) -> None:
    """One of the processes of a run on `ps`: the first ranks are on the servers' host, the others on the workers'."""
    torch.set_num_threads(1)
    meter = CableMeter()
    mh.fit(
        perceptron(meter.read, BATCH),
        strategy,
        steps=STEPS,
        options=mh.Options(insecure=True, progress="none"),
    )
    result.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(meter.readings))


def measure_ours(way: str, names: list[str], port: int) -> dict[str, float]:
    strategy = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measured"
        own, first = [sys.executable, __file__, "--part", strategy, str(result)], servers(way)
        world = first + WORKERS
        commands = [[*inside(names[int(rank >= first)]), *own] for rank in range(world)]
        run_ranks(commands, [places(SUBNET, port, rank, world) for rank in range(world)], DEADLINE_S)
        report = [
            json.loads(result.with_suffix(f".{first + worker}").read_text()) for worker in range(WORKERS)
        ]
    return per_step([tuple(one) for readings in report for one in readings], way)


# ── the peer ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class SyncServer:
    """Holds the parameters; a call pushes a gradient and is answered when every worker's has come."""

    def __init__(self, parameters: np.ndarray) -> None:
        self._parameters = parameters.copy()
        self._sum = np.zeros_like(parameters)
        self._came = 0
        self._next: asyncio.Future[Any] | None = None

    async def exchange(self, gradient: np.ndarray) -> list[Any]:
        """A reference to the parameters after the step, the same one for all."""
        import ray

        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        stepped = self._next
        self._sum += gradient
        self._came += 1
        if self._came == WORKERS:
            self._sum *= RATE / WORKERS
            self._parameters -= self._sum
            self._sum[:] = 0
            self._came, self._next = 0, None
            stepped.set_result([ray.put(self._parameters)])
        reference: list[Any] = await stepped
        return reference


class AsyncServer:
    """Holds the parameters; a call pushes a gradient, which is applied at once, and pulls them."""

    def __init__(self, parameters: np.ndarray) -> None:
        self._parameters = parameters.copy()
        self._scaled = np.empty_like(parameters)

    def exchange(self, gradient: np.ndarray) -> np.ndarray:
        """The parameters after this gradient."""
        np.multiply(gradient, RATE, out=self._scaled)
        self._parameters -= self._scaled
        return self._parameters


class ActorWorker:
    """Computes gradients: of its share of every batch, or of every batch that is its own."""

    def train(self, rank: int, actors: list[Any], way: str) -> list[tuple[float, int, int]]:
        """The readings of the cable."""
        import ray

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = build()
        values, gradients = flat(model)
        x, y = data(BATCH)
        share = BATCH // exchanges(way)
        meter = CableMeter()
        pushed = np.array_split(gradients.numpy(), len(actors))
        pulled = np.array_split(values.numpy(), len(actors))
        for step in range(STEPS * exchanges(way) // WORKERS):
            first = (step * BATCH + rank * share) % (len(x) - share)
            gradients.zero_()
            meter.read()
            (model(x[first : first + share]) - y[first : first + share]).square().mean().backward()
            calls = [one.exchange.remote(ray.put(part)) for one, part in zip(actors, pushed, strict=True)]
            for call, part in zip(calls, pulled, strict=True):
                answer = ray.get(call)
                np.copyto(part, ray.get(answer[0]) if isinstance(answer, list) else answer)
        return meter.readings


def flat(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """All parameters and all gradients of a model as one tensor each, of which the model's own are views."""
    parameters = list(model.parameters())
    values = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradients = torch.zeros_like(values)
    begin = 0
    for parameter in parameters:
        end = begin + parameter.numel()
        parameter.data = values[begin:end].view_as(parameter)
        parameter.grad = gradients[begin:end].view_as(parameter)
        begin = end
    return values, gradients


def lead_actors(way: str, address: str, result: Path) -> None:
    """The driver, on the server's host: the actor beside it, the workers on the other one."""
    import ray

    ray.init(address=address, _node_ip_address=f"{SUBNET}1", logging_level="ERROR", log_to_driver=False)
    torch.manual_seed(0)
    values, _ = flat(build())
    kind = SyncServer if way.startswith("ray actor sync") else AsyncServer
    actors = [
        ray.remote(kind).options(resources={"server": 1}, num_cpus=0).remote(part)
        for part in np.array_split(values.numpy(), servers(way))
    ]
    workers = [
        ray.remote(ActorWorker).options(resources={"worker": 1}, num_cpus=1).remote() for _ in range(WORKERS)
    ]
    trained = [worker.train.remote(rank, actors, way) for rank, worker in enumerate(workers)]
    report = ray.get(trained, timeout=DEADLINE_S)
    result.write_text(json.dumps(per_step([one for readings in report for one in readings], way)))
    ray.shutdown()


@contextmanager
def ray_node(name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Ray node on a host, until the end of the block."""
    start = ["start", "--block", "--disable-usage-stats", "--num-cpus", str(WORKERS), *arguments]
    program = [sys.executable, "-m", "ray.scripts.scripts", *start]
    paths = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    environment = {**os.environ, **OWN_CLUSTER, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*inside(name), *program], env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def measure_actor(way: str, names: list[str], port: int) -> dict[str, float]:
    address = f"{SUBNET}1:{port}"
    head = ["--head", "--port", str(port), "--include-dashboard", "false"]
    head += ["--resources", json.dumps({"server": SHARDS})]
    other = ["--address", address, "--resources", json.dumps({"worker": WORKERS})]
    with (
        tempfile.TemporaryDirectory() as folder,
        ray_node(names[0], "--node-ip-address", f"{SUBNET}1", *head) as first,
    ):
        await_port(names[0], port, first)
        with ray_node(names[1], "--node-ip-address", f"{SUBNET}2", *other):
            result = Path(folder) / "measured"
            command = [*inside(names[0]), sys.executable, __file__, "--lead", way, address, str(result)]
            subprocess.run(command, check=True, timeout=DEADLINE_S, env={**os.environ, **OWN_CLUSTER})
            measured: dict[str, float] = json.loads(result.read_text())
    return measured


def await_port(name: str, port: int, process: subprocess.Popen[bytes]) -> None:
    """Until somebody listens there."""
    look = f"import socket; socket.create_connection(('{SUBNET}1', {port}), 1).close()"
    deadline = time.monotonic() + 120
    while subprocess.run([*inside(name), sys.executable, "-c", look], stderr=subprocess.DEVNULL).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the head of Ray does not listen on port {port}")


# ── both ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_all(rate: str, rounds: int) -> dict[str, Any]:
    import ray

    load = os.getloadavg()[0]
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with two_namespaces(SUBNET, rate, ["burst", "256kb", "latency", "100ms"]) as names:
        for number in range(rounds):
            for index, (way, strategy) in enumerate(WAYS.items()):
                port = PORT + number * len(WAYS) + index
                one = (measure_ours if strategy else measure_actor)(way, names, port)
                measured[way].append(one)
                print(f"round {number + 1}: {way:16s} {one['step_s'] * 1e3:7.1f} ms", flush=True)
    num_bytes = sum(parameter.nbytes for parameter in build().parameters())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "rate": rate,
        "workers": WORKERS,
        "batch": BATCH,
        "gradient_bytes": num_bytes,
        "steps": STEPS - WARM,
        "rounds": rounds,
        "ways": [
            {
                "way": way,
                "strategy": WAYS[way],
                "step_s": statistics.median(one["step_s"] for one in ones),
                "sent_bytes": statistics.median(one["sent"] for one in ones),
                "received_bytes": statistics.median(one["received"] for one in ones),
                "formula_bytes": formula_bytes(way, num_bytes),
                "step_s_rounds": [one["step_s"] for one in ones],
            }
            for way, ones in measured.items()
        ],
    }


def main() -> None:
    """Measure every way in turn, print a table and keep it."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--json", type=Path, default=RESULT)
    reader.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    reader.add_argument("--lead", nargs=3, help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.part:
        take_part(asked.part[0], Path(asked.part[1]))
        return
    if asked.lead:
        lead_actors(asked.lead[0], asked.lead[1], Path(asked.lead[2]))
        return
    result = measure_all(asked.rate, asked.rounds)
    asked.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{'':16s} {'a step':>10s} {'MB sent':>9s} {'by formula':>11s} {'received':>9s} {'by formula':>11s}"
    )
    for row in result["ways"]:
        sent, received = row["formula_bytes"]
        print(
            f"{row['way']:16s} {row['step_s'] * 1e3:7.1f} ms {row['sent_bytes'] / 1e6:9.2f} {sent / 1e6:11.2f} "
            f"{row['received_bytes'] / 1e6:9.2f} {received / 1e6:11.2f}"
        )


if __name__ == "__main__":
    main()
