"""The server of a secure round: a state machine that learns the sum, and forgets what it needed for it.

    receive(sender, bytes) …  until enough have come or the time is up, which is the driver's to say;
    advance() ─► what to send to whom, at the next stage;   or RoundAbandoned, and nothing is revealed

`sender` is who the channel says it is (its signature under a request, in a deployment). A masked input is added to the
sum when it comes and not kept. What a client sends too late, twice, or wrongly is refused; the driver may `drop` it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np

from manyhands.strategies.federated.secure.fixedpoint import Words
from manyhands.strategies.federated.secure.primitives import (
    KEY_BYTES,
    ProtocolRefused,
    agree,
    combine,
    digest_of,
    public_key,
    verify,
)
from manyhands.strategies.federated.secure.secure_client import SecureStage, require_signed
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

__all__ = ["RoundAbandoned", "SecureServer"]


class RoundAbandoned(ProtocolRefused):
    """Too few clients are left, or their shares do not match; there is no sum, and no input was revealed."""


class SecureServer:
    """The server's side of one round."""

    def __init__(self, terms: SecureTerms, roster: Mapping[int, bytes], model: bytes) -> None:
        """`roster` is the public identity of every client asked, `model` the hash of the model they were given."""
        if len(roster) != terms.clients:
            raise ProtocolRefused(
                f"the terms are for {terms.clients} clients, and the roster has {len(roster)}"
            )
        self.stage = SecureStage.ADVERTISE
        self._terms, self._roster, self._model = terms, roster, model
        self._asked = frozenset(roster)
        """Clients that may answer at this stage."""
        self._came: set[int] = set()
        """Clients whose message of this stage has arrived."""
        self._advertised: dict[int, Advertisement] = {}
        self._keys_digest = b""
        self._mail: dict[int, dict[int, bytes]] = {}
        self._sharing: frozenset[int] = frozenset()
        self._sum: Words = np.zeros(terms.length, terms.fixed.dtype)
        self._lists = SurvivorList(survivors=(), dropped=())
        self._signatures: dict[int, bytes] = {}
        self._seed_shares: dict[int, list[tuple[int, bytes]]] = {}
        self._key_shares: dict[int, list[tuple[int, bytes]]] = {}

    @property
    def waits_for(self) -> frozenset[int]:
        return self._asked - self._came

    @property
    def survivors(self) -> tuple[int, ...]:
        return self._lists.survivors

    def receive(self, sender: int, data: bytes) -> None:
        """What `sender` answers at this stage; ProtocolRefused, and it does not count, if anything is wrong."""
        takers: dict[SecureStage, Callable[[int, bytes], None]] = {
            SecureStage.ADVERTISE: self._take_advertisement,
            SecureStage.SHARE: self._take_shares,
            SecureStage.MASK: self._take_input,
            SecureStage.CONFIRM: self._take_confirmation,
            SecureStage.UNMASK: self._take_reply,
        }
        if self.stage not in takers:
            raise ProtocolRefused(f"the round is {self.stage.name.lower()}, and client {sender} sent more")
        if sender not in self._asked:
            raise ProtocolRefused(
                f"client {sender} is not asked at {self.stage.name}: it is unknown or too late"
            )
        if sender in self._came:
            raise ProtocolRefused(f"client {sender} has answered already at {self.stage.name}")
        takers[self.stage](sender, data)
        self._came.add(sender)

    def drop(self, client: int) -> None:
        """A client that has not answered at this stage is not waited for any more, and may not answer."""
        if client not in self._came:
            self._asked -= {client}

    def advance(self) -> dict[int, bytes]:
        """No more answers are waited for: what each client is sent next, nothing after the last stage.

        RoundAbandoned where fewer than the threshold have answered.
        """
        if self.stage >= SecureStage.DONE:
            raise ProtocolRefused(f"the round is {self.stage.name.lower()}")
        if len(self._came) < self._terms.threshold:
            self._abandon(
                f"{len(self._came)} of {self._terms.clients} clients were left at {self.stage.name}, and it takes "
                f"{self._terms.threshold}"
            )
        came, stage = frozenset(self._came), self.stage
        self._asked, self._came, self.stage = came, set(), SecureStage(stage + 1)
        if stage is SecureStage.ADVERTISE:
            listed = KeyList(advertisements=tuple(self._advertised.values())).encode()
            self._keys_digest = digest_of(listed)
            return dict.fromkeys(came, listed)
        if stage is SecureStage.SHARE:
            mail, self._mail, self._sharing = self._mail, {}, came
            return {
                client: Delivery(
                    shares={source: sealed[client] for source, sealed in mail.items() if source != client}
                ).encode()
                for client in came
            }
        if stage is SecureStage.MASK:
            self._lists = SurvivorList(
                survivors=tuple(sorted(came)), dropped=tuple(sorted(self._sharing - came))
            )
            return dict.fromkeys(came, self._lists.encode())
        if stage is SecureStage.CONFIRM:
            request = UnmaskRequest(lists=self._lists, signatures=self._signatures).encode()
            return dict.fromkeys(came, request)
        self._take_masks_off()
        return {}

    def result(self) -> Words:
        if self.stage is not SecureStage.DONE:
            raise ProtocolRefused(f"there is no sum: the round is at {self.stage.name}")
        return self._sum

    def _take_advertisement(self, sender: int, data: bytes) -> None:
        one = Advertisement.decode(data)
        require_signed(one, sender, self._roster, self._terms.digest, self._model)
        taken = {key for other in self._advertised.values() for key in (other.channel_key, other.mask_key)}
        if one.channel_key in taken or one.mask_key in taken or one.channel_key == one.mask_key:
            raise ProtocolRefused(f"client {sender} has a key that is taken")
        for key in (one.channel_key, one.mask_key):
            agree(os.urandom(KEY_BYTES), key)  # or every other client would refuse it, and the round with it
        self._advertised[sender] = one

    def _take_shares(self, sender: int, data: bytes) -> None:
        shares = SealedShares.decode(data).shares
        if shares.keys() != self._advertised.keys() - {sender}:
            raise ProtocolRefused(f"client {sender} has not a share for each other client")
        self._mail[sender] = dict(shares)

    def _take_input(self, sender: int, data: bytes) -> None:
        del sender
        self._sum = self._sum + MaskedInput.decode(data, self._terms).words

    def _take_confirmation(self, sender: int, data: bytes) -> None:
        signature = Confirmation.decode(data).signature
        text = self._lists.signed(self._terms.digest, self._keys_digest)
        if not verify(self._roster[sender], signature, text):
            raise ProtocolRefused(f"the signature of client {sender} under the survivors is wrong")
        self._signatures[sender] = signature

    def _take_reply(self, sender: int, data: bytes) -> None:
        reply = UnmaskReply.decode(data)
        if tuple(reply.seeds) != self._lists.survivors or tuple(reply.keys) != self._lists.dropped:
            raise ProtocolRefused(f"client {sender} has not sent the shares it was asked for")
        for into, shares in ((self._seed_shares, reply.seeds), (self._key_shares, reply.keys)):
            for client, share in shares.items():
                into.setdefault(client, []).append((point_of(sender), share))

    def _take_masks_off(self) -> None:
        """Remove each survivor's own mask, and the masks that survivors share with each client that dropped out."""
        keys = RoundKeys(self._terms, self._model)
        found = self._sum
        for client in self._lists.survivors:
            seed = self._combined(self._seed_shares[client], client)
            if digest_of(seed) != self._advertised[client].commitment:
                self._abandon(f"the shares of client {client}'s seed are not of what it had committed to")
            found = found - keys.own_mask(seed, client)
        for gone in self._lists.dropped:
            secret = self._combined(self._key_shares[gone], gone)
            if public_key(secret) != self._advertised[gone].mask_key:
                self._abandon(f"the shares of client {gone}'s mask key are not of the one it had advertised")
            for client in self._lists.survivors:
                shared = keys.shared_mask(secret, self._advertised[client].mask_key, gone, client)
                found = found - shared if client < gone else found + shared
        self._forget()
        if not self._terms.fixed.may_be_sum(found, len(self._lists.survivors)):
            self._abandon("a client did not keep to the terms: the sum is none that their inputs can have")
        self._sum = found

    def _combined(self, shares: list[tuple[int, bytes]], client: int) -> bytes:
        """A secret from as many shares as it takes; what they give is checked against what the client had sent."""
        try:
            return combine(sorted(shares)[: self._terms.threshold], self._terms.threshold)
        except ProtocolRefused as error:
            self._abandon(f"client {client}: {error}")
            raise AssertionError("abandoning raises") from error

    def _forget(self) -> None:
        self._seed_shares, self._key_shares, self._mail = {}, {}, {}
        self._sum = np.zeros(self._terms.length, self._terms.fixed.dtype)

    def _abandon(self, why: str) -> None:
        self._forget()
        self.stage = SecureStage.ABANDONED
        self._asked = frozenset()
        raise RoundAbandoned(why)
