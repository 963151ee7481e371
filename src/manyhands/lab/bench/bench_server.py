"""Push and pull of a parameter server: ours over shared memory and TCP, a Ray actor, and torch.distributed.rpc.

One process (`python -m manyhands.lab.bench.bench_server PLAN`) is the worker of all servers, one after the other in
small blocks, so that a busy minute of the machine hits all of them. Only torch's rpc comes by itself, at the end: its
threads poll without rest, which on two cores doubles the time of everybody else. Ours serves three times: as `sync`,
the default, where a worker reads the parameters in the server's memory; as `async`, which copies; over TCP. A round
trip begins with a gradient where backward has left it and ends when the parameters that it led to are here; the
server's optimizer step lies in between. Ours is the real thing: the server process of a training, with the protocol
that makes every update count exactly once. What each contender gives back is compared with numpy's, before and after.
The memory of a server is that which the kernel has of it after every worker has pushed and pulled: of one with a large
model, less of one with next to none. Private memory is the server's own (parameters, optimizer state, per worker a
gradient or two); shared memory is the workers', which it maps to read and write in place.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.errors import ManyhandsError, UserError, check_count, format_bytes
from manyhands.lab.bench import harness
from manyhands.lab.bench.server_ours import OurServer, WorkerEnd
from manyhands.lab.bench.server_peers import RAY, RayPeer, RpcPeer, ray_running, rpc_running
from manyhands.lab.bench.server_work import Flat, RowWork, TimedExchange
from manyhands.strategies.common.consistency import Async
from manyhands.strategies.ps.strategy import Ps

DEFAULT_EXCHANGES: tuple[TimedExchange, ...] = (
    Flat(name="dense", num_bytes=64 << 20),
    RowWork(name="rows", table_rows=100_000, width=64, rows=1000),
    Flat(name="small", num_bytes=1 << 10),
)
DEFAULT_ROUNDS = 15
MEMORY_BYTES = 64 << 20
HAS_RAY = importlib.util.find_spec("ray") is not None
_NO_RAY = "ray is not installed, so it is left out: pip install 'manyhands[ray]'"
_BLOCK_BYTES = 4 << 20  # a block has as many round trips as move this much, within limits
_MOST_IN_BLOCK = 20
_COLUMNS = (34, 12, 24, 12, 10)
ServerContender = WorkerEnd | RayPeer | RpcPeer  # one server, with the measuring process as its worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan(harness.WorkerPlan):
    """What the measuring process does."""

    exchanges: Sequence[str]  # as JSON each
    rounds: int
    blocks: Sequence[int]  # measured round trips of each contender in a round, per exchange
    with_ray: bool
    memory_bytes: int  # the size of the model whose server's memory is measured; 0: none
    folder: str


def run_bench(
    exchanges: Sequence[TimedExchange] = DEFAULT_EXCHANGES,
    rounds: int = DEFAULT_ROUNDS,
    memory_bytes: int = MEMORY_BYTES,
    timeout_s: float = 900.0,
) -> dict[str, Any]:
    """Measure, and return a dictionary ready for JSON; raises if anything fails or `timeout_s` passes.

    Each contender has `rounds` blocks of every exchange: one round trip where it is large, up to 20 where it is small.
    `memory_bytes` is the size of the model whose server's memory is measured; 0 leaves that out.
    """
    check_count("rounds", rounds)
    if memory_bytes < 0:
        raise UserError(f"memory_bytes={memory_bytes}: must not be negative")
    blocks = tuple(min(max(_BLOCK_BYTES // one.gradient_bytes, 1), _MOST_IN_BLOCK) for one in exchanges)
    facts = {"benchmark": "server", "dtype": "float32", **harness.host_facts()}
    with (
        tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder,
        harness.Workers("manyhands.lab.bench.bench_server") as processes,
    ):
        plan = ServerPlan(
            exchanges=[harness.to_text(one) for one in exchanges],
            rounds=rounds,
            blocks=blocks,
            with_ray=HAS_RAY,
            memory_bytes=memory_bytes,
            folder=folder,
            timeout_s=timeout_s,
        )
        processes.start(plan)
        (measured,) = processes.results(timeout_s)
    return {
        **facts,
        "ray": version("ray") if HAS_RAY else None,
        "results": [
            {
                "exchange": one.name,
                "about": one.about,
                "gradient_bytes": one.gradient_bytes,
                "round_trips": rounds * block,
                "contenders": _summaries(seconds, one.gradient_bytes),
            }
            for one, block, seconds in zip(exchanges, blocks, measured["seconds"], strict=True)
        ],
        "memory": measured["memory"],
    }


def format_table(result: dict[str, Any]) -> str:
    lines = [f"push and pull of a parameter server, one worker, on {result['cores']} cores"]
    if result["ray"] is None:
        lines.append(_NO_RAY)
    for row in result["results"]:
        head = (
            f"{row['exchange']}: {format_bytes(row['gradient_bytes'])}",
            "median",
            "10th to 90th",
            "per s",
            "to Ray",
        )
        lines += ["", f"{row['about']}", _line(head)]
        for name, cell in row["contenders"].items():
            spread = f"{harness.time_text(cell['p10_us'])} to {harness.time_text(cell['p90_us'])}"
            ratio = harness.ratio_text(cell["times_ray"]) if "times_ray" in cell else ""
            rate = f"{cell['round_trips_per_s']:.0f}"
            lines.append(_line((name, harness.time_text(cell["median_us"]), spread, rate, ratio)))
    if result["memory"]:
        lines += ["", "memory of a server with Adam, beyond one with an empty model"]
    for row in result["memory"]:
        known = row["parameters_bytes"] + row["state_bytes"]
        lines.append(
            f"{row['link']}, {row['workers']} workers: {format_bytes(row['private_bytes'])} of its own, "
            f"{format_bytes(known)} of them parameters and optimizer state, "
            f"{format_bytes(max(round(row['private_per_worker_bytes']), 0))} more for each worker; "
            f"{format_bytes(max(row['shared_bytes'], 0))} of the workers' memory mapped"
        )
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    (first, *others), (width, *widths) = cells, _COLUMNS
    return f"{first:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(others, widths, strict=True))


def _summaries(seconds: dict[str, list[float]], gradient_bytes: int) -> dict[str, dict[str, float]]:
    ray = float(np.median(seconds[RAY])) if RAY in seconds else None
    summaries = {}
    for name, times in seconds.items():
        median = float(np.median(times))
        summaries[name] = {
            **harness.percentiles(1e6 * np.array(times), "us"),
            "round_trips_per_s": 1 / median,
            "moved_bytes_per_s": 2 * gradient_bytes / median,
            **({} if ray is None else {"times_ray": ray / median}),
        }
    return summaries


class BenchExchanges:
    """One contender's exchanges, counted, timed and checked."""

    def __init__(self, exchange: TimedExchange, contender: ServerContender) -> None:
        self._exchange = exchange
        self._contender = contender
        self._steps = 0
        self._pushed = [exchange.pushed(step) for step in range(exchange.period)]
        self.seconds: list[float] = []

    def run(self) -> float:
        self._steps += 1
        self._contender.give(self._pushed[self._steps % len(self._pushed)])
        began = time.perf_counter()
        self._contender.exchange()
        return time.perf_counter() - began

    def check(self) -> None:
        if not self._exchange.agrees(self._contender.pulled, self._steps):
            raise ManyhandsError(
                f"{self._contender.name} gave wrong parameters in step {self._steps} of {self._exchange.name}"
            )


