"""`mirrored` and `allreduce`: the common loop, with a collective that sums gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from manyhands.allreduce.algorithms import ALGORITHMS, grouped
from manyhands.allreduce.collective import Collective, ScheduleCollective, SharedCollective
from manyhands.allreduce.exchange import AllReduceExchange
from manyhands.allreduce.executor import ScheduleExecutor
from manyhands.allreduce.schedule import Algorithm
from manyhands.allreduce.strategy import AllReduce, Mirrored
from manyhands.group.shared import SharedGroup
from manyhands.link.alarm import Alarm
from manyhands.link.base import Link
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
    def exchange_across_hosts(
        cls, strategy: AllReduce, rank: int, links: Mapping[int, Link], timeout_s: float, alarm: Alarm
    ) -> tuple[Exchange, Collective]:
        """Every algorithm runs over links there."""
        algorithm = grouped(strategy.group) if strategy.group else ALGORITHMS[strategy.algorithm]
        executor = ScheduleExecutor(algorithm, rank, len(links) + 1, links, timeout_s, alarm)
        exchange = AllReduceExchange(ScheduleCollective(executor, links), strategy.buckets)
        return exchange, ScheduleCollective(executor, links)


def _collective(strategy: Mirrored | AllReduce, resources: Resources) -> Collective:
    group = resources.group()
    if isinstance(strategy, Mirrored) or not strategy.uses_links:
        return SharedCollective(group)
    links = resources.links()
    algorithm = _algorithm(strategy, group.world)
    executor = ScheduleExecutor(algorithm, group.rank, group.world, links, resources.timeout_s)
    return ScheduleCollective(executor, links, _arrival(group))


def _algorithm(strategy: AllReduce, world: int) -> Algorithm:
    if strategy.algorithm == "hierarchical":
        return grouped(strategy.group or world)  # one host is one group
    return ALGORITHMS[strategy.algorithm]


def _arrival(group: SharedGroup) -> Callable[[], Mapping[int, int]]:
    def arrive() -> Mapping[int, int]:
        group.barrier()
        waits = group.take_stats().waiting_ns
        return {peer: waited for peer, waited in enumerate(waits) if waited}

    return arrive
