"""What the parties of a secure round send each other, and its bytes.

client ──Advertisement──►  server ──KeyList──────►      two public keys, signed
       ──SealedShares───►         ──Delivery─────►      a share of its two secrets for each other client, sealed
       ──MaskedInput────►         ──SurvivorList─►      its words under masks; whose have come
       ──Confirmation───►         ──UnmaskRequest►      its signature under that list; those of the others
       ──UnmaskReply────►                               a share of one of the two secrets of each client

Numbers are big-endian, words of a masked input little-endian. A table is its number of rows, then rows of a client's
number and as many bytes as the table's rows have, ascending by client. Nothing is read that the length does not cover.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from manyhands.errors import UserError
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.strategies.federated.secure.primitives import (
    KEY_BYTES,
    SEAL_BYTES,
    SIGNATURE_BYTES,
    ProtocolRefused,
    digest_of,
)
from manyhands.strategies.federated.secure.shamir import SHARE_BYTES

__all__ = [
    "SEALED_BYTES",
    "Advertisement",
    "Confirmation",
    "Delivery",
    "KeyList",
    "MaskedInput",
    "SealedShares",
    "SecureTerms",
    "SurvivorList",
    "UnmaskReply",
    "UnmaskRequest",
    "fewest_clients",
]

LABEL: Final = b"manyhands secure sum 1"
SEALED_BYTES: Final = 2 * SHARE_BYTES + SEAL_BYTES
"""A share of each of a client's two secrets, sealed for another client."""
_ADVERTISED = struct.Struct(
    f">I{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{SIGNATURE_BYTES}s"
)
_COUNT = struct.Struct(">I")


def fewest_clients(clients: int) -> int:
    """The smallest threshold that holds against a server that lies with a third of the clients: above 2n/3."""
    return 2 * clients // 3 + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SecureTerms:
    """The terms that all parties of a round must agree on; UserError where they are unsafe or could overflow."""

    round_id: bytes
    """32 bytes that no other round has."""
    clients: int
    """How many were asked to take part."""
    threshold: int
    """How many must stay to the end; above two thirds of them."""
    length: int
    """Words in a client's vector, its weight included."""
    fixed: FixedPoint

    def __post_init__(self) -> None:
        if len(self.round_id) != KEY_BYTES:
            raise UserError(f"round_id: must have {KEY_BYTES} bytes, and has {len(self.round_id)}")
        if self.clients < 3:
            raise UserError(f"clients={self.clients}: a sum of fewer than 3 clients hides none of them")
        if not fewest_clients(self.clients) <= self.threshold <= self.clients:
            raise UserError(
                f"threshold={self.threshold}: must be from {fewest_clients(self.clients)} (above two thirds) "
                f"to all {self.clients} clients"
            )
        if self.length < 2:
            raise UserError(f"length={self.length}: a vector has at least one item and its weight")
        self.fixed.check_capacity(self.clients)

    @property
    def digest(self) -> bytes:
        """Digest of all terms."""
        fixed = self.fixed
        numbers = (self.clients, self.threshold, self.length, fixed.bits, fixed.max_weight, fixed.ring)
        return digest_of(LABEL, self.round_id, struct.pack(">6Qd", *numbers, fixed.clip))


