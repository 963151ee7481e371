"""`federated`: the common loop, with rounds for steps."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from manyhands.allreduce.collective import SharedCollective
from manyhands.errors import UserError
from manyhands.federated.exchange import FederatedExchange, split_over
from manyhands.federated.secure.primitives import need_cryptography
from manyhands.federated.strategy import Federated
from manyhands.task import Task
from manyhands.training.exchange import Exchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.request import Request
from manyhands.training.resources import Resources

__all__ = ["FederatedTraining"]


class FederatedTraining(ExchangeTraining):
    """Workers of one host share the clients of every round among them."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        """UserError where the task asks for what clients cannot do, or its data cannot be split over them."""
        super().__init__(request, model)
        task = request.plan.task
        strategy = cast(Federated, request.strategy)
        assert isinstance(task, Task), "a compiled task is refused before"
        for name, wanted in (
            ("weights", task.weights is not None),
            ("microbatches", task.microbatches > 1),
            ("sparse", bool(task.sparse)),
        ):
            if wanted:
                raise UserError(
                    f"task.{name}: clients of strategy {strategy} train plain batches; leave it out"
                )
        found = split_over(strategy, task, request.plan.seed)
        if strategy.secure:
            need_cryptography()
        strategy.check_round(len(found))

    @classmethod
    def exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        """One worker's end: alone, or in the shared memory of one host."""
        collective = SharedCollective(resources.group()) if resources.world > 1 else None
        return FederatedExchange(strategy, resources.seed, collective)
