"""The tallies of a simulation: a plain sum over the workers, every update by itself, or the secure protocol's sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.federated.algorithms import FederatedAlgorithm
from manyhands.federated.privacy.rounds import PrivateRounds
from manyhands.federated.privacy.tally import PrivateTally
from manyhands.federated.secure.tally import SecureTally
from manyhands.federated.strategy import Federated
from manyhands.federated.updates import (
    ClientUpdate,
    RoundPlace,
    RoundTally,
    TallySum,
    WeighedUpdate,
    shaped,
)
from manyhands.training.exchange import Traffic

__all__ = ["KeptTally", "PlainTally", "Total", "tally_for"]

Total = Callable[[Tensor], Tensor]
"""Collective: the sum of a flat float64 tensor over the workers."""


def tally_for(
    strategy: Federated,
    algorithm: FederatedAlgorithm,
    place: RoundPlace,
    weights: Sequence[Tensor],
    like: Sequence[Tensor],
    private: PrivateRounds | None = None,
) -> RoundTally:
    """What collects updates of tensors like these in a round, whose clients each worker asks in the same order."""

    def summing(like: Sequence[Tensor]) -> RoundTally:
        if strategy.secure:
            return SecureTally(strategy.fixed_point, place.clients, weights, number=place.number, like=like)
        if algorithm.single_updates:
            return KeptTally(place.total, place.clients, like)
        return PlainTally(place.total, like)

    return summing(like) if private is None else PrivateTally(summing, private, like, place)


class PlainTally:
    """Adds up in double precision, so that it hardly matters who played which client."""

    def __init__(self, total: Total, like: Sequence[Tensor]) -> None:
        self._total = total
        self._sums = [torch.zeros_like(one, dtype=torch.float64) for one in like]
        self._weight = 0.0
        self._loss = 0.0
        self._sent = Traffic()

    def add(self, update: ClientUpdate, weight: float) -> None:
        """To this worker's sum."""
        self._sent += Traffic(messages_sent=1, bytes_sent=update.num_bytes)
        for total_of, change in zip(self._sums, update.change, strict=True):
            total_of.add_(change, alpha=weight)
        self._weight += weight
        self._loss += weight * update.loss

    def total(self) -> TallySum:
        """Over all workers."""
        words = torch.tensor([self._weight, self._loss], dtype=torch.float64)
        found = self._total(torch.cat([*(one.flatten().cpu() for one in self._sums), words]))
        return TallySum(
            sums=shaped(found[:-2], self._sums),
            weight=float(found[-2]),
            loss=float(found[-1]),
            traffic=self._sent,
        )


class KeptTally:
    """Keeps every update: each worker gets all, in the order of the round's clients."""

    def __init__(self, total: Total, clients: Sequence[int], like: Sequence[Tensor]) -> None:
        self._total = total
        self._clients = clients
        self._like = like
        self._mine: dict[int, tuple[ClientUpdate, float]] = {}
        self._sent = Traffic()

    def add(self, update: ClientUpdate, weight: float) -> None:
        """Kept until the round's end."""
        self._sent += Traffic(messages_sent=1, bytes_sent=update.num_bytes)
        self._mine[update.client] = (update, weight)

    def total(self) -> TallySum:
        """One client after another: who played it gives its update, and the others give zeros."""
        items = sum(one.numel() for one in self._like)
        found: list[WeighedUpdate] = []
        weight, loss = 0.0, 0.0
        for client in self._clients:
            flat = self._total(self._row(client, items))
            if not float(flat[-2]):
                continue  # its update was not finite
            change = [
                one.to(mine.dtype)
                for one, mine in zip(shaped(flat[:-2], self._like), self._like, strict=True)
            ]
            found.append(WeighedUpdate(client=client, change=change, weight=float(flat[-2])))
            weight, loss = weight + float(flat[-2]), loss + float(flat[-1])
        sums = [torch.zeros_like(one, dtype=torch.float64) for one in self._like]
        for each in found:
            for total_of, change_of in zip(sums, each.change, strict=True):
                total_of.add_(change_of, alpha=each.weight)
        return TallySum(
            sums=sums,
            weight=weight,
            loss=loss,
            traffic=self._sent,
            updates=found,
            missing=len(self._clients) - len(found),
        )

    def _row(self, client: int, items: int) -> Tensor:
        if client not in self._mine:
            return torch.zeros(items + 2, dtype=torch.float64)
        update, weight = self._mine[client]
        words = torch.tensor([weight, weight * update.loss], dtype=torch.float64)
        return torch.cat([*(one.detach().flatten().to("cpu", torch.float64) for one in update.change), words])
