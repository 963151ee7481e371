"""A client of a secure round (Bonawitz et al., "Practical Secure Aggregation", CCS 2017, against an active adversary).

It trusts the list of identities that it came with, and nobody else: the server may lie about everything. Each step is
taken once, in order; what does not fit is refused, and a client that has refused answers nothing more.

    ADVERTISE ─► SHARE ─► MASK ─► CONFIRM ─► UNMASK ─► DONE

y = x + PRG(own seed) + Σ PRG(shared with later clients) - Σ PRG(shared with earlier ones), modulo 2ᵏ. Of any other
client it gives away one of two things, and never both: a share of its seed if its input counts, of its mask key if not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

from manyhands.strategies.federated.secure.fixedpoint import Words
from manyhands.strategies.federated.secure.primitives import (
    KEY_BYTES,
    SHARE_BYTES,
    Draw,
    ProtocolRefused,
    agree,
    digest_of,
    open_sealed,
    public_key,
    seal,
    sign,
    split,
    verify,
)
from manyhands.strategies.federated.secure.secure_messages import (
    Advertisement,
    Confirmation,
    Delivery,
    KeyList,
    MaskedInput,
    RoundKeys,
    SealedShares,
    SecureTerms,
    SurvivorList,
    UnmaskReply,
    UnmaskRequest,
    point_of,
)

__all__ = ["SecureClient", "SecureStage", "require_signed"]


class SecureStage(IntEnum):
    """The message that a party of a round waits for."""

    ADVERTISE = 0
    """Keys are drawn and signed."""
    SHARE = 1
    """Secrets are shared among the clients."""
    MASK = 2
    """Masked inputs arrive."""
    CONFIRM = 3
    """Clients sign the list of clients whose input counts."""
    UNMASK = 4
    """Clients give the shares that take the masks off the sum."""
    DONE = 5
    """Nothing more is answered."""
    ABANDONED = 6
    """The round was abandoned: there is no sum, and no further message is answered."""


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
        """Draw its keys.

        `identity` is its Ed25519 secret, `roster` the public identity of every client asked, `model` the hash of the
        model it was given. ProtocolRefused where the terms are for another number of clients.
        """
        if len(roster) != terms.clients or number not in roster:
            raise ProtocolRefused(
                f"the terms are for {terms.clients} clients, and the roster has {len(roster)}"
            )
        self.number = number
        self.stage = SecureStage.ADVERTISE
        self._identity, self._roster, self._terms, self._model = identity, roster, terms, model
        self._draw = draw
        self._keys = RoundKeys(terms, model)
        self._channel_secret, self._mask_secret, self._seed = (draw(KEY_BYTES) for _ in range(3))
        self._others: dict[int, Advertisement] = {}
        self._keys_digest = b""
        self._agreed: dict[int, bytes] = {}
        self._held: dict[int, bytes] = {}
        """For each client whose masks count: its share of the mask key, followed by its share of the seed."""
        self._lists: SurvivorList | None = None

    def advertise(self) -> bytes:
        with self._taking(SecureStage.ADVERTISE):
            mine = Advertisement(
                client=self.number,
                terms=self._terms.digest,
                model=self._model,
                channel_key=public_key(self._channel_secret),
                mask_key=public_key(self._mask_secret),
                commitment=digest_of(self._seed),
            )
            self._others[self.number] = mine
            return replace(mine, signature=sign(self._identity, mine.signed)).encode()

    def share(self, message: bytes) -> bytes:
        """Given the keys of all clients: return a sealed share of both secrets for each other client."""
        with self._taking(SecureStage.SHARE):
            listed = KeyList.decode(message)
            self._check_keys(listed)
            self._keys_digest = digest_of(message)
            self._others = {one.client: one for one in listed.advertisements}
            points = [point_of(client) for client in self._others]
            keys = split(self._mask_secret, self._terms.threshold, points, self._draw)
            seeds = split(self._seed, self._terms.threshold, points, self._draw)
            sealed = {}
            for client, other in self._others.items():
                shares = keys[point_of(client)] + seeds[point_of(client)]
                if client == self.number:
                    self._held[client] = shares
                    continue
                self._agreed[client] = agree(self._channel_secret, other.channel_key)
                key = self._keys.channel(self._agreed[client], self.number, client)
                sealed[client] = seal(key, shares, self._keys.context(self.number, client), self._draw)
            return SealedShares(shares=sealed).encode()

    def mask(self, message: bytes, words: Words) -> bytes:
        """Given the others' shares: the words under their masks."""
        with self._taking(SecureStage.MASK):
            for client, sealed in Delivery.decode(message).shares.items():
                if client not in self._agreed:
                    raise ProtocolRefused(f"a share came of client {client}, who is not on the list of keys")
                key = self._keys.channel(self._agreed[client], client, self.number)
                self._held[client] = open_sealed(key, sealed, self._keys.context(client, self.number))
            if len(self._held) < self._terms.threshold:
                raise ProtocolRefused(
                    f"{len(self._held)} clients have shared their secrets, and it takes {self._terms.threshold}"
                )
            masked = self._checked(words) + self._keys.own_mask(self._seed, self.number)
            for client in self._held.keys() - {self.number}:
                shared = self._keys.shared_mask(
                    self._mask_secret, self._others[client].mask_key, self.number, client
                )
                masked = masked + shared if self.number < client else masked - shared
            self._mask_secret = self._seed = self._channel_secret = b""
            return MaskedInput(words=masked).encode()

    def confirm(self, message: bytes) -> bytes:
        """Given the list of clients whose input has arrived: return this client's signature of it."""
        with self._taking(SecureStage.CONFIRM):
            self._lists = self._checked_lists(SurvivorList.decode(message))
            text = self._lists.signed(self._terms.digest, self._keys_digest)
            return Confirmation(signature=sign(self._identity, text)).encode()

    def unmask(self, message: bytes) -> bytes:
        """Given proof that enough others saw the same list: return the shares that remove the masks from the sum."""
        with self._taking(SecureStage.UNMASK):
            request = UnmaskRequest.decode(message)
            lists = self._checked_lists(request.lists)
            if lists != self._lists:
                raise ProtocolRefused("the server asks to unmask other survivors than it had signed")
            text = lists.signed(self._terms.digest, self._keys_digest)
            for client, signature in request.signatures.items():
                if client not in lists.survivors or not verify(self._roster[client], signature, text):
                    raise ProtocolRefused(f"client {client} did not sign this list of survivors")
            if len(request.signatures) < self._terms.threshold:
                raise ProtocolRefused(
                    f"{len(request.signatures)} clients signed the survivors, and it takes {self._terms.threshold}"
                )
            held, self._held = self._held, {}
            return UnmaskReply(
                seeds={client: held[client][SHARE_BYTES:] for client in lists.survivors},
                keys={client: held[client][:SHARE_BYTES] for client in lists.dropped},
            ).encode()

    @contextmanager
    def _taking(self, stage: SecureStage) -> Iterator[None]:
        """A step is taken once, at its stage; one that refuses is the last."""
        if self.stage is not stage:
            raise ProtocolRefused(
                f"client {self.number} is at {self.stage.name}, and was asked for {stage.name}"
            )
        self.stage = SecureStage.ABANDONED
        yield
        self.stage = SecureStage(stage + 1)

    def _check_keys(self, listed: KeyList) -> None:
        """Refuse a list that is too short, has a key twice, or what its client has not signed for this round."""
        found = {one.client: one for one in listed.advertisements}
        if len(found) < self._terms.threshold:
            raise ProtocolRefused(f"{len(found)} clients have keys, and it takes {self._terms.threshold}")
        keys = [key for one in found.values() for key in (one.channel_key, one.mask_key)]
        if len(set(keys)) < len(keys):
            raise ProtocolRefused("a public key is on the list twice")
        mine = found.get(self.number)
        if mine is None or mine.signed != self._others[self.number].signed:
            raise ProtocolRefused(f"the list of keys has not what client {self.number} has sent")
        for client, one in found.items():
            require_signed(one, client, self._roster, self._terms.digest, self._model)

    def _checked(self, words: Words) -> Words:
        fixed = self._terms.fixed
        if words.dtype != fixed.dtype or words.shape != (self._terms.length,):
            raise ProtocolRefused(
                f"an input has {self._terms.length} words of {fixed.ring} bits, and this one "
                f"{words.size} of {words.dtype}"
            )
        if not fixed.may_be_sum(words, 1):
            raise ProtocolRefused("an input is outside of what the terms have room for")
        return words

    def _checked_lists(self, lists: SurvivorList) -> SurvivorList:
        both = set(lists.survivors) & set(lists.dropped)
        if both:
            raise ProtocolRefused(f"client {min(both)} is said to have survived and to have dropped out")
        if {*lists.survivors, *lists.dropped} != self._held.keys():
            raise ProtocolRefused("survivors and dropped are not those whose shares this client was given")
        if self.number not in lists.survivors:
            raise ProtocolRefused(
                f"client {self.number} is not among the survivors, and answers nothing more"
            )
        if len(lists.survivors) < self._terms.threshold:
            raise ProtocolRefused(
                f"{len(lists.survivors)} clients have survived, and it takes {self._terms.threshold}"
            )
        return lists


def require_signed(
    one: Advertisement, client: int, roster: Mapping[int, bytes], terms: bytes, model: bytes
) -> None:
    """ProtocolRefused unless `client` is on the roster and signed this, for these terms and this model."""
    if client not in roster or one.client != client:
        raise ProtocolRefused(f"client {client} is not one of those that were asked")
    if one.terms != terms:
        raise ProtocolRefused(f"client {client} has signed keys of another round, or other terms")
    if one.model != model:
        raise ProtocolRefused(f"client {client} was given another model")
    if not verify(roster[client], one.signature, one.signed):
        raise ProtocolRefused(f"the signature of client {client} under its keys is wrong")
