"""`tensor`: the common loop, with layers of which every worker has a slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from manyhands.tensor.exchange import TensorExchange
from manyhands.tensor.slicing import check_plan
from manyhands.tensor.strategy import Tensor
from manyhands.tensor.telling import layers_together
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.request import Request
from manyhands.training.resources import Resources

__all__ = ["TensorTraining"]


class TensorTraining(ExchangeTraining):
    """Every worker holds a slice of every layer."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, Tensor), "the registry leads here from its own value"
        check_plan(model, request.strategy.grid(request.workers).slices)

    @classmethod
    def exchange(cls, strategy: Tensor, resources: Resources) -> Exchange:
        """One worker's end, on one host."""
        if resources.world == 1:
            return SingleExchange()  # nobody to exchange with
        grid = strategy.grid(resources.world)
        links = resources.links()
        return TensorExchange(resources.rank, grid, links, resources.timeout_s, resources.device)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """What all workers together sent for each layer, in a step of training."""
        samples, besides = super().gather(finished)
        return samples, {**besides, **layers_together(finished)}
