"""`tensor`: the common loop, with layers of which every worker has a slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.tensor.exchange import TensorExchange
from manyhands.tensor.slicing import check_plan
from manyhands.tensor.strategy import Tensor
from manyhands.tensor.telling import layers_together
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources
from manyhands.training.training import Result, Stage

__all__ = ["TensorTraining"]


class TensorTraining(ExchangeTraining):
    """Every worker holds a slice of every layer."""

    @classmethod
    def exchange(cls, strategy: Tensor, resources: Resources) -> Exchange:
        """One worker's end, on one host."""
        if resources.world == 1:
            return SingleExchange()  # nobody to exchange with
        grid = strategy.grid(resources.world)
        links = resources.links()
        return TensorExchange(resources.rank, grid, links, resources.timeout_s, resources.device)

    def run(self, stage: Stage) -> Result:
        """Look at the plan before anybody is started."""
        strategy = self._request.strategy
        assert isinstance(strategy, Tensor), "the registry leads here from its own value"
        check_plan(self._model, strategy.grid(self._request.workers).slices)
        return super().run(stage)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """What all workers together sent for each layer, in a step of training."""
        samples, besides = super().gather(finished)
        layers = layers_together(one.get("layers", []) for one in finished)
        return samples, {**besides, "layers": layers} if layers else besides
