"""A simulated round by the secure protocol, on encoded bytes: what each client masks, the server's result, the cost.

Bonawitz et al. (CCS 2017) count for one of n users with m words modulo R: 2n public keys, 5n - 4 shares, the vector,
2n·|key| + (5n - 4)·|share| + m⌈log₂ R⌉ bits. That is the protocol against a server that is curious but honest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from manyhands.engine.exchange import Traffic
from manyhands.errors import NonFinite
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum, shaped
from manyhands.strategies.federated.secure.fixedpoint import LOSS_ITEMS, FixedPoint, Words, sum_of, words_of
from manyhands.strategies.federated.secure.primitives import (
    KEY_BYTES,
    SEAL_BYTES,
    SHARE_BYTES,
    SIGNATURE_BYTES,
    Draw,
    public_identity,
)
from manyhands.strategies.federated.secure.secure_client import SecureClient, SecureStage
from manyhands.strategies.federated.secure.secure_messages import SecureTerms, fewest_clients
from manyhands.strategies.federated.secure.secure_server import RoundAbandoned, SecureServer

__all__ = ["SecureTally", "hash_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SecureSum:
    """The result of a secure round, and its cost."""

    words: Words
    """The sum of the survivors' words."""
    survivors: tuple[int, ...]
    """Whose inputs are in it."""
    messages: int
    """How many the clients sent."""
    sent: Mapping[int, int]
    """Bytes that each client sent."""
    received: Mapping[int, int]
    """Bytes that each client received."""


def play_round(
    terms: SecureTerms,
    identities: Mapping[int, bytes],
    inputs: Mapping[int, Words],
    model: bytes,
    *,
    leaves: Mapping[int, SecureStage] | None = None,
    draw: Draw = os.urandom,
) -> SecureSum:
    """The sum of the inputs of all clients that stay; `identities` are their Ed25519 secrets.

    A client leaves at the stage that `leaves` says, before it answers, or before it masks if it has no input.
    RoundAbandoned where too few are left.
    """
    roster = {client: public_identity(secret) for client, secret in identities.items()}
    clients = {
        client: SecureClient(client, secret, roster, terms, model, draw)
        for client, secret in identities.items()
    }
    server = SecureServer(terms, roster, model)
    going = {client: SecureStage.MASK for client in identities if client not in inputs} | dict(leaves or {})
    sent, received, messages = dict.fromkeys(identities, 0), dict.fromkeys(identities, 0), 0
    letters: Mapping[int, bytes] = dict.fromkeys(identities, b"")
    while server.stage < SecureStage.DONE:
        stage = server.stage
        for client, letter in sorted(letters.items()):
            received[client] += len(letter)
            if going.get(client, SecureStage.DONE) <= stage:
                continue
            party = clients[client]
            if stage is SecureStage.ADVERTISE:
                answer = party.advertise()
            elif stage is SecureStage.MASK:
                answer = party.mask(letter, inputs[client])
            else:
                steps = {SecureStage.SHARE: party.share, SecureStage.CONFIRM: party.confirm}
                answer = steps.get(stage, party.unmask)(letter)
            sent[client] += len(answer)
            messages += 1
            server.receive(client, answer)
        letters = server.advance()
    return SecureSum(
        words=server.result(), survivors=server.survivors, messages=messages, sent=sent, received=received
    )


MESSAGES: Final = 5
"""That a client sends in a round, and receives."""
_NUMBER: Final = 4


def published_bits(clients: int, items: int, ring: int, key: int = 256, share: int = 256) -> int:
    """What one client sends and receives by the published formula, in bits."""
    return 2 * clients * key + (5 * clients - 4) * share + items * ring


def client_bytes(terms: SecureTerms) -> int:
    """What one client sends and receives in a round that nobody leaves.

    On top of the formula, with our sizes of keys and shares: signatures, the digests that bind a round, the seals of
    shares, and the numbers of clients and rows.
    """
    n = terms.clients
    published = published_bits(n, terms.length, terms.fixed.ring, 8 * KEY_BYTES, 8 * SHARE_BYTES) // 8
    signatures = 2 * n * SIGNATURE_BYTES + SIGNATURE_BYTES + SIGNATURE_BYTES
    digests = (n + 1) * 3 * KEY_BYTES + 2 * KEY_BYTES
    seals = 2 * (n - 1) * SEAL_BYTES
    return published + signatures + digests + seals + _numbers(n)


def _numbers(clients: int) -> int:
    advertised = 1 + (1 + clients)
    shares = 2 * (1 + clients - 1)
    survivors = 2 + clients
    request = survivors + 1 + clients
    reply = 2 + clients
    return _NUMBER * (advertised + shares + survivors + request + reply)


def hash_of(weights: Sequence[Tensor]) -> bytes:
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
