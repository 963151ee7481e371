"""A client of a secure round (Bonawitz et al., "Practical Secure Aggregation", CCS 2017, against an active adversary).

It trusts the list of identities that it came with, and nobody else: the server may lie about everything. Each step is
taken once, in order; what does not fit is refused, and a client that has refused answers nothing more.

    ADVERTISE ─► SHARE ─► MASK ─► CONFIRM ─► UNMASK ─► DONE

y = x + PRG(own seed) + Σ PRG(shared with later clients) - Σ PRG(shared with earlier ones), modulo 2ᵏ. Of any other
client it gives away one of two things, and never both: a share of its seed if its input counts, of its mask key if not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from typing import NoReturn

import numpy as np

from manyhands.strategies.federated.secure import primitives as crypto
from manyhands.strategies.federated.secure import secure_messages as messages
from manyhands.strategies.federated.secure.fixedpoint import Words
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, SHARE_BYTES, Draw, ProtocolRefused
from manyhands.strategies.federated.secure.secure_messages import (
    Advertisement,
    SecureTerms,
    SurvivorList,
    point_of,
)


class SecureStage(IntEnum):
    """The message that a party of a round waits for."""

    ADVERTISE = 0  # keys are drawn and signed
    SHARE = 1  # secrets are shared among the clients
    MASK = 2  # masked inputs arrive
    CONFIRM = 3  # clients sign the list of clients whose input counts
    UNMASK = 4  # clients give the shares that take the masks off the sum
    DONE = 5  # nothing more is answered
    ABANDONED = 6  # the round was abandoned: there is no sum, and no further message is answered


class SecureClient:
    """One client in one round; its keys are generated for the round and never reused."""

    def __init__(
        self,
        number: int,
        identity: bytes,
        roster: Mapping[int, bytes],
        terms: SecureTerms,
        model: bytes,
        draw: Draw = os.urandom,
    ) -> None:
        """Draw its keys; `identity` is its Ed25519 secret, `model` the hash of the model it was given.

        `roster` has the public identity of every client asked; ProtocolRefused where the terms are for more or fewer.
        """
        if len(roster) != terms.clients or number not in roster:
            why = f"the terms are for {terms.clients} clients, but the roster has {len(roster)}"
            raise ProtocolRefused(why)
        self.number = number
        self.stage = SecureStage.ADVERTISE
        self._identity, self._roster, self._terms, self._model = identity, roster, terms, model
        self._draw = draw
        self._keys = messages.RoundKeys(terms, model)
        self._channel_secret, self._mask_secret, self._seed = (draw(KEY_BYTES) for _ in range(3))
        self._others: dict[int, Advertisement] = {}
        self._keys_digest = b""
        self._agreed: dict[int, bytes] = {}
        # for each client whose masks count: its share of the mask key, followed by its share of the seed
        self._held: dict[int, bytes] = {}
        self._lists: SurvivorList | None = None

    def answer(self, message: bytes, words: Words) -> bytes:
        """What this client answers at its stage to the server's message; `words` are what it masks."""
        if self.stage is SecureStage.ADVERTISE:
            return self.advertise()
        if self.stage is SecureStage.MASK:
            return self.mask(message, words)
        steps = {SecureStage.SHARE: self.share, SecureStage.CONFIRM: self.confirm}
        return steps.get(self.stage, self.unmask)(message)

    def advertise(self) -> bytes:
        with self._taking(SecureStage.ADVERTISE):
            mine = Advertisement(
                client=self.number,
                terms=self._terms.digest,
                model=self._model,
                channel_key=crypto.public_key(self._channel_secret),
                mask_key=crypto.public_key(self._mask_secret),
                commitment=crypto.digest_of(self._seed),
            )
            self._others[self.number] = mine
            return replace(mine, signature=crypto.sign(self._identity, mine.signed)).encode()

    def share(self, message: bytes) -> bytes:
        with self._taking(SecureStage.SHARE):
            self._others = self._checked_keys(messages.KeyList.decode(message))
            self._keys_digest = crypto.digest_of(message)
            points = [point_of(client) for client in self._others]
            keys = crypto.split(self._mask_secret, self._terms.threshold, points, self._draw)
            seeds = crypto.split(self._seed, self._terms.threshold, points, self._draw)
            sealed = {}
            for client, other in self._others.items():
                shares = keys[point_of(client)] + seeds[point_of(client)]
                if client == self.number:
                    self._held[client] = shares
                    continue
                self._agreed[client] = crypto.agree(self._channel_secret, other.channel_key)
                key = self._keys.channel(self._agreed[client], self.number, client)
                sealed[client] = crypto.seal(key, shares, self._keys.context(self.number, client), self._draw)
            return messages.SealedShares(shares=sealed).encode()

    def mask(self, message: bytes, words: Words) -> bytes:
        with self._taking(SecureStage.MASK):
            for client, sealed in messages.Delivery.decode(message).shares.items():
                if client not in self._agreed:
                    raise ProtocolRefused(f"a share is from client {client}, not on the list of keys")
                key = self._keys.channel(self._agreed[client], client, self.number)
                self._held[client] = crypto.open_sealed(key, sealed, self._keys.context(client, self.number))
            self._require_enough(self._held, "clients have shared their secrets")
            fixed = self._terms.fixed
            if words.dtype != fixed.dtype or words.shape != (self._terms.length,):
                raise ProtocolRefused(
                    f"an input must have {self._terms.length} words of {fixed.ring} bits, not {words.size} of "
                    f"{words.dtype}"
                )
            if not fixed.may_be_sum(words, 1):
                raise ProtocolRefused("an input is outside the range of the terms")
            masked = words + self._keys.own_mask(self._seed, self.number)
            for client in self._held.keys() - {self.number}:
                theirs = self._others[client].mask_key
                shared = self._keys.shared_mask(self._mask_secret, theirs, self.number, client)
                masked = masked + shared if self.number < client else masked - shared
            self._mask_secret = self._seed = self._channel_secret = b""
            return messages.MaskedInput(words=masked).encode()

    def confirm(self, message: bytes) -> bytes:
        with self._taking(SecureStage.CONFIRM):
            self._lists = self._checked_lists(SurvivorList.decode(message))
            text = self._lists.signed(self._terms.digest, self._keys_digest)
            return messages.Confirmation(signature=crypto.sign(self._identity, text)).encode()

    def unmask(self, message: bytes) -> bytes:
        with self._taking(SecureStage.UNMASK):
            request = messages.UnmaskRequest.decode(message)
            lists = self._checked_lists(request.lists)
            if lists != self._lists:
                raise ProtocolRefused("the server asks to unmask other survivors than this client signed")
            text = lists.signed(self._terms.digest, self._keys_digest)
            for client, signature in request.signatures.items():
                if client not in lists.survivors or not crypto.verify(self._roster[client], signature, text):
                    raise ProtocolRefused(f"client {client} did not sign this list of survivors")
            self._require_enough(request.signatures, "clients signed the survivors")
            held, self._held = self._held, {}
            return messages.UnmaskReply(
                seeds={client: held[client][SHARE_BYTES:] for client in lists.survivors},
                keys={client: held[client][:SHARE_BYTES] for client in lists.dropped},
            ).encode()

    @contextmanager
    def _taking(self, stage: SecureStage) -> Iterator[None]:
        if self.stage is not stage:
            why = f"client {self.number} is at {self.stage.name}, but was asked for {stage.name}"
            raise ProtocolRefused(why)
        self.stage = SecureStage.ABANDONED
        yield
        self.stage = SecureStage(stage + 1)

    def _checked_keys(self, listed: messages.KeyList) -> dict[int, Advertisement]:
        found = {one.client: one for one in listed.advertisements}
        self._require_enough(found, "clients have keys")
        keys = [key for one in found.values() for key in (one.channel_key, one.mask_key)]
        if len(set(keys)) < len(keys):
            raise ProtocolRefused("a public key is on the list twice")
        mine = found.get(self.number)
        if mine is None or mine.signed != self._others[self.number].signed:
            raise ProtocolRefused(f"the list of keys does not hold the keys of client {self.number}")
        for client, one in found.items():
            require_signed(one, client, self._roster, self._terms.digest, self._model)
        return found

    def _checked_lists(self, lists: SurvivorList) -> SurvivorList:
        both = set(lists.survivors) & set(lists.dropped)
        if both:
            raise ProtocolRefused(f"client {min(both)} is listed both as a survivor and as dropped")
        if {*lists.survivors, *lists.dropped} != self._held.keys():
            raise ProtocolRefused("survivors and dropped are not those whose shares this client received")
        if self.number not in lists.survivors:
            why = f"client {self.number} is not among the survivors, and answers no more"
            raise ProtocolRefused(why)
        self._require_enough(lists.survivors, "clients have survived")
        return lists

    def _require_enough(self, clients: Sized, what: str) -> None:
        if len(clients) < self._terms.threshold:
            raise ProtocolRefused(f"{len(clients)} {what}, but {self._terms.threshold} are needed")


