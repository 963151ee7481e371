"""`mirrored` and `allreduce`: the common loop, with a collective that sums gradients."""

from __future__ import annotations

from manyhands.allreduce.algorithms import ALGORITHMS, grouped
from manyhands.allreduce.collective import Collective, SharedCollective, across_hosts, over_links
from manyhands.allreduce.exchange import AllReduceExchange
from manyhands.allreduce.schedule import Algorithm
from manyhands.allreduce.strategy import AllReduce, Mirrored
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources

__all__ = ["AllReduceTraining"]


class AllReduceTraining(ExchangeTraining):
    """Every worker holds the model."""

    @classmethod
    def exchange(cls, strategy: Mirrored | AllReduce, resources: Resources) -> Exchange:
        """One worker's end, on one host."""
        if resources.world == 1:
            return SingleExchange()  # nobody to exchange with
        return AllReduceExchange(_collective(strategy, resources), strategy.buckets)

    @classmethod
    def exchange_across_hosts(cls, strategy: AllReduce, resources: Resources) -> tuple[Exchange, Collective]:
        """Every algorithm runs over links there."""
        algorithm = grouped(strategy.group) if strategy.group else ALGORITHMS[strategy.algorithm]
        gradients, words = across_hosts(algorithm, resources, strategy.codec)
        return AllReduceExchange(gradients, strategy.buckets), words


def _collective(strategy: Mirrored | AllReduce, resources: Resources) -> Collective:
    if isinstance(strategy, Mirrored) or not strategy.uses_links:
        return SharedCollective(resources.group())
    return over_links(_algorithm(strategy, resources.world), resources, strategy.codec)


def _algorithm(strategy: AllReduce, world: int) -> Algorithm:
    if strategy.algorithm == "hierarchical":
        return grouped(strategy.group or world)  # one host is one group
    return ALGORITHMS[strategy.algorithm]
