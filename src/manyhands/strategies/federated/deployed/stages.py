"""A secure sum over HTTP requests: the server's state machine, with a deadline for every stage.

A device trains before it sends its first message, so the first stage lasts as long as a round does, and each of the
others only as long as messages take. A message that a device repeats because it missed the answer is answered again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands.strategies.federated.deployed.device_job import FederatedJob
from manyhands.strategies.federated.deployed.protocol import MessageRejected
from manyhands.strategies.federated.deployed.server_files import from_hex
from manyhands.strategies.federated.secure.fixedpoint import LOSS_ITEMS, FixedPoint, sum_of
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, ProtocolRefused, digest_of
from manyhands.strategies.federated.secure.secure_client import SecureStage
from manyhands.strategies.federated.secure.secure_messages import SEALED_BYTES, SecureTerms, fewest_clients
from manyhands.strategies.federated.secure.secure_server import SecureServer
from manyhands.strategies.federated.secure.secure_tally import hash_of
from manyhands.strategies.federated.strategy import Federated

__all__ = ["SecureAttempt", "terms_from"]

_LEAST_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedSum:
    """The result of a secure round, as the server learns it."""

    flat: Tensor
    weight: float
    loss: float
    clients: tuple[int, ...]
    """Whose updates are in it."""


class SecureAttempt:
    """One attempt at a round, on the server."""

    def __init__(
        self, job: FederatedJob, roster: Mapping[int, bytes], weights: Sequence[Tensor], at_s: float
    ) -> None:
        self._roster = roster
        self._terms = SecureTerms(
            round_id=os.urandom(KEY_BYTES),
            clients=len(roster),
            # no sum is made that would not count: with the next attempt's it would tell more than either
            threshold=max(fewest_clients(len(roster)), min(job.terms.minimum, len(roster))),
            length=sum(one.numel() for one in weights) + LOSS_ITEMS + 1,
            fixed=job.strategy.fixed_point,
        )
        self.server = SecureServer(self._terms, roster, hash_of(weights))
        # when the first stage ends, and how long each of the others may take
        self._due_s, self._stage_s = at_s + job.settings.deadline_s, job.settings.stage_s
        self._letters: dict[int, dict[int, bytes]] = {}
        self._came: dict[tuple[int, int], bytes] = {}

    @property
    def terms_as_json(self) -> dict[str, Any]:
        terms, fixed = self._terms, self._terms.fixed
        return {
            "round_id": terms.round_id.hex(),
            "threshold": terms.threshold,
            "length": terms.length,
            "clip": fixed.clip,
            "bits": fixed.bits,
            "max_weight": fixed.max_weight,
            "ring": fixed.ring,
            "roster": {str(client): key.hex() for client, key in self._roster.items()},
        }

    @property
    def most_bytes(self) -> int:
        words = self._terms.length * self._terms.fixed.dtype.itemsize
        return max(_LEAST_BYTES, words, 16 + self._terms.clients * (4 + SEALED_BYTES))

    def receive(self, client: int, stage: int, body: bytes) -> None:
        """A client's message at a stage; ProtocolRefused where it is wrong, late, or another one than before."""
        digest = digest_of(body)
        before = self._came.get((client, stage))
        if before is not None:
            if before != digest:
                raise ProtocolRefused(f"client {client} has sent something else at this stage before")
            return
        if stage != self.server.stage:
            raise ProtocolRefused(
                f"the round is at {self.server.stage.name}: the message is too late, or too early"
            )
        try:
            self.server.receive(client, body)
        except ProtocolRefused:
            self.server.drop(client)  # the others need not wait for it
            raise
        self._came[client, stage] = digest

    def letter(self, client: int, stage: int) -> bytes | None:
        """What the client is sent at a stage, None while that is not known; MessageRejected if it never will be."""
        if stage in self._letters:
            if client not in self._letters[stage]:
                raise MessageRejected(409, f"client {client} came too late, and the round goes on without it")
            return self._letters[stage][client]
        if stage > SecureStage.UNMASK:
            raise MessageRejected(404, f"there is no stage {stage}")
        return None

    def silent(self, at_s: float) -> frozenset[int]:
        """Clients that have not answered although the stage's deadline has passed."""
        return self.server.waits_for if at_s >= self._due_s else frozenset()

    def advance(self, at_s: float) -> StagedSum | None:
        """Advance to the next stage if all clients have answered or the deadline has passed; return the sum, if any.

        RoundAbandoned where too few clients are left; nothing is revealed then.
        """
        if self.server.waits_for and at_s < self._due_s:
            return None
        letters = self.server.advance()
        self._due_s = at_s + self._stage_s
        stage = self.server.stage
        if stage is not SecureStage.DONE:
            self._letters[int(stage)] = letters
            return None
        flat, loss, weight = sum_of(self._terms.fixed, self.server.result())
        return StagedSum(flat=flat, weight=weight, loss=loss, clients=self.server.survivors)


def terms_from(message: Any, items: int, strategy: Federated) -> tuple[SecureTerms, dict[int, bytes]]:
    """What a device makes of `terms_as_json`, and the roster; ProtocolRefused where it would not be safe."""
    try:
        roster = {int(client): from_hex(key, KEY_BYTES) for client, key in message["roster"].items()}
        fixed = FixedPoint(
            clip=float(message["clip"]),
            bits=int(message["bits"]),
            max_weight=min(int(message["max_weight"]), strategy.fixed_point.max_weight),
            ring=int(message["ring"]),
        )
        terms = SecureTerms(
            round_id=from_hex(message["round_id"], KEY_BYTES),
            clients=len(roster),
            threshold=int(message["threshold"]),
            length=int(message["length"]),
            fixed=fixed,
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, MessageRejected) as error:
        raise ProtocolRefused(f"the terms of the secure sum make no sense: {error}") from error
    if terms.length != items + LOSS_ITEMS + 1:
        raise ProtocolRefused(f"the terms are for {terms.length} words, and the model has {items} numbers")
    if any(not 0 <= client < strategy.clients for client in roster):
        raise ProtocolRefused(f"a client is on the roster who is none of the {strategy.clients}")
    if len(set(roster.values())) < len(roster):
        raise ProtocolRefused("an identity is on the roster twice")
    return terms, roster
