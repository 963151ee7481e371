"""`sharded`: the common training loop, on parameters that are gathered layer by layer."""

from __future__ import annotations

from manyhands.engine.exchange import Exchange, Resources, SingleExchange
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.strategies.sharded.exchange import ShardedExchange
from manyhands.strategies.sharded.sharded_loop import ShardedLoop
from manyhands.strategies.sharded.strategy import Sharded


class ShardedTraining(ExchangeTraining):
    """Each worker keeps and updates its pieces of every layer."""

    @classmethod
    def exchange(cls, strategy: Sharded, resources: Resources) -> Exchange:
        del strategy
        if resources.world == 1:
            return SingleExchange()
        return ShardedExchange(resources)

    @classmethod
    def loop_exchange(cls, strategy: Sharded, resources: Resources) -> Exchange:
        del strategy
        return ShardedLoop(resources)
