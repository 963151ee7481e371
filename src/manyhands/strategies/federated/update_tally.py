"""The tally of a simulated round: updates summed, kept one by one, or summed with privacy."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from manyhands.engine.exchange import Traffic
from manyhands.errors import NonFinite
from manyhands.strategies.federated.algorithms import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import (
    ClassSums,
    ClientUpdate,
    RoundPlace,
    RoundTally,
    TallySum,
    WeighedUpdate,
    norm_class,
    shaped,
)
from manyhands.strategies.federated.privacy_noise import clipped
from manyhands.strategies.federated.private_rounds import PrivateRounds
from manyhands.strategies.federated.secure.fixedpoint import LOSS_ITEMS, FixedPoint, Words, sum_of, words_of
from manyhands.strategies.federated.secure.primitives import (
    Draw,
    public_identity,
)
from manyhands.strategies.federated.secure.secure_messages import SecureTerms, fewest_clients
from manyhands.strategies.federated.secure.secure_protocol import (
    RoundAbandoned,
    SecureClient,
    SecureServer,
    SecureStage,
)
from manyhands.strategies.federated.strategy import Federated

__all__ = ["SecureTally", "hash_of", "tally_for"]

Total = Callable[[Tensor], Tensor]  # collective: the sum of a flat float64 tensor over the workers


def tally_for(
    strategy: Federated,
    algorithm: FederatedAlgorithm,
    place: RoundPlace,
    weights: Sequence[Tensor],
    like: Sequence[Tensor],
    private: PrivateRounds | None = None,
) -> RoundTally:
    """What collects updates of tensors like these in a round, whose clients each worker asks in the same order."""

    def summing(like: Sequence[Tensor]) -> RoundTally:
        if strategy.secure:
            return SecureTally(strategy.fixed_point, place.clients, weights, number=place.number, like=like)
        if algorithm.single_updates:
            return KeptTally(place.total, place.clients, like)
        return PlainTally(place.total, like, by_norm=strategy.seen_norm_ratio > 0)

    return summing(like) if private is None else PrivateTally(summing, private, like, place)


class PlainTally:
    """Sums updates in double precision, so that it hardly matters which worker simulated which client."""

    def __init__(self, total: Total, like: Sequence[Tensor], *, by_norm: bool = True) -> None:
        self._total = total
        self._sums = ClassSums(like, by_norm=by_norm)
        self._sent = Traffic()

    def add(self, update: ClientUpdate, weight: float) -> None:
        self._sent += Traffic(messages_sent=1, bytes_sent=update.num_bytes)
        self._sums.add(update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        mine = self._sums.total(largest)
        words = torch.tensor([mine.weight, mine.loss], dtype=torch.float64)
        found = self._total(torch.cat([*(one.flatten().cpu() for one in mine.sums), words]))
        sums, weight, loss = shaped(found[:-2], mine.sums), float(found[-2]), float(found[-1])
        return TallySum(sums=sums, weight=weight, loss=loss, traffic=self._sent)


class KeptTally:
    """Keeps every update: each worker gets all, in the order of the round's clients."""

    def __init__(self, total: Total, clients: Sequence[int], like: Sequence[Tensor]) -> None:
        self._total, self._clients, self._like = total, clients, like
        self._mine: dict[int, tuple[ClientUpdate, float]] = {}
        self._sent = Traffic()

    def add(self, update: ClientUpdate, weight: float) -> None:
        self._sent += Traffic(messages_sent=1, bytes_sent=update.num_bytes)
        self._mine[update.client] = (update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        if largest is not None:
            counted = [one for one, (update, _) in self._mine.items() if norm_class(update.norm) <= largest]
            self._mine = {client: self._mine[client] for client in counted}
        items = sum(one.numel() for one in self._like)
        found: list[WeighedUpdate] = []
        weight, loss = 0.0, 0.0
        for client in self._clients:
            flat = torch.zeros(items + 2, dtype=torch.float64)
            if client in self._mine:
                update, mine = self._mine[client]
                change = [one.detach().flatten().to("cpu", torch.float64) for one in update.change]
                flat = torch.cat([*change, torch.tensor([mine, mine * update.loss], dtype=torch.float64)])
            flat = self._total(flat)
            if not float(flat[-2]):
                continue  # its update was not finite, or its norm too large
            pieces = zip(shaped(flat[:-2], self._like), self._like, strict=True)
            whole = [one.to(like.dtype) for one, like in pieces]
            found.append(WeighedUpdate(client=client, change=whole, weight=float(flat[-2])))
            weight, loss = weight + float(flat[-2]), loss + float(flat[-1])
        sums = [torch.zeros_like(one, dtype=torch.float64) for one in self._like]
        for each in found:
            for total_of, change_of in zip(sums, each.change, strict=True):
                total_of.add_(change_of, alpha=each.weight)
        missing, traffic = len(self._clients) - len(found), self._sent
        return TallySum(sums=sums, weight=weight, loss=loss, traffic=traffic, updates=found, missing=missing)


class PrivateTally:
    """The tally of one round of a private run."""

    def __init__(
        self,
        inside: Callable[[Sequence[Tensor]], RoundTally],
        rounds: PrivateRounds,
        like: Sequence[Tensor],
        place: RoundPlace,
    ) -> None:
        self._rounds, self._like, self._place = rounds, like, place
        self._noise = rounds.noise
        self._items = sum(one.numel() for one in like)
        self._inside = inside([torch.zeros(self._items + int(self._noise.adapts), dtype=torch.float64)])

    def add(self, update: ClientUpdate, weight: float) -> None:
        del weight
        rounds, noise = self._rounds, self._noise
        flat, within = clipped(update.change, noise.bound)
        vector = noise.vector(flat, within)
        if rounds.step:
            draws = rounds.draws(self._place.number, update.client)
            vector = torch.from_numpy(noise.in_steps(vector, rounds.step, rounds.fewest, draws) * rounds.step)
        sent = replace(update, change=[vector], loss=0.0, samples=1, encoded_bytes=update.num_bytes)
        self._inside.add(sent, 1.0)

    def total(self, largest: int | None = None) -> TallySum:
        """Collective: the noisy sum; what the round cost is counted, and the next one's bound is set."""
        del largest  # the clip bounds every norm
        rounds, place = self._rounds, self._place
        if rounds.spending is not None:
            rounds.spending.take(place.clients)
        found = self._inside.total()
        row, draws = found.sums[0].cpu(), rounds.draws(place.number)
        if draws is not None:  # the server's noise, which worker 0 draws for all
            if place.rank:
                row.zero_()
            else:
                self._noise.add(row, draws)
            row = place.total(row)
        if self._noise.adapts:
            rounds.follow(self._noise.share_within(float(row[-1]), rounds.cohort))
        sums = shaped(row[: self._items], self._like)
        return TallySum(sums=sums, weight=rounds.cohort, loss=math.nan, traffic=found.traffic)


_NO_WORDS: Words = np.empty(0, np.uint64)  # of a client that leaves before it masks


@dataclass(frozen=True, kw_only=True, slots=True)
class SecureSum:
    """The result of a simulated secure round, on encoded bytes, and its cost."""

    words: Words  # the sum of the survivors' words
    survivors: tuple[int, ...]  # whose inputs are in it
    messages: int  # how many the clients sent
    sent: Mapping[int, int]  # bytes that each client sent
    received: Mapping[int, int]  # bytes that each client received


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
    own = identities.items()
    clients = {client: SecureClient(client, secret, roster, terms, model, draw) for client, secret in own}
    server = SecureServer(terms, roster, model)
    going = {client: SecureStage.MASK for client in identities if client not in inputs} | dict(leaves or {})
    sent, received, messages = dict.fromkeys(identities, 0), dict.fromkeys(identities, 0), 0
    inbox: Mapping[int, bytes] = dict.fromkeys(identities, b"")
    while server.stage < SecureStage.DONE:
        stage = server.stage
        for client, message in sorted(inbox.items()):
            received[client] += len(message)
            if going.get(client, SecureStage.DONE) <= stage:
                continue
            answer = clients[client].answer(message, inputs.get(client, _NO_WORDS))
            sent[client] += len(answer)
            messages += 1
            server.receive(client, answer)
        inbox = server.advance()
    words, stayed = server.result(), server.survivors
    return SecureSum(words=words, survivors=stayed, messages=messages, sent=sent, received=received)


def hash_of(weights: Sequence[Tensor]) -> bytes:
    found = hashlib.sha256()
    for one in weights:
        found.update(f"{one.dtype} {tuple(one.shape)};".encode())
        found.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()


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
        self._fixed, self._number = fixed, number
        self._like = weights if like is None else like
        self._terms = SecureTerms(  # UserError where that is not safe
            round_id=os.urandom(32),
            clients=len(clients),
            threshold=fewest_clients(len(clients)),
            length=sum(one.numel() for one in self._like) + LOSS_ITEMS + 1,
            fixed=fixed,
        )
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
        traffic = Traffic(messages_sent=found.messages, bytes_sent=sum(found.sent.values()))
        return TallySum(sums=shaped(flat, self._like), weight=weight, loss=loss, traffic=traffic)
