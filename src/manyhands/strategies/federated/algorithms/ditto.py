"""Ditto (Li et al., "Fair and Robust Federated Learning Through Personalization", ICML 2021).

The common model is FedAvg's. Beside it every client trains one of its own in each round that it takes part in, held
near the common one: its loss gets LAMBDA/2 times the squared distance from the weights that the server sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm

__all__ = ["Ditto"]


class Ditto(FederatedAlgorithm):
    """Ditto: FedAvg, plus a personal model for every client that never leaves it."""

    word: ClassVar[str] = "ditto"
    about: ClassVar[str] = (
        "FedAvg, beside which each client trains a model of its own, held near the common one"
    )
    number: ClassVar[str] = "LAMBDA"
    trains_personal: ClassVar[bool] = True
    models_kept: ClassVar[int] = 1
    cannot_keep_layers: ClassVar[str] = "each client has a whole model of its own"

    def __init__(self, hold: float = 0.1) -> None:
        super().__init__()
        self._hold = hold

    def kept(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The shapes of a whole model: the client's personal one."""
        return weights

    def personal(self, client: int, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Its own; the server's before its first round."""
        return self.states.get(client, weights)

    def correct_personal(self, client: int, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """The gradient of the distance."""
        del client
        for parameter, common in zip(parameters, weights, strict=False):  # buffers come after the parameters
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - common, alpha=self._hold)

    def keep_personal(self, client: int, trained: Sequence[Tensor]) -> None:
        """Store the client's personal model until its next round."""
        self.keep(client, trained)
