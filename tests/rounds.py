"""Federated rounds in this process, without a run around them: what the exchange does, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

import manyhands as mh
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.exchange import LocalStep, Traffic
from manyhands.strategies.federated.exchange import FederatedExchange
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Played:
    """What came of it."""

    model: nn.Module
    exchange: FederatedExchange
    losses: list[float]

    @property
    def traffic(self) -> Traffic:
        """Of all clients."""
        return self.exchange.meter.traffic()


def play_rounds(
    task: mh.Task,
    words: str,
    rounds: int,
    after: Played | None = None,
    seed: int = 0,
    *,
    autocast: bool = False,
) -> Played:
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
        exchange.kept.load(after.exchange.kept.gather())
    losses = list(after.losses) if after is not None else []
    plan = TrainingPlan(
        task=task, steps=rounds, seed=seed, evaluate_every=1, checkpoint_every=0, autocast=autocast
    )
    computer = Computer(plan, 0)
    for step in range(begin, begin + rounds):
        computed = exchange.compute(computer, model, step)
        agreed = exchange.agree(LocalStep(loss=computed.loss, share=computed.share, step=step))
        exchange.apply()
        losses.append(agreed.loss)
    return Played(model=model, exchange=exchange, losses=losses)
