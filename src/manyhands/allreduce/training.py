"""`mirrored` and `allreduce`: the common loop, with a collective that sums gradients."""

from __future__ import annotations

from manyhands.allreduce.algorithms import ALGORITHMS, grouped
from manyhands.allreduce.chosen import algorithm_of, collective_for
from manyhands.allreduce.collective import Collective, across_hosts, without_barrier
from manyhands.allreduce.elastic.training import ElasticTraining
from manyhands.allreduce.exchange import AllReduceExchange
from manyhands.allreduce.priority.exchange import PriorityExchange
from manyhands.allreduce.schedule import Algorithm
from manyhands.allreduce.strategy import AllReduce, Mirrored
from manyhands.strategy import Strategy
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources
from manyhands.training.training import Training

__all__ = ["AllReduceTraining"]


class AllReduceTraining(ExchangeTraining):
    """Every worker holds the model."""

    @classmethod
    def exchange(cls, strategy: Mirrored | AllReduce, resources: Resources) -> Exchange:
        """One worker's end, on one host."""
        if resources.world == 1:
            return SingleExchange()  # nobody to exchange with
        if isinstance(strategy, AllReduce) and strategy.order == "priority":
            return _by_priority(strategy, algorithm_of(strategy, resources.world), resources)
        return AllReduceExchange(collective_for(strategy, resources), strategy.buckets)

    @classmethod
    def chosen_for(cls, strategy: Strategy) -> type[Training]:
        """Among a fixed number of workers, or by those who are there."""
        return ElasticTraining if isinstance(strategy, AllReduce) and strategy.elastic else cls

    @classmethod
    def exchange_across_hosts(
        cls, strategy: AllReduce, resources: Resources
    ) -> tuple[Exchange, Collective | None]:
        """Every algorithm runs over links there."""
        algorithm = grouped(strategy.group) if strategy.group else ALGORITHMS[strategy.algorithm]
        if strategy.order == "priority":
            return _by_priority(strategy, algorithm, resources), None
        gradients, words = across_hosts(algorithm, resources, strategy.codec, feedback=strategy.feedback)
        return AllReduceExchange(gradients, strategy.buckets), words


def _by_priority(strategy: AllReduce, algorithm: Algorithm, resources: Resources) -> Exchange:
    collective = without_barrier(algorithm, resources, strategy.codec, feedback=strategy.feedback)
    return PriorityExchange(collective, strategy.buckets, strategy.credit)
