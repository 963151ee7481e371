"""From a strategy's settings to the collective that sums by them, among the workers of one host or of several."""

from __future__ import annotations

from manyhands.engine.worker_resources import Resources
from manyhands.strategies.allreduce.helped import helped_collective
from manyhands.strategies.allreduce.strategy import AllReduce, Mirrored
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.collective import (
    Collective,
    ScheduleCollective,
    SharedCollective,
    across_hosts,
    over_links,
)
from manyhands.strategies.common.collectives.schedule import Algorithm

__all__ = ["algorithm_of", "collective_across_hosts", "collective_for"]


def collective_for(strategy: Mirrored | AllReduce, resources: Resources) -> Collective:
    """One worker's end of it."""
    if isinstance(strategy, Mirrored) or not strategy.uses_links:
        return SharedCollective(resources.group())
    if strategy.helpers:
        return helped_collective(resources, strategy.codec)
    algorithm = algorithm_of(strategy, resources.world)
    return over_links(algorithm, resources, strategy.codec, feedback=strategy.feedback)


def algorithm_of(strategy: AllReduce, world: int) -> Algorithm:
    """By which it sums over links among the workers of one host."""
    if strategy.algorithm == "hierarchical":
        return grouped(strategy.group or world)  # one host is one group
    return ALGORITHMS[strategy.algorithm]


def collective_across_hosts(
    strategy: AllReduce, resources: Resources
) -> tuple[ScheduleCollective, ScheduleCollective]:
    """One worker's end over links, as `across_hosts` chose the algorithm: for gradients, and for small exact words."""
    if strategy.helpers:
        both = helped_collective(resources, strategy.codec)
        return both, both
    algorithm = grouped(strategy.group) if strategy.group else ALGORITHMS[strategy.algorithm]
    return across_hosts(algorithm, resources, strategy.codec, feedback=strategy.feedback)
