"""The clients of a simulated round, summed by the protocol: what each would mask, and what the server makes of it.

A client's vector is its update, its mean loss and its weight, so that nobody is known alone. The loss is
two items, its whole part and the rest, since the range of updates would not hold it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import NonFinite, UserError
from manyhands.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.federated.secure.messages import SecureTerms, fewest_clients
from manyhands.federated.secure.round import play_round
from manyhands.federated.secure.server import RoundAbandoned
from manyhands.federated.updates import ClientUpdate, TallySum
from manyhands.training.exchange import Traffic

__all__ = ["SecureTally", "hash_of", "terms_for"]

_LOSS_ITEMS = 2


def hash_of(weights: Sequence[Tensor]) -> bytes:
    """SHA-256 of a model's tensors: shapes, types and bytes."""
    found = hashlib.sha256()
    for one in weights:
        found.update(f"{one.dtype} {tuple(one.shape)};".encode())
        found.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()


def terms_for(fixed: FixedPoint, clients: int, items: int) -> SecureTerms:
    """Of a round of so many clients with updates of so many items; UserError where that is not safe."""
    return SecureTerms(
        round_id=os.urandom(32),
        clients=clients,
        threshold=fewest_clients(clients),
        length=items + _LOSS_ITEMS + 1,
        fixed=fixed,
    )


class SecureTally:
    """One round's inputs."""

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
        if weight != int(weight) or weight < 1:
            raise UserError(
                f"secure=yes: client {update.client} weighs {weight:g}; only whole numbers of at least 1 are summed"
            )
        flat = torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in update.change]).numpy()
        whole = math.floor(update.loss)
        loss = [whole * self._fixed.step, (update.loss - whole) * self._fixed.clip]
        self._inputs[update.client] = self._fixed.encode(np.append(flat, loss), int(weight))

    def total(self) -> TallySum:
        """The sum; who was not added has left before it masked. NonFinite if too few have not."""
        try:
            found = play_round(self._terms, self._identities, self._inputs, self._model)
        except RoundAbandoned as error:
            raise NonFinite(
                f"round {self._number + 1} was abandoned, and the model was not changed: {error}; clients leave "
                "whose update is not finite"
            ) from error
        items, weight = self._fixed.decode(found.words)
        flat = torch.from_numpy(items.astype(np.float64) * np.float64(self._fixed.step))[:-_LOSS_ITEMS]
        whole, rest = (float(one) for one in items[-_LOSS_ITEMS:])
        pieces = torch.split(flat, [one.numel() for one in self._like])
        return TallySum(
            sums=[
                piece.view(one.shape).to(one.device) for piece, one in zip(pieces, self._like, strict=True)
            ],
            weight=float(weight),
            loss=whole + rest / self._fixed.most,
            traffic=Traffic(messages_sent=found.messages, bytes_sent=sum(found.sent.values())),
        )