def measure(
    exchange: TimedExchange, contenders: Sequence[ServerContender], rounds: int, block: int
) -> dict[str, list[float]]:
    made = {contender.name: BenchExchanges(exchange, contender) for contender in contenders}
    for one in made.values():
        for _ in range(harness.WARM_UP):
            one.run()
            one.check()
    for one in harness.interleaved(list(made.values()), rounds):
        one.run()  # brings its memory back into the caches
        one.seconds += [one.run() for _ in range(block)]
    for one in made.values():
        one.check()
    return {name: one.seconds for name, one in made.items()}


OURS = (Ps(), Ps(consistency=Async()), Ps(link="tcp"))
"""How our own server runs: the default, the one that copies, and over TCP."""


Contenders = Callable[[TimedExchange, ExitStack], Iterator[ServerContender]]
"""All of an exchange, each closed with the stack."""


def _ours_and_ray(plan: ServerPlan, exchange: TimedExchange, stack: ExitStack) -> Iterator[ServerContender]:
    for strategy in OURS:
        yield stack.enter_context(OurServer(exchange.task(), strategy, 1, plan.timeout_s)).add_worker()
    for in_place in (False, True) if plan.with_ray else ():
        yield stack.enter_context(closing(RayPeer(exchange, in_place=in_place)))


