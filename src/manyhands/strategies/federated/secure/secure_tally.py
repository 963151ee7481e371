"""The tally of a simulated round by the secure protocol: what each client would mask, and the server's result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.engine.exchange import Traffic
from manyhands.errors import NonFinite
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum, shaped
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.strategies.federated.secure.masked_vectors import LOSS_ITEMS, sum_of, words_of
from manyhands.strategies.federated.secure.round import play_round
from manyhands.strategies.federated.secure.secure_messages import SecureTerms, fewest_clients
from manyhands.strategies.federated.secure.secure_server import RoundAbandoned

__all__ = ["SecureTally", "hash_of", "terms_for"]


def hash_of(weights: Sequence[Tensor]) -> bytes:
    """SHA-256 of a model's tensors: shapes, types and bytes."""
    found = hashlib.sha256()
    for one in weights:
        found.update(f"{one.dtype} {tuple(one.shape)};".encode())
        found.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()


def terms_for(fixed: FixedPoint, clients: int, items: int) -> SecureTerms:
    """Terms of a round of so many clients with updates of so many items; UserError where that is not safe."""
    return SecureTerms(
        round_id=os.urandom(32),
        clients=clients,
        threshold=fewest_clients(clients),
        length=items + LOSS_ITEMS + 1,
        fixed=fixed,
    )


class SecureTally:
    """The tally of one round: keeps the inputs that clients would mask, and sums them by the protocol."""

    def __init__(
        self,
        fixed: FixedPoint,
        clients: Sequence[int],
        weights: Sequence[Tensor],
        *,
        number: int = 0,
        like: Sequence[Tensor] | None = None,
    ) -> None:
        """Of round `number`, from 0, in which clients begin with `weights` and send tensors of the shapes of `like`."""
        self._fixed = fixed
        self._number = number
        self._like = weights if like is None else like
        self._terms = terms_for(fixed, len(clients), sum(one.numel() for one in self._like))
        self._model = hash_of(weights)
        self._identities = {client: os.urandom(32) for client in clients}
        self._inputs: dict[int, Words] = {}

    def add(self, update: ClientUpdate, weight: float) -> None:
        """What a client would mask; its numbers are finite."""
        self._inputs[update.client] = words_of(self._fixed, update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        """The sum; who was not added has left before it masked. NonFinite if too few have not."""
        del largest  # no norm is seen
        try:
            found = play_round(self._terms, self._identities, self._inputs, self._model)
        except RoundAbandoned as error:
            raise NonFinite(
                f"round {self._number + 1} was abandoned, and the model was not changed: {error}; clients leave "
                "whose update is not finite"
            ) from error
        flat, loss, weight = sum_of(self._fixed, found.words)
        return TallySum(
            sums=shaped(flat, self._like),
            weight=weight,
            loss=loss,
            traffic=Traffic(messages_sent=found.messages, bytes_sent=sum(found.sent.values())),
        )
