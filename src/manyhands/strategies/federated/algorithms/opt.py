"""FedOpt: an adaptive optimizer on the server (Reddi et al., "Adaptive Federated Optimization", ICLR 2021).

    m ← β₁ m + (1 - β₁) Δ      v ← by the algorithm      w ← w + η m / (√v + τ)

Δ is the mean of the updates. As in the paper there is no correction of the bias of m and v, and v begins with τ².
Buffers (running statistics of BatchNorm) are averaged as they are: a mean of variances is one, a step of Adam is not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm

__all__ = ["FedAdagrad", "FedAdam", "FedYogi"]

_BETA_1, _BETA_2, _TAU = 0.9, 0.99, 1e-3


class _FedOpt(FederatedAlgorithm):
    """Base of the three algorithms: momentum, and a second moment per parameter."""

    number: ClassVar[str] = "RATE"
    sums_only: ClassVar[bool] = True
    beta_1: ClassVar[float] = _BETA_1

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        if not rate:
            raise UserError(
                f"algorithm={self.word}:0: a server with a rate of 0 never moves; use a number above 0"
            )
        self._rate = rate
        self._momentum: list[Tensor] = []
        self._second: list[Tensor] = []

    def step(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        """One step of the server's optimizer, the mean in the place of a gradient's opposite; buffers by their mean."""
        assert self.facts.names, "an algorithm is attached before its first step"
        count = self.facts.parameters
        super().step(weights[count:], mean[count:])
        parameters, changes = weights[:count], mean[:count]
        if not self._momentum:
            self._momentum = [torch.zeros_like(weight) for weight in parameters]
            self._second = [torch.full_like(weight, _TAU**2) for weight in parameters]
        for weight, change, momentum, second in zip(
            parameters, changes, self._momentum, self._second, strict=True
        ):
            momentum.mul_(self.beta_1).add_(change, alpha=1 - self.beta_1)
            self._grow(second, change.square())
            weight.addcdiv_(momentum, second.sqrt().add_(_TAU), value=self._rate)

    @abstractmethod
    def _grow(self, second: Tensor, square: Tensor) -> None:
        """Take the square of the mean into the second moment, in place."""

    def memory(self) -> Mapping[str, Any]:
        """Both moments, for a checkpoint."""
        return {"momentum": self._momentum, "second": self._second} if self._momentum else {}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        """Restore both moments."""
        self._momentum = list(memory.get("momentum", ()))
        self._second = list(memory.get("second", ()))


class FedAdam(_FedOpt):
    """FedAdam: the second moment is an exponential moving average."""

    word: ClassVar[str] = "fedadam"
    about: ClassVar[str] = "Adam on the server, with the clients' mean as its gradient"

    def _grow(self, second: Tensor, square: Tensor) -> None:
        second.mul_(_BETA_2).add_(square, alpha=1 - _BETA_2)


class FedYogi(_FedOpt):
    """FedYogi: the second moment moves towards the squared update by a step of the square's size."""

    word: ClassVar[str] = "fedyogi"
    about: ClassVar[str] = "Yogi on the server, which lets its steps grow slowly"

    def _grow(self, second: Tensor, square: Tensor) -> None:
        second.addcmul_(square, torch.sign(second - square), value=-(1 - _BETA_2))


class FedAdagrad(_FedOpt):
    """FedAdagrad: the second moment is the sum of all squares; there is no momentum."""

    word: ClassVar[str] = "fedadagrad"
    about: ClassVar[str] = "Adagrad on the server"
    beta_1: ClassVar[float] = 0.0

    def _grow(self, second: Tensor, square: Tensor) -> None:
        second.add_(square)