def _measure_all(plan: ServerPlan, contenders: Contenders) -> list[dict[str, list[float]]]:
    seconds = []
    for text, block in zip(plan.exchanges, plan.blocks, strict=True):
        exchange = harness.from_text(text, Flat, RowWork)
        with ExitStack() as stack:
            seconds.append(measure(exchange, list(contenders(exchange, stack)), plan.rounds, block))
    return seconds


WORKERS = (2, 4)
_EXCHANGES = 3
_LEAST_BYTES = 1024
_STATE_TENSORS = 2  # of Adam, each as large as the parameters


def measure_memory(num_bytes: int, timeout_s: float) -> list[dict[str, Any]]:
    """One row for each link and number of workers, in bytes."""
    rows = []
    small = _resident(_LEAST_BYTES, "shared", timeout_s)
    for link in ("shared", "tcp"):
        large = _resident(num_bytes, link, timeout_s)
        first, last = WORKERS[0], WORKERS[-1]
        per_worker = (large[last][0] - large[first][0]) / (last - first)
        for workers in WORKERS:
            private, shared = (
                after - before for after, before in zip(large[workers], small[workers], strict=True)
            )
            rows.append(
                {
                    "link": link,
                    "workers": workers,
                    "parameters_bytes": num_bytes,
                    "state_bytes": _STATE_TENSORS * num_bytes,
                    "private_bytes": private,
                    "shared_bytes": shared,
                    "private_per_worker_bytes": per_worker,
                }
            )
    return rows


def _resident(num_bytes: int, link: str, timeout_s: float) -> dict[int, tuple[int, int]]:
    flat = Flat(name="memory", num_bytes=num_bytes)
    task = replace(flat.task(), optimizer=partial(torch.optim.Adam, lr=flat.rate))
    resident = {}
    with OurServer(task, Ps(consistency=Async(), link=link), max(WORKERS), timeout_s) as server:
        for workers in WORKERS:
            while len(server.ends) < workers:
                server.add_worker()
            for end in server.ends * _EXCHANGES:
                end.exchange()
            lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            private, shared = (1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
            resident[workers] = private, shared
    return resident


def main(plan: ServerPlan) -> None:
    torch.set_num_threads(1)
    with ray_running() if plan.with_ray else nullcontext():
        seconds = _measure_all(plan, partial(_ours_and_ray, plan))
    memory = measure_memory(plan.memory_bytes, plan.timeout_s) if plan.memory_bytes else []
    with rpc_running(plan.folder, plan.timeout_s):
        by_rpc = _measure_all(plan, lambda one, stack: iter([stack.enter_context(closing(RpcPeer(one)))]))
    both = [{**one, **other} for one, other in zip(seconds, by_rpc, strict=True)]
    print(json.dumps({"seconds": both, "memory": memory}))


if __name__ == "__main__":
    harness.be_worker(ServerPlan, main)
