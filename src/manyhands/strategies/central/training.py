"""`central`: the common training loop, on one copy of the parameters per host."""

from __future__ import annotations

from manyhands.engine.exchange import Exchange, Resources
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.strategies.central.across import BetweenHosts
from manyhands.strategies.central.exchange import CentralExchange
from manyhands.strategies.central.strategy import Central
from manyhands.strategies.common.collectives.collective import Collective


class CentralTraining(ExchangeTraining):
    """Each worker updates its slice of the shared copy; a single worker updates all of it."""

    @classmethod
    def exchange(cls, strategy: Central, resources: Resources) -> Exchange:
        return CentralExchange(resources.group(), strategy.buckets)

    @classmethod
    def exchange_across_hosts(cls, strategy: Central, resources: Resources) -> tuple[Exchange, Collective]:
        between = BetweenHosts(resources)
        return CentralExchange(resources.host_group(), strategy.buckets, between), between.words()
