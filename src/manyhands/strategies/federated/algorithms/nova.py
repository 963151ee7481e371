"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem", NeurIPS 2020).

A client that takes more steps goes further, and a plain mean follows it more than its samples say. Here the mean is of
how far clients come per step, and the model goes as many such steps as they took on average:

    d_i = Δw_i / K_i      K = Σ p_i K_i      w ← w + K Σ p_i d_i      p_i: the client's part of the round's samples

K_i is the number of its steps, which is right for plain SGD; for an optimizer with momentum the paper counts otherwise.
What is sent is K_i by the most steps that any client takes, so that a secure sum, which clips, has room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm

__all__ = ["FedNova"]


class FedNova(FederatedAlgorithm):
    """FedAvg whose clients count by their samples, however many steps they took; buffers are averaged as they are."""

    word: ClassVar[str] = "fednova"
    about: ClassVar[str] = "FedAvg that divides each update by its number of steps"

    def sent(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """The model's, and one number: the steps, by the most that any client takes."""
        return [*weights, torch.zeros(1, dtype=torch.float64)]

    def report(
        self, client: int, start: Sequence[Tensor], trained: Sequence[Tensor], steps: int
    ) -> Sequence[Tensor]:
        """How far each parameter came per step."""
        change = super().report(client, start, trained, steps)
        parameters = self.facts.parameters
        return [
            *(one / steps for one in change[:parameters]),
            *change[parameters:],
            torch.tensor([steps / self.facts.most_steps], dtype=torch.float64),
        ]

    def step(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        """As many mean steps as clients took on average."""
        taken, parameters = float(mean[-1]) * self.facts.most_steps, self.facts.parameters
        scaled = [one * taken for one in mean[:parameters]]
        super().step(weights, [*scaled, *mean[parameters:-1]])
