"""Ways for ranks that are threads to exchange gradients, for tests that hold several strategies to one contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

import manyhands as mh
from equality import Silent
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange, Resources, SingleExchange
from manyhands.engine.worker import Trainer
from manyhands.engine.worker_processes import exchanging
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.places.local.rendezvous import hosts_of
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.tcp import TcpLink

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
    strategy = Strategy.parse(BUCKETED.get(way, way))
    return exchanging(strategy).exchange(strategy, resources)


@contextmanager
def on_hosts(
    way: str,
    places: str,
    pair: Callable[[], tuple[Link, Link]] = TcpLink.pair,
    timeout_s: float = 30,
) -> Iterator[Callable[[int], Exchange]]:
    """What connects each rank, by the wiring that `fit` uses, to others on several hosts: memory on each, and a link
    between any two workers. `places` has a letter for each rank, its host: `aab`.
    """
    world, hosts = len(places), hosts_of(places)
    links: list[dict[int, Link]] = [{} for _ in range(world)]
    with ExitStack() as stack:
        files = [stack.enter_context(SharedGroupFiles.create(len(host))) for host in hosts]
        for high in range(world):
            for low in range(high):
                links[low][high], links[high][low] = pair()
                stack.callback(links[low][high].close)
                stack.callback(links[high][low].close)

        def connect(rank: int) -> Exchange:
            number = next(number for number, host in enumerate(hosts) if rank in host)
            strategy = Strategy.parse(BUCKETED.get(way, way)).across_hosts(hosts)

            def host_group() -> SharedGroup:
                return SharedGroup(
                    control=os.dup(files[number].control),
                    arena=os.dup(files[number].arena),
                    rank=hosts[number].index(rank),
                    world=len(hosts[number]),
                    timeout_s=timeout_s,
                    roles=hosts[number],
                )

            resources = Resources(
                rank=rank,
                world=world,
                timeout_s=timeout_s,
                group=lambda: pytest.fail("there is no memory that all share"),
                host_group=host_group,
                links=lambda: links[rank],
                hosts=hosts,
            )
            exchange, _ = exchanging(strategy).exchange_across_hosts(strategy, resources)
            return exchange

        yield connect


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
        thread.join(timeout=240)
        assert not thread.is_alive(), f"{thread.name} hangs"
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)  # type: ignore[arg-type]
    return results


def with_exchanges(way: str, world: int, act: Callable[[Exchange], Result]) -> list[Result]:
    """`act(exchange)` on every rank, each with its own end, closed afterwards.

    A way may be `central on aab`: the first two workers on one host, the third on another.
    """
    word, _, places = way.partition(" on ")
    with ExitStack() as stack:
        if places:
            link_up = stack.enter_context(on_hosts(word, places))
        else:
            link_up = partial(connect, way, stack.enter_context(SharedGroupFiles.create(world)))

        def work(rank: int) -> Result:
            exchange = link_up(rank)
            try:
                return act(exchange)
            finally:
                exchange.close()

        return in_threads(world, work)


def train_on(
    task: mh.Task, way: str, world: int, folder: Path, steps: int, start: int | None
) -> list[dict[str, torch.Tensor]]:
    """Every rank's weights after `steps`, from the checkpoint of step `start`; saves after every third step."""
    plan = TrainingPlan(task=task, steps=steps, seed=0, evaluate_every=0, checkpoint_every=3)

    def act(exchange: Exchange) -> dict[str, torch.Tensor]:
        store = CheckpointStore(folder)
        loaded = store.load(start) if start is not None else None
        model = Trainer(plan, exchange, Silent(), store).run(loaded).model
        assert loaded is None or not loaded.model, "the checkpoint is still in memory"
        return {name: value.clone() for name, value in model.state_dict().items()}

    return with_exchanges(way, world, act)
