"""Ways for ranks that are threads to exchange gradients, for tests that hold several strategies to one contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from manyhands.allreduce.collective import SharedCollective
from manyhands.allreduce.exchange import AllReduceExchange
from manyhands.allreduce.shared import SharedGroup, SharedGroupFiles
from manyhands.central.exchange import CentralExchange
from manyhands.exchange import Exchange, SingleExchange

BUCKET_BYTES = 512  # several buckets even for a small model
Result = TypeVar("Result")


def join(files: SharedGroupFiles, rank: int) -> SharedGroup:
    return SharedGroup(
        control=os.dup(files.control), arena=os.dup(files.arena), rank=rank, world=files.world, timeout_s=30
    )


def connect(way: str, files: SharedGroupFiles, rank: int) -> Exchange:
    match way:
        case "single":
            return SingleExchange()
        case "mirrored":
            return AllReduceExchange(SharedCollective(join(files, rank)), BUCKET_BYTES)
        case "central":
            return CentralExchange(join(files, rank), BUCKET_BYTES)
    raise AssertionError(way)


def in_threads(world: int, act: Callable[[int], Result]) -> list[Result]:
    """`act(rank)` for every rank at once; the first error of the lowest rank is raised."""
    results: list[Result] = []
    outcomes: list[Result | BaseException | None] = [None] * world

    def work(rank: int) -> None:
        try:
            outcomes[rank] = act(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), f"{thread.name} hangs"
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)  # type: ignore[arg-type]
    return results


def with_exchanges(way: str, world: int, act: Callable[[Exchange], Result]) -> list[Result]:
    """`act(exchange)` on every rank, each with its own end, closed afterwards."""
    with SharedGroup.create(world) as files:

        def work(rank: int) -> Result:
            exchange = connect(way, files, rank)
            try:
                return act(exchange)
            finally:
                exchange.close()

        return in_threads(world, work)
