"""Enrolment: one place for each device, taken once, by the device that has the place's token, with its public key.

Tokens are stored as hashes. A place that is taken belongs to its key for good; the same device may ask again for its
number if it did not receive the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.errors import DataError
from manyhands.strategies.federated.deployed.protocol import MessageRejected, enrolment_text
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, SIGNATURE_BYTES, verify

__all__ = ["DevicePlace", "Enrolment", "from_hex"]


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """One device's place: its token's hash and, once taken, its public key."""

    token: str
    """The SHA-256 of the token that opens it."""
    key: bytes = b""
    """The Ed25519 public key of the device that has the place; empty while it is free."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """All places, by the clients' numbers."""

    places: tuple[DevicePlace, ...] = ()

    def grown(self, places: int) -> tuple[Enrolment, list[str]]:
        """With so many places, and the tokens of those that are new."""
        tokens = [secrets.token_urlsafe(24) for _ in range(places - len(self.places))]
        return Enrolment((*self.places, *(DevicePlace(_hash(token)) for token in tokens))), tokens

    def has(self, token: str) -> bool:
        """Whether a place is, or was, opened by it."""
        return any(hmac.compare_digest(place.token, _hash(token)) for place in self.places)

    def key_of(self, client: int) -> bytes:
        """A client's public key; MessageRejected where the place is not taken."""
        if not 0 <= client < len(self.places) or not self.places[client].key:
            raise MessageRejected(401, "this client is not enrolled")
        return self.places[client].key

    def enrol(self, asked: Mapping[str, Any]) -> tuple[Enrolment, int]:
        """With the place of a token taken, and its number; MessageRejected where token, key or signature is wrong."""
        token = asked.get("token")
        key = from_hex(asked.get("key"), KEY_BYTES)
        signature = from_hex(asked.get("signature"), SIGNATURE_BYTES)
        if not isinstance(token, str) or not token.isascii():
            raise MessageRejected(403, "the enrolment has no token")
        if not verify(key, signature, enrolment_text(token, key)):
            raise MessageRejected(403, "the enrolment is not signed with the key that it names")
        hashed = _hash(token)
        for number, place in enumerate(self.places):
            if not hmac.compare_digest(place.token, hashed):
                continue
            if place.key == key:
                return self, number
            if not place.key and all(other.key != key for other in self.places):
                taken = replace(place, key=key)
                return Enrolment((*self.places[:number], taken, *self.places[number + 1 :])), number
        raise MessageRejected(403, "the enrolment token is not known, or was used; ask for another one")

    @property
    def as_json(self) -> list[dict[str, str]]:
        """The places as JSON, to be stored."""
        return [{"token": place.token, "key": place.key.hex()} for place in self.places]

    @classmethod
    def of(cls, value: Any) -> Enrolment:
        """What `as_json` gave; DataError where it is not that."""
        try:
            return cls(tuple(DevicePlace(str(one["token"]), bytes.fromhex(one["key"])) for one in value))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the list of enrolled devices is damaged: {error!r}") from error


def from_hex(value: Any, num_bytes: int) -> bytes:
    """So many bytes, or MessageRejected."""
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != num_bytes:
        raise MessageRejected(400, f"a key, hash or signature is not {num_bytes} bytes in hexadecimal")
    return found


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
