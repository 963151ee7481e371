"""Choose the collective that a strategy's settings ask for, on one host or across several."""

from __future__ import annotations

from manyhands.engine.worker_resources import Resources
from manyhands.strategies.allreduce.helped import helped_collective
from manyhands.strategies.allreduce.strategy import AllReduce
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


def collective_for(strategy: AllReduce, resources: Resources) -> Collective:
    """Return this worker's collective, for workers that all run on one host."""
    if not strategy.facts.uses_links:
        return SharedCollective(resources.group())
    if strategy.helpers:
        return helped_collective(resources, strategy.codec)
    algorithm = algorithm_of(strategy, resources.world)
    return over_links(algorithm, resources, strategy.codec, feedback=strategy.feedback)


def algorithm_of(strategy: AllReduce, world: int) -> Algorithm:
    """Return the algorithm that sums over links between the workers of one host."""
    if strategy.algorithm == "hierarchical":
        return grouped(strategy.group or world)  # one host is one group
    return ALGORITHMS[strategy.algorithm]


def collective_across_hosts(
    strategy: AllReduce, resources: Resources
) -> tuple[ScheduleCollective, ScheduleCollective]:
    """Return this worker's collectives over links between hosts: one for gradients, one for small exact values."""
    if strategy.helpers:
        both = helped_collective(resources, strategy.codec)
        return both, both
    algorithm = grouped(strategy.group) if strategy.group else ALGORITHMS[strategy.algorithm]
    return across_hosts(algorithm, resources, strategy.codec, feedback=strategy.feedback)
