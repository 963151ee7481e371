"""How each worker of `local` is connected to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from manyhands.engine.exchange import Exchange, Resources, SingleExchange
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.collective import Collective, SharedCollective
from manyhands.strategies.common.collectives.schedule import Algorithm
from manyhands.strategies.common.collectives.schedule_collective import barrier_in, over_links
from manyhands.strategies.local.local_exchange import Gossip, LocalExchange
from manyhands.strategies.local.outer import Mean, Mixed, Nesterov, outer_step
from manyhands.strategies.local.strategy import Local
from manyhands.strategies.local.streaming import StreamedExchange
from manyhands.transport.link.interface import Link


class LocalTraining(ExchangeTraining):
    """Every worker holds the model, and a separate optimizer state until the next average."""

    @classmethod
    def exchange(cls, strategy: Local, resources: Resources) -> Exchange:
        world = resources.world
        if world == 1:
            return SingleExchange()  # an average of one
        links = resources.links() if strategy.facts.uses_links else {}
        resources = replace(resources, links=lambda: links)  # once for averages and what is between them
        if not strategy.uses_network:
            return _end(strategy, SharedCollective(resources.group()), links, resources.timeout_s)
        ring, codec, arrive = ALGORITHMS["ring"], strategy.codec, barrier_in(resources.group())
        replicas = over_links(ring, resources, codec, feedback=strategy.feedback, arrive=arrive)
        return _end(strategy, replicas, links, resources.timeout_s)

    @classmethod
    def exchange_across_hosts(cls, strategy: Local, resources: Resources) -> tuple[Exchange, Collective]:
        links = resources.links()
        resources = replace(resources, links=lambda: links)
        replicas = over_links(
            _between(resources.hosts), resources, strategy.codec, feedback=strategy.feedback
        )
        return _end(strategy, replicas, links, resources.timeout_s), replicas.of_words()


def _between(hosts: Sequence[Sequence[int]]) -> Algorithm:
    """A ring; or `hierarchical`, which is twice on the way between hosts, if they hold equally many one by one."""
    size, in_turn = len(hosts[0]), [rank for ranks in hosts for rank in ranks]
    equal = size > 1 and all(len(ranks) == size for ranks in hosts) and in_turn == sorted(in_turn)
    return grouped(size) if equal else ALGORITHMS["ring"]


def _end(strategy: Local, collective: Collective, links: Mapping[int, Link], timeout_s: float) -> Exchange:
    rank, world = collective.rank, collective.world
    gossip = Gossip(rank, world, links, timeout_s) if strategy.gossip else None
    outer = outer_step(strategy.outer, world)
    if strategy.streams:
        assert isinstance(outer, Mean | Nesterov), "others keep replicas apart themselves"
        mixed = Mixed(outer, strategy.keep if strategy.overlap else 0.0)
        return StreamedExchange(collective, strategy.plan, mixed, first=strategy.first)
    return LocalExchange(collective, strategy.steps, first=strategy.first, outer=outer, gossip=gossip)
