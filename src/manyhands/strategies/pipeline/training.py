"""Strategy `pipeline`: the common loop in which each worker holds some layers and follows a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import nn

from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Exchange, Resources
from manyhands.engine.reporting import WorkerContext
from manyhands.engine.request import Request
from manyhands.engine.worker_processes import ProcessTraining, Train, WorkerJob, training_by
from manyhands.places.local.template import expect
from manyhands.strategies.pipeline.exchange import PipelineExchange, check_model
from manyhands.strategies.pipeline.pipeline_loop import PipelineLoop
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategies.tensor.moves import sum_layer_traffic
from manyhands.task import Task

_GIVEN_GRADIENTS = ("torch.fx.experimental.symbolic_shapes",)
"""Modules that torch imports (and sympy with them) at the first backward that starts from a given gradient.

The import takes half a second, in every worker of every run, or once in the process that they are forked from.
"""


class PipelineTraining(ProcessTraining):
    """Pipeline training; the constructor refuses, before anything is started, a model that cannot be cut."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, Pipeline), "the registry leads here from its own word"
        check_model(request.strategy, model)
        expect(_GIVEN_GRADIENTS)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, **sum_layer_traffic(finished)}

    @classmethod
    def loop_exchange(cls, strategy: Pipeline, resources: Resources) -> Exchange:
        return PipelineLoop(strategy, resources)

    @classmethod
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> AbstractContextManager[Train]:
        assert isinstance(job.strategy, Pipeline), "the registry leads here from its own word"
        plan = in_microbatches(job.plan, job.strategy)
        exchange = PipelineExchange(job.strategy, resources, plan, worker_context.mark)
        return training_by(exchange, plan, worker_context, checkpoints)


def in_microbatches(plan: TrainingPlan, strategy: Pipeline) -> TrainingPlan:
    """The plan in which a share has as many pieces as the strategy has micro-batches.

    A schedule over time cuts each piece into slices, so there the task's number of micro-batches stays.
    """
    task = plan.task
    assert isinstance(task, Task), "a compiled task is refused"
    if strategy.table().over_time:
        return plan
    return replace(plan, task=replace(task, microbatches=strategy.microbatches))
