"""Rounds of secure aggregation for tests: clients with known numbers, random bytes that repeat, and leavers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import count

import numpy as np

from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.strategies.federated.secure.primitives import Draw, public_identity
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
        self.letters: Mapping[int, bytes] = dict.fromkeys(numbers, b"")

    def client(self, number: int, model: bytes = MODEL, terms: SecureTerms | None = None) -> SecureClient:
        return SecureClient(
            number, self.identities[number], self.roster, terms or self.terms, model, self.draw
        )

    def answer(self, number: int, letter: bytes) -> bytes:
        client = self.clients[number]
        if client.stage is SecureStage.ADVERTISE:
            return client.advertise()
        if client.stage is SecureStage.SHARE:
            return client.share(letter)
        if client.stage is SecureStage.MASK:
            return client.mask(letter, self.inputs[number])
        return client.confirm(letter) if client.stage is SecureStage.CONFIRM else client.unmask(letter)

    def play(self, until: SecureStage, leaves: Mapping[int, SecureStage] | None = None) -> None:
        """Everybody answers, but those who have left, until the server is at `until`."""
        going = leaves or {}
        while self.server.stage < until:
            stage = self.server.stage
            for number, letter in self.letters.items():
                if going.get(number, SecureStage.DONE) > stage:
                    answer = self.answer(number, letter)
                    self.transcript.append(answer)
                    self.server.receive(number, answer)
            self.letters = self.server.advance()
            self.transcript += self.letters.values()

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
