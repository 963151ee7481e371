"""Federated rounds in this process, without a run around them: what the exchange does, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

import manyhands as mh
from manyhands.federated.exchange import FederatedExchange
from manyhands.federated.strategy import Federated
from manyhands.strategy import Strategy
from manyhands.task import Metric
from manyhands.training.computing import Computer
from manyhands.training.exchange import LocalStep, Traffic

__all__ = ["Played", "play_rounds"]


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of it."""

    model: nn.Module
    exchange: FederatedExchange
    losses: list[float]

    @property
    def traffic(self) -> Traffic:
        """Of all clients."""
        return self.exchange.traffic()


class _Task:
    """As much of a `Computer` as rounds ask for."""

    def __init__(self, task: mh.Task) -> None:
        self.task = task

    def measures(self) -> dict[str, Metric]:
        """Nothing but the task's own."""
        return dict(self.task.metrics)

    def slow_down(self, step: int, seconds: float) -> None:
        """Never."""


def play_rounds(task: mh.Task, words: str, rounds: int, after: Played | None = None, seed: int = 0) -> Played:
    """So many rounds; `after`: go on with another exchange where that one stopped, by what it would save."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    exchange = FederatedExchange(cast(Federated, Strategy.parse(words)), seed)
    begin = 0
    if after is not None:
        model.load_state_dict(after.model.state_dict())
        begin = len(after.losses)
    exchange.attach(model, optimizer)
    if after is not None:
        exchange.recall(after.exchange.memory())
    losses = list(after.losses) if after is not None else []
    computer = cast(Computer, _Task(task))
    for step in range(begin, begin + rounds):
        computed = exchange.compute(computer, model, step)
        agreed = exchange.agree(LocalStep(loss=computed.loss, share=computed.share, step=step))
        exchange.apply()
        losses.append(agreed.loss)
    return Played(model=model, exchange=exchange, losses=losses)
