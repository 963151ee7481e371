"""`sharded`: the common loop, on parameters that are gathered layer by layer."""

from __future__ import annotations

from manyhands.sharded.exchange import ShardedExchange
from manyhands.sharded.strategy import Sharded
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources

__all__ = ["ShardedTraining"]


class ShardedTraining(ExchangeTraining):
    """Each worker keeps and updates its pieces of every layer."""

    @classmethod
    def exchange(cls, strategy: Sharded, resources: Resources) -> Exchange:
        """One worker's end; a single worker has everything and nobody to ask."""
        del strategy
        if resources.world == 1:
            return SingleExchange()
        return ShardedExchange(resources)
