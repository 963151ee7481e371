"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm

__all__ = ["FedProx"]


class FedProx(FederatedAlgorithm):
    """Each client's loss gets mu/2 times its squared distance from the weights that it began with."""

    word: ClassVar[str] = "fedprox"
    about: ClassVar[str] = "FedAvg whose clients are held near the weights they began with"
    number: ClassVar[str] = "MU"
    corrects: ClassVar[bool] = True
    sums_only: ClassVar[bool] = True

    def __init__(self, mu: float = 0.01) -> None:
        super().__init__()
        self._mu = mu

    def correct(self, client: int, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        """The gradient of the distance is mu times the way that was gone."""
        del client
        for parameter, begun in zip(parameters, start, strict=False):  # buffers come after the parameters
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - begun, alpha=self._mu)