def require_signed(
    one: Advertisement, client: int, roster: Mapping[int, bytes], terms: bytes, model: bytes
) -> None:
    """ProtocolRefused unless `client` is on the roster and signed this, for these terms and this model."""
    if client not in roster or one.client != client:
        raise ProtocolRefused(f"client {client} was not asked")
    if one.terms != terms:
        raise ProtocolRefused(f"client {client} has signed keys of another round, or other terms")
    if one.model != model:
        raise ProtocolRefused(f"client {client} received another model")
    if not crypto.verify(roster[client], one.signature, one.signed):
        raise ProtocolRefused(f"the signature of client {client} on its keys is wrong")


# The server of a secure round: a state machine that learns the sum, and forgets what it needed for it.
#
#     receive(sender, bytes) …  until enough have come or the time is up, which is the driver's to say;
#     advance() ─► what to send to whom, at the next stage;   or RoundAbandoned, and nothing is revealed
#
# `sender` is who the channel says it is (its signature under a request, in a deployment). A masked input is added to
# the sum when it comes and not kept. What a client sends too late, twice, or wrongly is refused; it may be dropped.


class RoundAbandoned(ProtocolRefused):
    """Too few clients are left, or their shares do not match; there is no sum, and no input was revealed."""


class SecureServer:
    """The server's side of one round."""

    def __init__(self, terms: SecureTerms, roster: Mapping[int, bytes], model: bytes) -> None:
        """`roster` is the public identity of every client asked, `model` the hash of the model they were given."""
        if len(roster) != terms.clients:
            why = f"the terms are for {terms.clients} clients, but the roster has {len(roster)}"
            raise ProtocolRefused(why)
        self.stage = SecureStage.ADVERTISE
        self._terms, self._roster, self._model = terms, roster, model
        self._asked = frozenset(roster)  # clients that may answer at this stage
        self._came: set[int] = set()  # clients whose message of this stage has arrived
        self._advertised: dict[int, Advertisement] = {}
        self._keys_digest = b""
        self._mail: dict[int, dict[int, bytes]] = {}
        self._sharing: frozenset[int] = frozenset()
        self._sum: Words = np.zeros(terms.length, terms.fixed.dtype)
        self.lists = SurvivorList(survivors=(), dropped=())
        self._signatures: dict[int, bytes] = {}
        self._seed_shares: dict[int, list[tuple[int, bytes]]] = {}
        self._key_shares: dict[int, list[tuple[int, bytes]]] = {}

    @property
    def waits_for(self) -> frozenset[int]:
        return self._asked - self._came

    def receive(self, sender: int, data: bytes) -> None:
        """What `sender` answers at this stage; ProtocolRefused, and it does not count, if anything is wrong."""
        if self.stage >= SecureStage.DONE:
            raise ProtocolRefused(f"the round is {self.stage.name.lower()}, and client {sender} sent more")
        if sender not in self._asked:
            why = f"client {sender} was not asked at {self.stage.name}: it is unknown or too late"
            raise ProtocolRefused(why)
        if sender in self._came:
            raise ProtocolRefused(f"client {sender} has already answered at {self.stage.name}")
        if self.stage is SecureStage.ADVERTISE:
            one = Advertisement.decode(data)
            require_signed(one, sender, self._roster, self._terms.digest, self._model)
            taken = {
                key for other in self._advertised.values() for key in (other.channel_key, other.mask_key)
            }
            if one.channel_key in taken or one.mask_key in taken or one.channel_key == one.mask_key:
                raise ProtocolRefused(f"client {sender} has the key of another client")
            for key in (
                one.channel_key,
                one.mask_key,
            ):  # every client would refuse a weak one, and the round with it
                crypto.agree(os.urandom(KEY_BYTES), key)
            self._advertised[sender] = one
        elif self.stage is SecureStage.SHARE:
            shares = messages.SealedShares.decode(data).shares
            if shares.keys() != self._advertised.keys() - {sender}:
                raise ProtocolRefused(f"client {sender} did not send a share for each other client")
            self._mail[sender] = dict(shares)
        elif self.stage is SecureStage.MASK:
            self._sum = self._sum + messages.MaskedInput.decode(data, self._terms).words
        elif self.stage is SecureStage.CONFIRM:
            signature = messages.Confirmation.decode(data).signature
            text = self.lists.signed(self._terms.digest, self._keys_digest)
            if not crypto.verify(self._roster[sender], signature, text):
                raise ProtocolRefused(f"the signature of client {sender} on the survivors is wrong")
            self._signatures[sender] = signature
        else:
            reply = messages.UnmaskReply.decode(data)
            if tuple(reply.seeds) != self.lists.survivors or tuple(reply.keys) != self.lists.dropped:
                raise ProtocolRefused(f"client {sender} did not send the shares it was asked for")
            for into, given in ((self._seed_shares, reply.seeds), (self._key_shares, reply.keys)):
                for client, share in given.items():
                    into.setdefault(client, []).append((point_of(sender), share))
        self._came.add(sender)

    def drop(self, client: int) -> None:
        """A client that has not answered at this stage is not waited for any more, and may not answer."""
        if client not in self._came:
            self._asked -= {client}

    def advance(self) -> dict[int, bytes]:
        """What each client is sent next, nothing after the last stage; RoundAbandoned where too few have answered."""
        if self.stage >= SecureStage.DONE:
            raise ProtocolRefused(f"the round is {self.stage.name.lower()}")
        if len(self._came) < self._terms.threshold:
            self._abandon(
                f"{len(self._came)} of {self._terms.clients} clients were left at {self.stage.name}, but "
                f"{self._terms.threshold} are needed"
            )
        came, stage = frozenset(self._came), self.stage
        self._asked, self._came, self.stage = came, set(), SecureStage(stage + 1)
        if stage is SecureStage.ADVERTISE:
            listed = messages.KeyList(advertisements=tuple(self._advertised.values())).encode()
            self._keys_digest = crypto.digest_of(listed)
            return dict.fromkeys(came, listed)
        if stage is SecureStage.SHARE:
            mail, self._mail, self._sharing = self._mail, {}, came
            shares = {
                client: {source: sealed[client] for source, sealed in mail.items() if source != client}
                for client in came
            }
            return {client: messages.Delivery(shares=own).encode() for client, own in shares.items()}
        if stage is SecureStage.MASK:
            self.lists = SurvivorList(survivors=tuple(came), dropped=tuple(self._sharing - came))
            return dict.fromkeys(came, self.lists.encode())
        if stage is SecureStage.CONFIRM:
            request = messages.UnmaskRequest(lists=self.lists, signatures=self._signatures).encode()
            return dict.fromkeys(came, request)
        self._take_masks_off()
        return {}

    def result(self) -> Words:
        if self.stage is not SecureStage.DONE:
            raise ProtocolRefused(f"there is no sum: the round is at {self.stage.name}")
        return self._sum

    def _take_masks_off(self) -> None:
        keys = messages.RoundKeys(self._terms, self._model)
        found = self._sum
        for client in self.lists.survivors:
            seed = self._combined(self._seed_shares[client], client)
            if crypto.digest_of(seed) != self._advertised[client].commitment:
                self._abandon(f"the shares of client {client}'s seed do not match its commitment")
            found = found - keys.own_mask(seed, client)
        for gone in self.lists.dropped:
            secret = self._combined(self._key_shares[gone], gone)
            if crypto.public_key(secret) != self._advertised[gone].mask_key:
                self._abandon(f"the shares of client {gone}'s mask key do not match the key it advertised")
            for client in self.lists.survivors:
                shared = keys.shared_mask(secret, self._advertised[client].mask_key, gone, client)
                found = found - shared if client < gone else found + shared
        self._forget()
        if not self._terms.fixed.may_be_sum(found, len(self.lists.survivors)):
            self._abandon("a client broke the terms: no inputs within them have this sum")
        self._sum = found

    def _combined(self, shares: list[tuple[int, bytes]], client: int) -> bytes:
        """A secret from as many shares as it takes; what they give is checked against what the client had sent."""
        try:
            return crypto.combine(sorted(shares)[: self._terms.threshold], self._terms.threshold)
        except ProtocolRefused as error:
            self._abandon(f"client {client}: {error}")

    def _forget(self) -> None:
        self._seed_shares, self._key_shares, self._mail = {}, {}, {}
        self._sum = np.zeros(self._terms.length, self._terms.fixed.dtype)

    def _abandon(self, why: str) -> NoReturn:
        self._forget()
        self.stage = SecureStage.ABANDONED
        self._asked = frozenset()
        raise RoundAbandoned(why)
