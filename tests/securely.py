"""Rounds of secure aggregation for tests: clients with known numbers, random bytes that repeat, and leavers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import count

import numpy as np

from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.strategies.federated.secure.primitives import (
    KEY_BYTES,
    SEAL_BYTES,
    SHARE_BYTES,
    SIGNATURE_BYTES,
    Draw,
    public_identity,
)
from manyhands.strategies.federated.secure.secure_messages import SecureTerms, fewest_clients
from manyhands.strategies.federated.secure.secure_protocol import SecureClient, SecureServer, SecureStage

MODEL = hashlib.sha256(b"the model").digest()


def drawing(seed: int) -> Draw:
    """Bytes that look random, and are the same in every run."""
    stream = _hashes(seed)

    def draw(num_bytes: int) -> bytes:
        found = b""
        while len(found) < num_bytes:
            found += next(stream)
        return found[:num_bytes]

    return draw


def _hashes(seed: int) -> Iterator[bytes]:
    return (hashlib.sha256(f"{seed} {turn}".encode()).digest() for turn in count())


class Party:
    """A server and its clients, with the stage-by-stage play that `play_round` does at once."""

    def __init__(self, clients: int, items: int = 5, *, seed: int = 0, **fixed: object) -> None:
        draw = drawing(seed)
        random = np.random.default_rng(seed)
        self.terms = SecureTerms(
            round_id=draw(32),
            clients=clients,
            threshold=fewest_clients(clients),
            length=items + 1,
            fixed=FixedPoint(**{"clip": 1.0, "bits": 16, "max_weight": 100, "ring": 64, **fixed}),  # type: ignore[arg-type]
        )
        numbers = range(3, 3 + 2 * clients, 2)
        self.identities = {client: draw(32) for client in numbers}
        self.roster = {client: public_identity(secret) for client, secret in self.identities.items()}
        self.updates = {client: random.uniform(-1.2, 1.2, items) for client in numbers}
        self.weights = {client: int(random.integers(1, 120)) for client in numbers}
        self.inputs: Mapping[int, Words] = {
            client: self.terms.fixed.encode(self.updates[client], self.weights[client]) for client in numbers
        }
        self.draw = draw
        self.clients = {client: self.client(client) for client in numbers}
        self.server = SecureServer(self.terms, self.roster, MODEL)
        self.transcript: list[bytes] = []
        self.messages: Mapping[int, bytes] = dict.fromkeys(numbers, b"")

    def client(self, number: int, model: bytes = MODEL, terms: SecureTerms | None = None) -> SecureClient:
        return SecureClient(
            number, self.identities[number], self.roster, terms or self.terms, model, self.draw
        )

    def answer(self, number: int, message: bytes) -> bytes:
        client = self.clients[number]
        if client.stage is SecureStage.ADVERTISE:
            return client.advertise()
        if client.stage is SecureStage.SHARE:
            return client.share(message)
        if client.stage is SecureStage.MASK:
            return client.mask(message, self.inputs[number])
        return client.confirm(message) if client.stage is SecureStage.CONFIRM else client.unmask(message)

    def play(self, until: SecureStage, leaves: Mapping[int, SecureStage] | None = None) -> None:
        """Everybody answers, but those who have left, until the server is at `until`."""
        going = leaves or {}
        while self.server.stage < until:
            stage = self.server.stage
            for number, message in self.messages.items():
                if going.get(number, SecureStage.DONE) > stage:
                    answer = self.answer(number, message)
                    self.transcript.append(answer)
                    self.server.receive(number, answer)
            self.messages = self.server.advance()
            self.transcript += self.messages.values()

    def plain_sum(self, survivors: tuple[int, ...]) -> list[int]:
        """By Python's own integers: what the sum of these clients must be."""
        fixed = self.terms.fixed
        found = [0] * self.terms.length
        for client in survivors:
            weight = min(self.weights[client], fixed.max_weight)
            step = fixed.clip / (2 ** (fixed.bits - 1) - 1)
            row = [
                weight * round(max(-fixed.clip, min(fixed.clip, float(x))) / step)
                for x in self.updates[client]
            ]
            found = [a + b for a, b in zip(found, [*row, weight], strict=True)]
        return found


# Bonawitz et al. (CCS 2017) count for one of n users with m words modulo R: 2n public keys, 5n - 4 shares, the vector,
# 2n·|key| + (5n - 4)·|share| + m⌈log₂ R⌉ bits. That is the protocol against a server that is curious but honest.
MESSAGES = 5  # that a client sends in a round, and receives
_NUMBER = 4


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
