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

from manyhands.errors import NonFinite
from manyhands.strategies.federated.algorithms import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import (
    ClassSums,
    ClientUpdate,
    RoundPlace,
    RoundTally,
    TallySum,
    Tensors,
    norm_class,
    shaped,
)
from manyhands.strategies.federated.privacy_noise import clipped
from manyhands.strategies.federated.private_rounds import PrivateRounds
from manyhands.strategies.federated.secure import secure_protocol as protocol
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words, sum_of, words_of
from manyhands.strategies.federated.secure.primitives import Draw, public_identity
from manyhands.strategies.federated.secure.secure_messages import SecureTerms
from manyhands.strategies.federated.secure.secure_protocol import SecureStage
from manyhands.strategies.federated.strategy import Federated

Total = Callable[[Tensor], Tensor]  # collective: the sum of a flat float64 tensor over the workers


def tally_for(
    strategy: Federated,
    algorithm: FederatedAlgorithm,
    place: RoundPlace,
    weights: Tensors,
    like: Tensors,
    private: PrivateRounds | None = None,
) -> RoundTally:
    """What collects updates of tensors like these in a round, whose clients each worker asks in the same order."""

    def summing(like: Tensors) -> RoundTally:
        if strategy.secure:
            return SecureTally(strategy.fixed_point, place.clients, weights, number=place.number, like=like)
        if algorithm.single_updates:
            return KeptTally(place.total, place.clients, like)
        return PlainTally(place.total, like, by_norm=strategy.seen_norm_ratio > 0)

    return summing(like) if private is None else PrivateTally(summing, private, like, place)


class PlainTally:
    """Sums updates in double precision, so that it hardly matters which worker simulated which client."""

    def __init__(self, total: Total, like: Tensors, *, by_norm: bool = True) -> None:
        self._total = total
        self._sums = ClassSums(like, by_norm=by_norm)
        self._messages, self._num_bytes = 0, 0

    def add(self, update: ClientUpdate, weight: float) -> None:
        self._messages += 1
        self._num_bytes += update.num_bytes
        self._sums.add(update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        mine = self._sums.total(largest)
        words = torch.tensor([mine.weight, mine.loss], dtype=torch.float64)
        found = self._total(torch.cat([*(one.flatten().cpu() for one in mine.sums), words]))
        sums, (weight, loss) = shaped(found[:-2], mine.sums), found[-2:].tolist()
        sent = self._messages, self._num_bytes
        return TallySum(sums=sums, weight=weight, loss=loss, messages_sent=sent[0], bytes_sent=sent[1])


class KeptTally:
    """Keeps every update: each worker gets all, in the order of the round's clients."""

    def __init__(self, total: Total, clients: Sequence[int], like: Tensors) -> None:
        self._total, self._clients, self._like = total, clients, like
        self._mine: dict[int, tuple[ClientUpdate, float]] = {}

    def add(self, update: ClientUpdate, weight: float) -> None:
        self._mine[update.client] = (update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        found = TallySum(sums=[torch.zeros_like(one, dtype=torch.float64) for one in self._like])
        found.messages_sent = len(self._mine)
        found.bytes_sent = sum(update.num_bytes for update, _ in self._mine.values())
        items, updates = sum(one.numel() for one in self._like), list[Tensors]()
        for client in self._clients:
            flat = torch.zeros(items + 2, dtype=torch.float64)
            update, mine = self._mine.get(client, (None, 0.0))
            if update is not None and (largest is None or norm_class(update.norm) <= largest):
                change = [one.detach().flatten().to("cpu", torch.float64) for one in update.change]
                flat = torch.cat([*change, torch.tensor([mine, mine * update.loss], dtype=torch.float64)])
            flat = self._total(flat)
            weight, loss = flat[-2:].tolist()
            if not weight:
                continue  # its update was not finite, or its norm too large
            pieces = zip(shaped(flat[:-2], self._like), self._like, strict=True)
            updates.append([one.to(like.dtype) for one, like in pieces])
            for total_of, change_of in zip(found.sums, updates[-1], strict=True):
                total_of.add_(change_of, alpha=weight)
            found.weight, found.loss = found.weight + weight, found.loss + loss
        return replace(found, updates=updates, missing=len(self._clients) - len(updates))


class PrivateTally:
    """The tally of one round of a private run."""

    def __init__(
        self, inside: Callable[[Tensors], RoundTally], rounds: PrivateRounds, like: Tensors, place: RoundPlace
    ) -> None:
        self._rounds, self._like, self._place = rounds, like, place
        self._noise = rounds.noise
        items = sum(one.numel() for one in like)
        self._inside = inside([torch.zeros(items + int(self._noise.adapts), dtype=torch.float64)])

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
        del largest  # the clip bounds every norm
        return private_sum(self._inside.total(), self._rounds, self._like, self._place)


def private_sum(found: TallySum, rounds: PrivateRounds, like: Tensors, place: RoundPlace) -> TallySum:
    """Collective: a sum of clipped updates with its noise; what the round cost is counted, the next bound is set."""
    if rounds.spending is not None:
        rounds.spending.take(place.clients)
    noise, items = rounds.noise, sum(one.numel() for one in like)
    row, draws = found.sums[0].cpu(), rounds.draws(place.number)
    if draws is not None:  # the server's noise, which worker 0 draws for all
        if place.rank:
            row.zero_()
        else:
            noise.add(row, draws)
        row = place.total(row)
    if noise.adapts:
        rounds.follow(noise.share_within(float(row[-1]), rounds.cohort))
    return replace(found, sums=shaped(row[:items], like), weight=rounds.cohort, loss=math.nan)


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
    """The sum of the inputs of clients that stay; others leave at the stage in `leaves`, or before they mask."""
    roster = {client: public_identity(secret) for client, secret in identities.items()}
    own = identities.items()
    clients = {
        client: protocol.SecureClient(client, secret, roster, terms, model, draw) for client, secret in own
    }
    server = protocol.SecureServer(terms, roster, model)
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
    words, stayed = server.result(), server.lists.survivors
    return SecureSum(words=words, survivors=stayed, messages=messages, sent=sent, received=received)


def hash_of(weights: Tensors) -> bytes:
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
        weights: Tensors,
        *,
        number: int = 0,
        like: Tensors | None = None,
    ) -> None:
        """Of round `number`, from 0, in which clients begin with `weights` and send tensors like `like`."""
        self._fixed, self._number = fixed, number
        self._like = weights if like is None else like
        items = sum(one.numel() for one in self._like)
        self._terms = SecureTerms.draw(fixed, len(clients), items)  # UserError where that is not safe
        self._model = hash_of(weights)
        self._identities = {client: os.urandom(32) for client in clients}
        self._inputs: dict[int, Words] = {}

    def add(self, update: ClientUpdate, weight: float) -> None:
        self._inputs[update.client] = words_of(self._fixed, update, weight)

    def total(self, largest: int | None = None) -> TallySum:
        """The sum; a client that was not added has left before it masked. NonFinite if too few are left."""
        del largest  # no norm is seen
        try:
            found = play_round(self._terms, self._identities, self._inputs, self._model)
        except protocol.RoundAbandoned as error:
            raise NonFinite(
                f"round {self._number + 1} was abandoned, and the model was not changed: {error}; clients whose "
                "update is not finite are left out"
            ) from error
        flat, loss, weight = sum_of(self._fixed, found.words)
        sums, num_bytes = shaped(flat, self._like), sum(found.sent.values())
        return TallySum(
            sums=sums, weight=weight, loss=loss, messages_sent=found.messages, bytes_sent=num_bytes
        )
