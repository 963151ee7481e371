"""What the parties of a secure round send each other, and its bytes.

client ──Advertisement──►  server ──KeyList──────►      two public keys, signed
       ──SealedShares───►         ──Delivery─────►      a share of its two secrets for each other client, sealed
       ──MaskedInput────►         ──SurvivorList─►      its words under masks; whose have come
       ──Confirmation───►         ──UnmaskRequest►      its signature under that list; those of the others
       ──UnmaskReply────►                               a share of one of the two secrets of each client

`transport.messages` makes their bytes, in which clients ascend; a masked input is its words alone, little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Final, Self

import numpy as np

from manyhands.errors import UserError
from manyhands.strategies.federated.secure import primitives as crypto
from manyhands.strategies.federated.secure.fixedpoint import LOSS_ITEMS, FixedPoint, Words
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, ProtocolRefused, digest_of
from manyhands.transport.messages import U32, MessageCoder, ProtocolError

LABEL: Final = b"manyhands secure sum 1"
SEALED_BYTES: Final = 2 * crypto.SHARE_BYTES + crypto.SEAL_BYTES  # shares of two secrets, for another client
_Key = Annotated[bytes, KEY_BYTES]
_Signature = Annotated[bytes, crypto.SIGNATURE_BYTES]
_Shares = Mapping[U32, Annotated[bytes, crypto.SHARE_BYTES]]
_Sealed = Mapping[U32, Annotated[bytes, SEALED_BYTES]]


def fewest_clients(clients: int) -> int:
    """The smallest threshold that holds against a server that lies with a third of the clients: above 2n/3."""
    return 2 * clients // 3 + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SecureTerms:
    """The terms that all parties of a round must agree on; UserError where they are unsafe or could overflow."""

    round_id: bytes  # 32 bytes that no other round has
    clients: int  # how many were asked to take part
    threshold: int  # how many must stay to the end; above two thirds of them
    length: int  # words in a client's vector, its weight included
    fixed: FixedPoint

    @classmethod
    def draw(cls, fixed: FixedPoint, clients: int, items: int, minimum: int = 0) -> SecureTerms:
        """Those of a new round, for updates of so many numbers; at least `minimum` clients must stay to the end."""
        threshold = max(fewest_clients(clients), min(minimum, clients))
        length = items + LOSS_ITEMS + 1
        round_id = os.urandom(KEY_BYTES)
        return cls(round_id=round_id, clients=clients, threshold=threshold, length=length, fixed=fixed)

    def __post_init__(self) -> None:
        if len(self.round_id) != KEY_BYTES:
            raise UserError(f"round_id: must have {KEY_BYTES} bytes, not {len(self.round_id)}")
        if self.clients < 3:
            raise UserError(f"clients={self.clients}: a sum of fewer than 3 clients protects none of them")
        if not fewest_clients(self.clients) <= self.threshold <= self.clients:
            raise UserError(
                f"threshold={self.threshold}: must be between {fewest_clients(self.clients)} (above two thirds) and "
                f"the {self.clients} clients"
            )
        if self.length < 2:
            raise UserError(f"length={self.length}: a vector has at least one item and its weight")
        self.fixed.check_capacity(self.clients)

    @property
    def digest(self) -> bytes:
        fixed = self.fixed
        numbers = (self.clients, self.threshold, self.length, fixed.bits, fixed.max_weight, fixed.ring)
        return digest_of(LABEL, self.round_id, struct.pack(">6Qd", *numbers, fixed.clip))


class _Message:
    """Bytes by `transport.messages`; ProtocolRefused where bytes are not such a message."""

    __slots__ = ()

    def encode(self) -> bytes:
        return _CODER.encode(self)[1]

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            message: Self = _CODER.decode(_NUMBERS[cls], data)
        except ProtocolError as error:
            raise ProtocolRefused(str(error)) from error
        if message.encode() != data:  # signatures are under these bytes: there is one spelling
            raise ProtocolRefused(f"the clients of a {cls.__name__} are out of order")
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class Advertisement(_Message):
    """A client's public keys for this round."""

    client: U32
    terms: _Key  # the digest of the terms it takes part under
    model: _Key  # the hash of the model that it was given
    channel_key: _Key  # with which others seal shares for it
    mask_key: _Key  # with which others agree on masks
    commitment: _Key  # digest of the client's own seed
    signature: _Signature = bytes(crypto.SIGNATURE_BYTES)  # under all of the above

    @property
    def signed(self) -> bytes:
        return digest_of(b"advertisement", LABEL, self.encode()[: -crypto.SIGNATURE_BYTES])


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyList(_Message):
    """The advertisements of all clients, in any order; sent in ascending order."""

    advertisements: tuple[Advertisement, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.advertisements, key=lambda one: one.client)
        object.__setattr__(self, "advertisements", tuple(ordered))
        _check_once([one.client for one in ordered])


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedShares(_Message):
    """A client's shares, by the client that can open them."""

    shares: _Sealed


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery(_Message):
    """The shares addressed to one client, by sender."""

    shares: _Sealed


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedInput:
    """A client's masked words."""

    words: Words

    def encode(self) -> bytes:
        return self.words.astype(self.words.dtype.newbyteorder("<"), copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes, terms: SecureTerms) -> MaskedInput:
        dtype = terms.fixed.dtype
        if len(data) != terms.length * dtype.itemsize:
            wanted = terms.length * dtype.itemsize
            raise ProtocolRefused(f"a masked input must have {wanted} bytes, not {len(data)}")
        return cls(words=np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class SurvivorList(_Message):
    """Clients whose masked input has arrived, and those whose input is missing although others masked with them."""

    survivors: tuple[U32, ...]
    dropped: tuple[U32, ...]

    def __post_init__(self) -> None:
        for name in ("survivors", "dropped"):
            listed = tuple(sorted(getattr(self, name)))
            object.__setattr__(self, name, listed)
            _check_once(listed)

    def signed(self, terms: bytes, keys: bytes) -> bytes:
        return digest_of(b"survivors", LABEL, terms, keys, self.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation(_Message):
    """A client's signature of the list of survivors."""

    signature: _Signature


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskRequest(_Message):
    """The list of survivors again, with the signatures of the clients that confirmed it."""

    lists: SurvivorList
    signatures: Mapping[U32, _Signature]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskReply(_Message):
    """A client's shares of the seeds of survivors, and of the mask keys of those who dropped out."""

    seeds: _Shares
    keys: _Shares


_MESSAGES: Final = (
    *(Advertisement, KeyList, SealedShares, Delivery),
    *(SurvivorList, Confirmation, UnmaskRequest, UnmaskReply),
)
_NUMBERS: Final[dict[Any, int]] = {message: number for number, message in enumerate(_MESSAGES, 1)}
_CODER: Final = MessageCoder(dict(enumerate(_MESSAGES, 1)))


def _check_once(clients: Sequence[int]) -> None:
    twice = [client for client, after in pairwise(clients) if client == after]
    if twice:
        raise ProtocolRefused(f"client {twice[0]} is in a table twice")


_PAIR: Final = struct.Struct(">II")


def point_of(client: int) -> int:
    """Where a client's shares are taken: above 0, which is where the secret is."""
    return client + 1


class RoundKeys:
    """Derives the keys of one round, bound to its id, its terms and the model that was downloaded."""

    def __init__(self, terms: SecureTerms, model: bytes) -> None:
        self._terms = terms
        self._bound = digest_of(terms.digest, model)

    def shared_mask(self, secret: bytes, theirs: bytes, mine: int, other: int) -> Words:
        """The mask that two clients share; the same from either end, and from the server with one's secret."""
        agreed = crypto.agree(secret, theirs)
        return self._mask(self._key(b" mask ", agreed, min(mine, other), max(mine, other)))

    def own_mask(self, seed: bytes, client: int) -> Words:
        return self._mask(self._key(b" own ", seed, client, client))

    def channel(self, agreed: bytes, source: int, destination: int) -> bytes:
        return self._key(b" share ", agreed, source, destination)

    def _key(self, use: bytes, secret: bytes, *pair: int) -> bytes:
        return crypto.derive(secret, self._terms.round_id, LABEL + use + _PAIR.pack(*pair) + self._bound)

    def _mask(self, key: bytes) -> Words:
        return crypto.mask_words(key, self._terms.length, self._terms.fixed.dtype)

    def context(self, source: int, destination: int) -> bytes:
        return self._terms.round_id + _PAIR.pack(source, destination)
