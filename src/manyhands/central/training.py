"""`central`: the common loop, on one copy of the parameters for each host."""

from __future__ import annotations

from manyhands.allreduce.collective import Collective
from manyhands.central.across import BetweenHosts
from manyhands.central.exchange import CentralExchange
from manyhands.central.strategy import Central
from manyhands.training.exchange import Exchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources

__all__ = ["CentralTraining"]


class CentralTraining(ExchangeTraining):
    """Each worker updates its slice of the one copy; a single worker all of it."""

    @classmethod
    def exchange(cls, strategy: Central, resources: Resources) -> Exchange:
        """One worker's end."""
        return CentralExchange(resources.group(), strategy.buckets)

    @classmethod
    def exchange_across_hosts(cls, strategy: Central, resources: Resources) -> tuple[Exchange, Collective]:
        """One worker's end of one copy for each host."""
        between = BetweenHosts(resources)
        return CentralExchange(resources.host_group(), strategy.buckets, between), between.words()
