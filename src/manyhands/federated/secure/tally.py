"""The clients of a simulated round, summed by the protocol: what each would mask, and what the server makes of it.

A client's vector is its update, its mean loss and its weight, so that nobody is known alone. The loss is
two items, its whole part and the rest, since the range of updates would not hold it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import NonFinite, UserError
from manyhands.federated.algorithms import ClientUpdate
from manyhands.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.federated.secure.messages import SecureTerms, fewest_clients
from manyhands.federated.secure.round import play_round
from manyhands.federated.secure.server import RoundAbandoned

__all__ = ["SecureTally", "TallySum", "hash_of", "terms_for"]

_LOSS_ITEMS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TallySum:
    """What the server knows after a round."""

    sums: Tensor
    """Of weight times update, all tensors in a row, in double precision."""
    weight: float
    """Of all together."""
    loss: float
    """The sum of weight times mean loss."""
    messages: int
    """That the clients sent."""
    num_bytes: int
    """Of those."""


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

    def __init__(self, fixed: FixedPoint, clients: Sequence[int], weights: Sequence[Tensor]) -> None:
        self._fixed = fixed
        self._terms = terms_for(fixed, len(clients), sum(one.numel() for one in weights))
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

    def total(self, number: int) -> TallySum:
        """The sum of round `number`; who was not added has left before it masked. NonFinite if too few have not."""
        try:
            found = play_round(self._terms, self._identities, self._inputs, self._model)
        except RoundAbandoned as error:
            raise NonFinite(
                f"round {number} was abandoned, and the model was not changed: {error}; clients leave whose update is "
                "not finite"
            ) from error
        items, weight = self._fixed.decode(found.words)
        sums = torch.from_numpy(items.astype(np.float64) * np.float64(self._fixed.step))
        whole, rest = (float(one) for one in items[-_LOSS_ITEMS:])
        return TallySum(
            sums=sums[:-_LOSS_ITEMS],
            weight=float(weight),
            loss=whole + rest / self._fixed.most,
            messages=found.messages,
            num_bytes=sum(found.sent.values()),
        )
