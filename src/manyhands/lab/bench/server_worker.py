"""The measuring process of the server benchmark: `python -m manyhands.lab.bench.server_worker PLAN`.

It is the one worker of every contender's server. It prints a JSON object: for every exchange, for every contender, the
seconds of each round trip; and the memory of servers, as the kernel has it after every worker has pushed and pulled:
that of one with a large model, less that of one with next to none. Private memory is the server's own (parameters,
optimizer state, per worker a gradient or two); shared memory is the workers', which it maps to read and write in place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError
from manyhands.lab.bench.harness import WARM_UP, WorkerPlan, be_worker, in_turn
from manyhands.lab.bench.server_ours import OurServer
from manyhands.lab.bench.server_peers import RayPeer, RpcPeer, ray_running, rpc_running
from manyhands.lab.bench.server_work import Array, Flat, TimedExchange
from manyhands.strategies.common.consistency import Async
from manyhands.strategies.ps.strategy import Ps

__all__ = ["ServerPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan(WorkerPlan):
    """What the process does."""

    exchanges: Sequence[str]  # as JSON each
    rounds: int
    blocks: Sequence[int]  # measured round trips of each contender in a round, per exchange
    with_ray: bool
    memory_bytes: int  # the size of the model whose server's memory is measured; 0: none
    folder: str


class ServerContender(Protocol):
    """One server, with this process as its worker."""

    name: str

    @property
    def pulled(self) -> Array:
        """What came back last."""

    def give(self, pushed: Sequence[NDArray[Any]]) -> None:
        """What the next exchange pushes; brings it to where backward would have left it."""

    def exchange(self) -> None:
        """Push it; return when what comes back is here."""


class BenchExchanges:
    """One contender's exchanges, counted, timed and checked."""

    def __init__(self, exchange: TimedExchange, contender: ServerContender) -> None:
        self._exchange = exchange
        self._contender = contender
        self._steps = 0
        self._pushed = [exchange.pushed(step) for step in range(exchange.period)]
        self.seconds: list[float] = []

    def run(self) -> float:
        """One exchange; how long it took."""
        self._steps += 1
        self._contender.give(self._pushed[self._steps % len(self._pushed)])
        began = time.perf_counter()
        self._contender.exchange()
        return time.perf_counter() - began

    def check(self) -> None:
        """Compare what came back last with what numpy says."""
        if not self._exchange.agrees(self._contender.pulled, self._steps):
            raise ManyhandsError(
                f"{self._contender.name} gave wrong parameters in step {self._steps} of {self._exchange.name}"
            )


def measure(
    exchange: TimedExchange, contenders: Sequence[ServerContender], rounds: int, block: int
) -> dict[str, list[float]]:
    made = {contender.name: BenchExchanges(exchange, contender) for contender in contenders}
    for one in made.values():
        for _ in range(WARM_UP):
            one.run()
            one.check()
    for one in in_turn(list(made.values()), rounds):
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


def _by_rpc(exchange: TimedExchange, stack: ExitStack) -> Iterator[ServerContender]:
    yield stack.enter_context(closing(RpcPeer(exchange)))


def _measure_all(plan: ServerPlan, contenders: Contenders) -> list[dict[str, list[float]]]:
    """By exchange: the seconds of each contender."""
    seconds = []
    for text, block in zip(plan.exchanges, plan.blocks, strict=True):
        exchange = TimedExchange.from_json(text)
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
    """Private and shared memory of a server that so many workers have used."""
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
    """Measure everything, and print it.

    Torch's rpc comes by itself, at the end: its threads poll without rest, in this process too, and on two cores that
    doubles the time of everybody else.
    """
    torch.set_num_threads(1)
    with ray_running() if plan.with_ray else nullcontext():
        seconds = _measure_all(plan, partial(_ours_and_ray, plan))
    memory = measure_memory(plan.memory_bytes, plan.timeout_s) if plan.memory_bytes else []
    with rpc_running(plan.folder, plan.timeout_s):
        by_rpc = _measure_all(plan, _by_rpc)
    together = [{**one, **other} for one, other in zip(seconds, by_rpc, strict=True)]
    print(json.dumps({"seconds": together, "memory": memory}))


if __name__ == "__main__":
    be_worker(ServerPlan, main)