@dataclass(frozen=True, kw_only=True, slots=True)
class Advertisement:
    """A client's public keys for this round."""

    client: int
    terms: bytes
    """The digest of the terms it takes part under."""
    model: bytes
    """The hash of the model that it was given."""
    channel_key: bytes
    """With which others seal shares for it."""
    mask_key: bytes
    """With which others agree on masks."""
    commitment: bytes
    """Digest of the client's own seed."""
    signature: bytes = bytes(SIGNATURE_BYTES)
    """Under all of the above."""

    @property
    def signed(self) -> bytes:
        """What the signature is under."""
        return digest_of(b"advertisement", LABEL, self.encode()[:-SIGNATURE_BYTES])

    def encode(self) -> bytes:
        """Its bytes, always as many."""
        return _ADVERTISED.pack(
            self.client,
            self.terms,
            self.model,
            self.channel_key,
            self.mask_key,
            self.commitment,
            self.signature,
        )

    @classmethod
    def decode(cls, data: bytes) -> Advertisement:
        """ProtocolRefused unless it has its bytes."""
        if len(data) != _ADVERTISED.size:
            raise ProtocolRefused(f"an advertisement has {_ADVERTISED.size} bytes, and this one {len(data)}")
        client, terms, model, channel, mask, commitment, signature = _ADVERTISED.unpack(data)
        return cls(
            client=client,
            terms=terms,
            model=model,
            channel_key=channel,
            mask_key=mask,
            commitment=commitment,
            signature=signature,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyList:
    """The advertisements of all clients."""

    advertisements: tuple[Advertisement, ...]

    def encode(self) -> bytes:
        """A table, whose rows begin with the client's number by themselves."""
        return _table({one.client: one.encode()[_COUNT.size :] for one in self.advertisements})

    @classmethod
    def decode(cls, data: bytes) -> KeyList:
        """ProtocolRefused where it is not one, or a client is in it twice."""
        rows, rest = _read_table(data, _ADVERTISED.size - _COUNT.size)
        _nothing_left(rest)
        return cls(
            advertisements=tuple(
                Advertisement.decode(_COUNT.pack(client) + row) for client, row in rows.items()
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedShares:
    """A client's shares, by the client that can open them."""

    shares: Mapping[int, bytes]

    def encode(self) -> bytes:
        """Encode as a table."""
        return _table(self.shares)

    @classmethod
    def decode(cls, data: bytes) -> SealedShares:
        """ProtocolRefused where it is not one."""
        rows, rest = _read_table(data, SEALED_BYTES)
        _nothing_left(rest)
        return cls(shares=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """The shares addressed to one client, by sender."""

    shares: Mapping[int, bytes]

    def encode(self) -> bytes:
        """Encode as a table."""
        return _table(self.shares)

    @classmethod
    def decode(cls, data: bytes) -> Delivery:
        """ProtocolRefused where it is not one."""
        rows, rest = _read_table(data, SEALED_BYTES)
        _nothing_left(rest)
        return cls(shares=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedInput:
    """A client's masked words."""

    words: Words

    def encode(self) -> bytes:
        """Encode the words alone."""
        return self.words.astype(self.words.dtype.newbyteorder("<"), copy=False).tobytes()

    @classmethod
    def decode(cls, data: bytes, terms: SecureTerms) -> MaskedInput:
        """ProtocolRefused unless it has the words that were agreed on."""
        dtype = terms.fixed.dtype
        if len(data) != terms.length * dtype.itemsize:
            raise ProtocolRefused(
                f"a masked input has {terms.length * dtype.itemsize} bytes, and this one {len(data)}"
            )
        return cls(words=np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class SurvivorList:
    """Clients whose masked input has arrived, and those whose input is missing although others masked with them."""

    survivors: tuple[int, ...]
    dropped: tuple[int, ...]

    def encode(self) -> bytes:
        """Two tables without bytes."""
        return _table(dict.fromkeys(self.survivors, b"")) + _table(dict.fromkeys(self.dropped, b""))

    @classmethod
    def decode(cls, data: bytes) -> SurvivorList:
        """ProtocolRefused where it is not one."""
        survivors, rest = _read_table(data, 0)
        dropped, rest = _read_table(rest, 0)
        _nothing_left(rest)
        return cls(survivors=tuple(survivors), dropped=tuple(dropped))

    def signed(self, terms: bytes, keys: bytes) -> bytes:
        """What a client signs who was given these lists, under terms and a key list of these digests."""
        return digest_of(b"survivors", LABEL, terms, keys, self.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """A client's signature of the list of survivors."""

    signature: bytes

    def encode(self) -> bytes:
        """Encode the signature alone."""
        return self.signature

    @classmethod
    def decode(cls, data: bytes) -> Confirmation:
        """ProtocolRefused unless it has a signature's bytes."""
        if len(data) != SIGNATURE_BYTES:
            raise ProtocolRefused(f"a signature has {SIGNATURE_BYTES} bytes, and this one {len(data)}")
        return cls(signature=data)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskRequest:
    """The list of survivors again, with the signatures of the clients that confirmed it."""

    lists: SurvivorList
    signatures: Mapping[int, bytes]

    def encode(self) -> bytes:
        """Encode as three tables."""
        return self.lists.encode() + _table(self.signatures)

    @classmethod
    def decode(cls, data: bytes) -> UnmaskRequest:
        """ProtocolRefused where it is not one."""
        survivors, rest = _read_table(data, 0)
        dropped, rest = _read_table(rest, 0)
        signatures, rest = _read_table(rest, SIGNATURE_BYTES)
        _nothing_left(rest)
        lists = SurvivorList(survivors=tuple(survivors), dropped=tuple(dropped))
        return cls(lists=lists, signatures=signatures)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskReply:
    """A client's shares of the seeds of survivors, and of the mask keys of those who dropped out."""

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]

    def encode(self) -> bytes:
        """Encode as two tables."""
        return _table(self.seeds) + _table(self.keys)

    @classmethod
    def decode(cls, data: bytes) -> UnmaskReply:
        """ProtocolRefused where it is not one."""
        seeds, rest = _read_table(data, SHARE_BYTES)
        keys, rest = _read_table(rest, SHARE_BYTES)
        _nothing_left(rest)
        return cls(seeds=seeds, keys=keys)


def _table(rows: Mapping[int, bytes]) -> bytes:
    return _COUNT.pack(len(rows)) + b"".join(
        _COUNT.pack(client) + row for client, row in sorted(rows.items())
    )


def _read_table(data: bytes, num_bytes: int) -> tuple[dict[int, bytes], bytes]:
    """Read a table: return its rows, and the bytes after them."""
    size = _COUNT.size
    if len(data) < size:
        raise ProtocolRefused("a message ends before its table")
    [count] = _COUNT.unpack_from(data)
    end = size + count * (size + num_bytes)
    if len(data) < end:
        raise ProtocolRefused(f"a table of {count} rows needs {end} bytes, and {len(data)} have come")
    rows = {}
    before = -1
    for begin in range(size, end, size + num_bytes):
        [client] = _COUNT.unpack_from(data, begin)
        if client <= before:
            raise ProtocolRefused(f"client {client} is in a table twice, or out of order")
        before = client
        rows[client] = data[begin + size : begin + size + num_bytes]
    return rows, data[end:]


def _nothing_left(rest: Iterable[int]) -> None:
    if rest:
        raise ProtocolRefused("a message has more bytes than its tables")
