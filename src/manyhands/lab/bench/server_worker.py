"""The measuring process of the server benchmark: `python -m manyhands.lab.bench.server_worker PLAN`.

It is the one worker of every contender's server, so that all take turns in one process. PLAN is a `ServerPlan` as JSON;
what it prints is a JSON object: for every exchange, for every contender, the seconds of each round trip.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError
from manyhands.lab.bench.server_memory import measure_memory
from manyhands.lab.bench.server_ours import OurPeer
from manyhands.lab.bench.server_peers import RayPeer, RpcPeer, ray_running, rpc_running
from manyhands.lab.bench.server_work import Array, TimedExchange
from manyhands.places.local.parent import die_with_parent
from manyhands.strategies.common.consistency import Async
from manyhands.strategies.ps.strategy import Ps

__all__ = ["ServerContender", "ServerPlan"]

_WARM_UP = 3  # exchanges of each contender that are not measured; each is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What the process does."""

    exchanges: tuple[str, ...]
    """As JSON each."""
    rounds: tuple[int, ...]
    """How often each contender has its turn, per exchange."""
    blocks: tuple[int, ...]
    """Measured round trips in a turn, per exchange."""
    with_ray: bool
    memory_bytes: int
    """The size of the model whose server's memory is measured; 0: none."""
    folder: str
    parent_pid: int
    timeout_s: float

    @classmethod
    def from_json(cls, text: str) -> ServerPlan:
        """What `to_json` gave."""
        fields = json.loads(text)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("exchanges", "rounds", "blocks")}})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


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

    def close(self) -> None:
        """End."""


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

    def measure(self, block: int) -> None:
        """One exchange to bring its memory back into the caches, then the measured ones."""
        self.run()
        self.seconds += [self.run() for _ in range(block)]


def measure(
    exchange: TimedExchange, contenders: Sequence[ServerContender], rounds: int, block: int
) -> dict[str, list[float]]:
    """The seconds of all, taking turns; another one first in every round."""
    turns = {contender.name: BenchExchanges(exchange, contender) for contender in contenders}
    for one in turns.values():
        for _ in range(_WARM_UP):
            one.run()
            one.check()
    order = list(turns.values())
    for number in range(rounds):
        first = number % len(order)
        for one in order[first:] + order[:first]:
            one.measure(block)
    for one in order:
        one.check()
    return {name: one.seconds for name, one in turns.items()}


OURS = (
    Ps(),
    Ps(consistency=Async()),
    Ps(link="tcp"),
)
"""How our own server runs: the default, the one that copies, and over TCP."""


def _ours_and_ray(exchange: TimedExchange, plan: ServerPlan) -> list[Callable[[], ServerContender]]:
    ours = [partial(OurPeer, exchange, strategy, plan.timeout_s) for strategy in OURS]
    rays = [partial(RayPeer, exchange, in_place=in_place) for in_place in (False, True)]
    return [*ours, *(rays if plan.with_ray else [])]


def _rpc(exchange: TimedExchange, plan: ServerPlan) -> list[Callable[[], ServerContender]]:
    del plan
    return [partial(RpcPeer, exchange)]


def _measure_all(
    plan: ServerPlan, makers: Callable[[TimedExchange, ServerPlan], list[Callable[[], ServerContender]]]
) -> list[dict[str, list[float]]]:
    """By exchange: the seconds of each contender."""
    seconds = []
    for text, rounds, block in zip(plan.exchanges, plan.rounds, plan.blocks, strict=True):
        exchange = TimedExchange.from_json(text)
        with ExitStack() as stack:
            contenders: list[ServerContender] = []
            for make in makers(exchange, plan):
                contenders.append(make())
                stack.callback(contenders[-1].close)
            seconds.append(measure(exchange, contenders, rounds, block))
    return seconds


def main(plan: ServerPlan) -> None:
    """Measure everything, and print it.

    Torch's rpc comes by itself, at the end: its threads poll without rest, in this process too, and on two cores that
    doubles the time of everybody else.
    """
    torch.set_num_threads(1)
    with ray_running() if plan.with_ray else nullcontext():
        seconds = _measure_all(plan, _ours_and_ray)
    memory = measure_memory(plan.memory_bytes, plan.timeout_s) if plan.memory_bytes else []
    with rpc_running(plan.folder, plan.timeout_s):
        by_rpc = _measure_all(plan, _rpc)
    together = [{**one, **other} for one, other in zip(seconds, by_rpc, strict=True)]
    print(json.dumps({"seconds": together, "memory": memory}))


if __name__ == "__main__":
    server_plan = ServerPlan.from_json(sys.argv[1])
    die_with_parent(server_plan.parent_pid, signal.SIGKILL)
    main(server_plan)
