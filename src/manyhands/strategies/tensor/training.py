"""Strategy `tensor` in the common loop, or in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from manyhands.engine.exchange import Exchange, Resources, SingleExchange
from manyhands.engine.request import Request
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.strategies.tensor.exchange import TensorExchange
from manyhands.strategies.tensor.moves import sum_layer_traffic
from manyhands.strategies.tensor.slicing import check_plan
from manyhands.strategies.tensor.strategy import Tensor
from manyhands.strategies.tensor.tensor_loop import TensorLoop


class TensorTraining(ExchangeTraining):
    """Training in which every worker holds a slice of every layer; a bad plan fails in the constructor."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, Tensor), "the registry leads here from its own value"
        check_plan(model, request.strategy.grid(request.workers).slices)

    @classmethod
    def exchange(cls, strategy: Tensor, resources: Resources) -> Exchange:
        if resources.world == 1:
            return SingleExchange()  # a single worker has no peers
        grid, links = strategy.grid(resources.world), resources.links()
        device = str(resources.device or "cpu")
        return TensorExchange(resources.rank, grid, links, resources.timeout_s, device)

    @classmethod
    def loop_exchange(cls, strategy: Tensor, resources: Resources) -> Exchange:
        grid, links = strategy.grid(resources.world), resources.links()
        return TensorLoop(resources.rank, grid, links, resources.timeout_s)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, **sum_layer_traffic(finished)}
