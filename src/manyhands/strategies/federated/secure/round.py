"""A whole secure round in memory, on encoded bytes: used by the simulation, and by tests in which clients leave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from manyhands.strategies.federated.secure.fixedpoint import Words
from manyhands.strategies.federated.secure.primitives import Draw, public_identity
from manyhands.strategies.federated.secure.secure_client import SecureClient, SecureStage
from manyhands.strategies.federated.secure.secure_messages import SecureTerms
from manyhands.strategies.federated.secure.secure_server import SecureServer

__all__ = ["SecureSum", "play_round"]


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
            answer = _answer(clients[client], stage, letter, inputs)
            sent[client] += len(answer)
            messages += 1
            server.receive(client, answer)
        letters = server.advance()
    return SecureSum(
        words=server.result(), survivors=server.survivors, messages=messages, sent=sent, received=received
    )


def _answer(client: SecureClient, stage: SecureStage, letter: bytes, inputs: Mapping[int, Words]) -> bytes:
    if stage is SecureStage.ADVERTISE:
        return client.advertise()
    if stage is SecureStage.SHARE:
        return client.share(letter)
    if stage is SecureStage.MASK:
        return client.mask(letter, inputs[client.number])
    return client.confirm(letter) if stage is SecureStage.CONFIRM else client.unmask(letter)
