"""Algorithms whose clients keep something from round to round: SCAFFOLD and Ditto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import TallySum

__all__ = ["Ditto", "Scaffold"]


class Scaffold(FederatedAlgorithm):
    """SCAFFOLD: control variates correct for client drift; an update is twice as large."""

    word: ClassVar[str] = "scaffold"
    about: ClassVar[str] = "clients correct each step by how their data differs from all data"
    corrects: ClassVar[bool] = True
    models_kept: ClassVar[int] = 1
    cannot_keep_layers: ClassVar[str] = "its clients correct every layer by what all clients send of it"

    def __init__(self) -> None:
        super().__init__()
        self._server: list[Tensor] = []  # c
        self._before: dict[int, Sequence[Tensor]] = {}  # by client that trains: c_i
        self._met: dict[int, list[Tensor]] = {}  # and the sum of its gradients
        self._coming: dict[int, Sequence[Tensor]] = {}  # by client that has reported: c_i⁺, until c follows

    def sent(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return [*weights, *weights[: self.facts.parameters]]

    def kept(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return weights[: self.facts.parameters]

    def begin(self, client: int, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take the client's control variate out; zero before its first round."""
        like = self.kept(weights)
        self._begin_server(like)
        self._before[client] = self.states.get(client) or [torch.zeros_like(one) for one in like]
        self._met[client] = [torch.zeros_like(one) for one in like]
        return weights

    def correct(self, client: int, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        """Note the gradient, then add c - c_i."""
        del start
        noted, before = self._met[client], self._before[client]
        for parameter, met, mine, common in zip(parameters, noted, before, self._server, strict=True):
            if parameter.grad is not None:
                met.add_(parameter.grad)
                parameter.grad.add_(common).sub_(mine)

    def report(
        self, client: int, start: Sequence[Tensor], trained: Sequence[Tensor], steps: int
    ) -> Sequence[Tensor]:
        """How far weights and control variate came; the new one is kept when the round counts."""
        change = super().report(client, start, trained, steps)
        after = [met / steps for met in self._met.pop(client)]
        before = self._before.pop(client)
        self._coming[client] = after
        return [*change, *(new - old for new, old in zip(after, before, strict=True))]

    def refused(self, client: int) -> None:
        """Its control variate stays, since c does not follow."""
        self._coming.pop(client, None)

    def mean(self, found: TallySum) -> Sequence[Tensor]:
        """The mean; changes of control variates are averaged over all clients, and those not asked count as zero."""
        mean = super().mean(found)
        tensors = len(mean) - self.facts.parameters
        return [*mean[:tensors], *(one * (found.weight / self.facts.weight) for one in mean[tensors:])]

    def step(self, weights: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
        """The model by its mean, and c by the other; clients keep theirs."""
        super().step(weights, mean[: len(weights)])
        self._begin_server(self.kept(weights))
        for common, change in zip(self._server, mean[len(weights) :], strict=True):
            common.add_(change)
        for client, after in self._coming.items():
            self.keep(client, after)
        self._coming.clear()

    def _begin_server(self, like: Sequence[Tensor]) -> None:
        if not self._server:
            self._server = [torch.zeros_like(one) for one in like]

    def memory(self) -> Mapping[str, Any]:
        return {"server": self._server} if self._server else {}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        self._server = list(memory.get("server", ()))


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
        return weights

    def personal(self, client: int, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.states.get(client, weights)

    def correct_personal(self, client: int, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        del client
        for parameter, common in zip(parameters, weights, strict=False):  # buffers come after the parameters
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - common, alpha=self._hold)

    def keep_personal(self, client: int, trained: Sequence[Tensor]) -> None:
        self.keep(client, trained)
