"""`local`: the common training loop, with an exchange of parameters instead of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from manyhands.engine.exchange import Exchange, Resources, SingleExchange
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective import Collective, SharedCollective
from manyhands.strategies.common.collectives.schedule_collective import barrier_in, over_links
from manyhands.strategies.local.exchange import Gossip, LocalExchange
from manyhands.strategies.local.outer import outer_step
from manyhands.strategies.local.strategy import Local
from manyhands.transport.link.interface import Link

__all__ = ["LocalTraining"]


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
        replicas = over_links(ALGORITHMS["ring"], resources, strategy.codec, feedback=strategy.feedback)
        return _end(strategy, replicas, links, resources.timeout_s), replicas.of_words()


def _end(
    strategy: Local, collective: Collective, links: Mapping[int, Link], timeout_s: float
) -> LocalExchange:
    rank, world = collective.rank, collective.world
    gossip = Gossip(rank, world, links, timeout_s) if strategy.gossip else None
    outer = outer_step(strategy.outer, world)
    return LocalExchange(collective, strategy.steps, first=strategy.first, outer=outer, gossip=gossip)
