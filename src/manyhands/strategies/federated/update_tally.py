"""The tally of a simulated round: updates summed, kept one by one, or summed with privacy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manyhands.engine.exchange import Traffic
from manyhands.strategies.federated.algorithms import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import (
    ClientUpdate,
    RoundPlace,
    RoundTally,
    TallySum,
    WeighedUpdate,
    shaped,
)
from manyhands.strategies.federated.norms import ClassSums, norm_class
from manyhands.strategies.federated.privacy.private_rounds import PrivateRounds
from manyhands.strategies.federated.privacy.update_clipping import clipped
from manyhands.strategies.federated.secure.secure_tally import SecureTally
from manyhands.strategies.federated.strategy import Federated

__all__ = ["tally_for"]

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
        return PlainTally(place.total, like, by_norm=strategy.seen_norm_ratio > 0)

    return summing(like) if private is None else PrivateTally(summing, private, like, place)


class PlainTally:
    """Sums updates in double precision, so that it hardly matters which worker simulated which client."""

    def __init__(self, total: Total, like: Sequence[Tensor], *, by_norm: bool = True) -> None:
        self._total = total
        self._sums = ClassSums(like, by_norm=by_norm)
        self._sent = Traffic()

    def add(self, update: ClientUpdate, weight: float) -> None:
        self._sent += Traffic(messages_sent=1, bytes_sent=update.num_bytes)
        self._sums.add(update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        """Collective: the sum over all workers."""
        mine = self._sums.total(largest)
        words = torch.tensor([mine.weight, mine.loss], dtype=torch.float64)
        found = self._total(torch.cat([*(one.flatten().cpu() for one in mine.sums), words]))
        return TallySum(
            sums=shaped(found[:-2], mine.sums),
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
        self._sent += Traffic(messages_sent=1, bytes_sent=update.num_bytes)
        self._mine[update.client] = (update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        """Collective: share one client's update after another; the worker that simulated it adds it, others zeros."""
        if largest is not None:
            self._mine = {
                client: one for client, one in self._mine.items() if norm_class(one[0].norm) <= largest
            }
        items = sum(one.numel() for one in self._like)
        found: list[WeighedUpdate] = []
        weight, loss = 0.0, 0.0
        for client in self._clients:
            flat = self._total(self._row(client, items))
            if not float(flat[-2]):
                continue  # its update was not finite, or its norm too large
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


class PrivateTally:
    """The tally of one round of a private run."""

    def __init__(
        self,
        inside: Callable[[Sequence[Tensor]], RoundTally],
        rounds: PrivateRounds,
        like: Sequence[Tensor],
        place: RoundPlace,
    ) -> None:
        self._rounds, self._like, self._place = rounds, like, place
        self._noise = rounds.noise
        self._items = sum(one.numel() for one in like)
        self._inside = inside([torch.zeros(self._items + int(self._noise.adapts), dtype=torch.float64)])

    def add(self, update: ClientUpdate, weight: float) -> None:
        del weight
        rounds, noise = self._rounds, self._noise
        flat, within = clipped(update.change, noise.bound)
        vector = noise.vector(flat, within)
        if rounds.step:
            draws = rounds.client_draws(self._place.number, update.client)
            vector = torch.from_numpy(noise.in_steps(vector, rounds.step, rounds.fewest, draws) * rounds.step)
        sent = replace(update, change=[vector], loss=0.0, samples=1, encoded_bytes=update.num_bytes)
        self._inside.add(sent, 1.0)

    def total(self, largest: int | None = None) -> TallySum:
        """Collective: the noisy sum; what the round cost is counted, and the next one's bound is set."""
        del largest  # the clip bounds every norm
        rounds, place = self._rounds, self._place
        rounds.take(place.clients)
        found = self._inside.total()
        row = self._noised(found.sums[0].cpu())
        if self._noise.adapts:
            rounds.follow(self._noise.share_within(float(row[-1]), rounds.cohort))
        sums = shaped(row[: self._items], self._like)
        return TallySum(sums=sums, weight=rounds.cohort, loss=math.nan, traffic=found.traffic)

    def _noised(self, row: Tensor) -> Tensor:
        """With the server's noise, which worker 0 draws for all."""
        draws = self._rounds.server_draws(self._place.number)
        if draws is None:
            return row
        if self._place.rank:
            row.zero_()
        else:
            self._noise.add(row, draws)
        return self._place.total(row)
