"""The norms of a simulated round's updates: workers exchange those of the clients that they simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.norms import (
    described_clients,
    described_norms,
    largest_class,
    rejected_by_norm,
)

__all__ = ["RoundNorms"]


class RoundNorms:
    """One worker's view of the norms of a round; with a ratio of 0 norms are not checked."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._mine: dict[int, float] = {}
        self._all: dict[int, float] = {}
        self.rejected: dict[int, float] = {}
        """Whose updates of this round do not count, and their norms."""
        self.total_rejected = 0
        """Rejected updates of clients that this worker simulated, over all rounds."""

    def begin_round(self) -> None:
        """Forget the round before."""
        self._mine, self._all, self.rejected = {}, {}, {}

    def add(self, update: ClientUpdate) -> None:
        """One that would count."""
        if self._ratio:
            self._mine[update.client] = update.norm

    def judge(self, clients: Sequence[int], total: Callable[[Tensor], Tensor]) -> int | None:
        """Collective: which updates are rejected; returns the largest class of norms that counts, if there is one.

        `clients` are those of the round, in the same order on every worker.
        """
        if not self._ratio:
            return None
        place = {client: at for at, client in enumerate(clients)}
        rows = torch.zeros(2, len(place), dtype=torch.float64)  # whether an update came, and its norm
        for client, norm in self._mine.items():
            rows[:, place[client]] = torch.tensor([1.0, norm], dtype=torch.float64)
        came, norms = total(rows.flatten()).view(2, -1).tolist()
        self._all = {client: norms[at] for client, at in place.items() if came[at]}
        self.rejected = {client: self._all[client] for client in rejected_by_norm(self._all, self._ratio)}
        self.total_rejected += len(self.rejected_here)
        return largest_class(self._all.values(), self._ratio)

    @property
    def rejected_here(self) -> list[int]:
        """The rejected updates of clients that this worker simulated."""
        return [client for client in self.rejected if client in self._mine]

    def describe(self, clients: Sequence[int]) -> str:
        """What the round was made of, where these clients took part."""
        if not self._ratio:
            return f"{described_clients(clients) or 'its clients'}, whose norms were not looked at"
        return described_norms({one: norm for one, norm in self._all.items() if one not in self.rejected})
