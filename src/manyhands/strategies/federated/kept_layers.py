"""Layers that stay with each client: `keep=head` is the personal head of FedPer, `keep=*norm*` is FedBN.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019; Li et al., "FedBN", ICLR 2021. A client
starts with its local tensors in place of the server's, sends all others, and keeps the local ones. The server's
copies stay at their initial values, for clients that have never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.client_updates import TallySum
from manyhands.strategies.federated.states import ClientStates

__all__ = ["EVERYTHING_SHARED", "LocalLayers", "local_names"]

EVERYTHING_SHARED = "none"
"""The setting with which nothing stays."""


def local_names(names: Sequence[str], patterns: str) -> frozenset[int]:
    """Which of the tensors the patterns reach (separated by commas), by name or by that of a module they are in.

    UserError where one reaches nothing, or where nothing would be shared.
    """
    found: set[int] = set()
    for pattern in patterns.split(",") if patterns != EVERYTHING_SHARED else ():
        reached = {at for at, name in enumerate(names) if _reaches(pattern, name)}
        if not reached:
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise UserError(f"keep={patterns}: nothing of the model is called {pattern!r}; there are {shown}")
        found |= reached
    if found and len(found) == len(names):
        raise UserError(
            f"keep={patterns}: that is the whole model, and nothing would be shared; name fewer layers"
        )
    return frozenset(found)


def _reaches(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))


class LocalLayers:
    """The layers that stay on the clients of a run; by default none."""

    def __init__(self, names: Sequence[str] = (), patterns: str = EVERYTHING_SHARED) -> None:
        self._local = local_names(names, patterns)
        self.states: ClientStates = {}

    def kept(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """What is like a client's own."""
        return [weights[at] for at in sorted(self._local)]

    def put(self, client: int, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """These weights, with the client's own in their places."""
        if client not in self.states:
            return weights
        own = dict(zip(sorted(self._local), self.states[client], strict=True))
        return [own.get(at, one) for at, one in enumerate(weights)]

    def keep(self, client: int, trained: Sequence[Tensor]) -> None:
        """Its own from what it has trained; what it had before where a number is not finite."""
        own = self.kept(trained)
        if own and all(bool(one.isfinite().all()) for one in own):
            self.states[client] = [one.detach().clone() for one in own]

    def shared(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What travels of an update."""
        return [one for at, one in enumerate(tensors) if at not in self._local] if self._local else tensors

    def whole(self, found: TallySum, like: Sequence[Tensor]) -> TallySum:
        """What came of an update, as if what stayed had not changed."""
        if not self._local:
            return found
        updates = [replace(one, change=self._filled(one.change, like)) for one in found.updates]
        return replace(found, sums=self._filled(found.sums, like), updates=updates)

    def _filled(self, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        return [
            torch.zeros_like(one, dtype=torch.float64) if at in self._local else next(rest)
            for at, one in enumerate(like)
        ]
