"""`tensor`: the common loop, with layers of which every worker has a slice."""

from __future__ import annotations

from manyhands.tensor.exchange import TensorExchange
from manyhands.tensor.strategy import Tensor
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import ExchangeTraining
from manyhands.training.resources import Resources

__all__ = ["TensorTraining"]


class TensorTraining(ExchangeTraining):
    """Every worker holds a slice of every layer."""

    @classmethod
    def exchange(cls, strategy: Tensor, resources: Resources) -> Exchange:
        """One worker's end, on one host."""
        if resources.world == 1:
            return SingleExchange()  # nobody to exchange with
        grid = strategy.grid(resources.world)
        return TensorExchange(resources.rank, grid, resources.links(), resources.timeout_s)
