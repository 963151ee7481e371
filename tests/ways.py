"""Ways for ranks that are threads to exchange gradients, for tests that hold several strategies to one contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from manyhands.group.shared import SharedGroup, SharedGroupFiles
from manyhands.strategy import Strategy
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import exchange_for
from manyhands.training.resources import Resources

BUCKET_BYTES = 512  # several buckets even for a small model
BUCKETED = {way: f"{way} buckets={BUCKET_BYTES}" for way in ("mirrored", "central")}
Result = TypeVar("Result")


def join(files: SharedGroupFiles, rank: int) -> SharedGroup:
    return SharedGroup(
        control=os.dup(files.control), arena=os.dup(files.arena), rank=rank, world=files.world, timeout_s=30
    )


def connect(way: str, files: SharedGroupFiles, rank: int) -> Exchange:
    """Through the same wiring that `fit` uses."""
    if way == "single":
        return SingleExchange()
    resources = Resources(
        rank=rank, world=files.world, timeout_s=30, group=lambda: join(files, rank), links=dict
    )
    return exchange_for(Strategy.parse(BUCKETED.get(way, way)), resources)


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
