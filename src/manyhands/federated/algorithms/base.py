"""What an algorithm says: how a client's steps differ from plain ones, and what the server makes of the updates.

server ── weights ──►  client: steps on its own data, each gradient by way of `correct`
       ◄── ClientUpdate ───  how far it came, and how many samples it has
`Sum` adds updates up, each by its weight; `step` moves the model by their mean
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

__all__ = ["ClientUpdate", "FederatedAlgorithm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientUpdate:
    """What a client sends: how far each tensor has come, what it weighs, and how many steps it took."""

    client: int
    change: Sequence[Tensor]
    samples: int
    steps: int
    loss: float
    """The mean over its steps."""


class FederatedAlgorithm(ABC):
    """Federated averaging; others change the parts that they name.

    Tensors come in the order of the model's parameters, then its floating-point buffers.
    """

    word: ClassVar[str]
    about: ClassVar[str]
    whole_batches: ClassVar[bool] = False
    """Whether a client takes one step on all of its data, whatever `epochs` and `batch` say."""

    corrects: ClassVar[bool] = False
    """Whether `correct` changes gradients."""

    def correct(self, client: int, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:  # noqa: B027
        """On a client, between backward and its optimizer's step: change the gradients in place."""

    def weight(self, update: ClientUpdate) -> float:
        """What an update weighs in the mean."""
        return float(update.samples)

    def step(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        """On the server: move the weights by the mean of the updates, in place."""
        for weight, change in zip(weights, mean, strict=True):
            weight.add_(change)

    def memory(self) -> Mapping[str, Any]:
        """What the server keeps from round to round, for a checkpoint."""
        return {}

    def recall(self, memory: Mapping[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Go on with what `memory` gave."""
