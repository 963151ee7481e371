"""`allreduce`: every worker holds the model, and all apply the same step from the summed gradient.

Each worker weights its loss by its share of the global batch before backward. The sum over workers is therefore the
gradient of the mean over the batch, however the batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.exchange import (
    Exchange,
    ExchangeState,
    LocalStep,
    Meter,
    Resources,
    SharedStep,
    WorkerPart,
)
from manyhands.engine.fusing import take_step
from manyhands.strategies.allreduce.helpers import helped_collective
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives import schedule_collective as scheduled
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.collective import (
    Collective,
    Reducer,
    SharedCollective,
    gradient_layouts,
    remember_kept,
)
from manyhands.strategies.common.collectives.schedule import Algorithm
from manyhands.wire.codec import check_optimizer


class AllReduceExchange(Exchange):
    """One worker's end of a synchronous all-reduce over the given collective."""

    hooks: Reducer | None = None
    _reducer: Reducer
    _optimizer: Optimizer

    def __init__(self, collective: Collective, bucket_bytes: int) -> None:
        self.rank, self.world = collective.rank, collective.world
        self.part = WorkerPart(index=self.rank, count=self.world, copies=(range(self.world),))
        self.meter = Meter(take_times=collective.take_times, traffic=collective.traffic)
        self._collective, self._bucket_bytes = collective, bucket_bytes
        self.besides: Mapping[str, Any] = {}  # added to the collective's summary at the end of a run

    @property
    def wire(self) -> int:  # type: ignore[override]
        return self._collective.wire

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.lay_out(model, optimizer).broadcast([*model.parameters(), *model.buffers()])

    def lay_out(self, model: nn.Module, optimizer: Optimizer) -> Reducer:
        check_optimizer(self._collective.codec, optimizer)
        self._optimizer = optimizer
        layouts = gradient_layouts(model, self._bucket_bytes, rows=self._collective.sums_rows)
        self.hooks = self._reducer = reducer = Reducer(model, self._collective, layouts)
        self.kept = ExchangeState(gather=reducer.residuals, load=partial(remember_kept, self._collective))
        return reducer

    def agree(self, local: LocalStep) -> SharedStep:
        return self._reducer.finish(local)

    def apply(self) -> None:
        take_step(self._optimizer)
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        self._collective.synchronize()
        return self._optimizer.state_dict() if self.rank == 0 else None

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Collective: return the model state on worker 0; no worker needs another afterwards for a pending sum."""
        if self._collective.synchronize():
            self.total(torch.zeros(1, dtype=torch.float64))
        return super().model_state(model)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._reducer.total(values)

    def summary(self) -> Mapping[str, Any]:
        return {**self._collective.summary(), **self.besides}

    def close(self) -> None:
        if self.hooks is not None:
            self.hooks.close()
        self._collective.close()


def collective_for(strategy: AllReduce, resources: Resources) -> Collective:
    if not strategy.facts.uses_links:
        return SharedCollective(resources.group())
    if strategy.helpers:
        return helped_collective(resources, strategy.codec)
    algorithm = algorithm_of(strategy, resources.world)
    arrive = scheduled.barrier_in(resources.group())
    return scheduled.over_links(
        algorithm, resources, strategy.codec, feedback=strategy.feedback, arrive=arrive
    )


def algorithm_of(strategy: AllReduce, world: int) -> Algorithm:
    if strategy.algorithm == "hierarchical":
        return grouped(strategy.group or world)  # one host is one group
    return ALGORITHMS[strategy.algorithm]


def collective_across_hosts(
    strategy: AllReduce, resources: Resources
) -> tuple[scheduled.ScheduleCollective, scheduled.ScheduleCollective]:
    if strategy.helpers:
        both = helped_collective(resources, strategy.codec)
        return both, both
    algorithm = grouped(strategy.group) if strategy.group else ALGORITHMS[strategy.algorithm]
    gradients = scheduled.over_links(algorithm, resources, strategy.codec, feedback=strategy.feedback)
    return gradients, gradients.of_words()
