"""The cryptography that secure aggregation stands on: names and sizes fixed here, the work done by `cryptography`.

| for | what |
|---|---|
| a secret that two clients share | X25519 (RFC 7748) |
| keys from it | HKDF-SHA256 (RFC 5869) |
| shares on their way through the server | AES-256-GCM, with who sends what to whom in which round as associated data |
| masks | AES-256 in counter mode |
| who a client is | Ed25519 (RFC 8032) |

The package is imported when one of them is first used, so that everything else works without it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError, UserError, num_of

KEY_BYTES: Final = 32  # bytes of a public key, a secret key, a seed and a digest
SIGNATURE_BYTES: Final = 64
NONCE_BYTES: Final = 12
SEAL_BYTES: Final = NONCE_BYTES + 16  # what sealing adds to a text: its nonce and its tag

Draw = Callable[[int], bytes]  # so many random bytes; `os.urandom`, but in tests


class ProtocolRefused(ManyhandsError):
    """A party of a secure round received a message that it must not answer; the text says what was wrong."""


def need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UserError(
            "secure aggregation needs the cryptography package; pip install 'manyhands[tls]', or leave out secure=yes"
        ) from error


def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of the parts, each with its length before it, so that no two lists of parts have one digest."""
    found = hashlib.sha256()
    for part in parts:
        found.update(struct.pack(">Q", len(part)))
        found.update(part)
    return found.digest()


def public_key(secret: bytes) -> bytes:
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, theirs: bytes) -> bytes:
    """X25519: what both owners know. ProtocolRefused for one of the few keys with which every agreement is zero."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    mine = X25519PrivateKey.from_private_bytes(secret)
    try:
        return mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise ProtocolRefused("a public key is invalid") from error


def derive(secret: bytes, salt: bytes, info: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=num_bytes, salt=salt, info=info).derive(secret)


def seal(key: bytes, text: bytes, context: bytes, draw: Draw = os.urandom) -> bytes:
    """AES-256-GCM: nonce, ciphertext and tag; `context` is not in it, but must be the same to open it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = draw(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, context)


def open_sealed(key: bytes, sealed: bytes, context: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:
        why = "a sealed share cannot be opened: it was changed, or sealed for another client"
        raise ProtocolRefused(why) from error


def public_identity(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, text: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


def verify(public: bytes, signature: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def mask_words(key: bytes, length: int, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """`length` words that look random without the key, which is used once: AES-256 in counter mode from zero."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    found = stream.update(bytes(length * dtype.itemsize)) + stream.finalize()
    return np.frombuffer(found, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)


PRIME: Final = 2**521 - 1
SHARE_BYTES: Final = 66
_DRAWN: Final = SHARE_BYTES + 32  # a number of so many bytes, modulo the prime, is uniform to within 2⁻²⁵⁶


def split(secret: bytes, threshold: int, points: Sequence[int], draw: Draw = os.urandom) -> dict[int, bytes]:
    """A share for each point, any `threshold` of which give the secret; points are distinct and above 0."""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"a secret must have {KEY_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold {threshold}: must be between 1 and the {len(points)} points")
    if len(set(points)) < len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError(f"points {list(points)}: must be distinct and above 0")
    terms = [int.from_bytes(secret, "big")]
    terms += [int.from_bytes(draw(_DRAWN), "big") % PRIME for _ in range(threshold - 1)]
    shares = {}
    for point in points:
        value = 0
        for term in reversed(terms):  # the polynomial at this point
            value = (value * point + term) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Sequence[tuple[int, bytes]], threshold: int) -> bytes:
    """The secret of (point, share) pairs; ProtocolRefused where they are too few, doubled, or not all of one secret."""
    if len(shares) < threshold:
        raise ProtocolRefused(f"{num_of(len(shares), 'share')} for a threshold of {threshold}")
    values: dict[int, int] = {}
    for point, share in sorted(shares):
        value = int.from_bytes(share, "big")
        if not 0 < point < PRIME or len(share) != SHARE_BYTES or value >= PRIME:
            raise ProtocolRefused(f"the share at {point} is invalid")
        if point in values:
            raise ProtocolRefused(f"two shares have the point {point}")
        values[point] = value
    points = tuple(values)[:threshold]
    found = _at(0, points, values)
    if found >> (8 * KEY_BYTES) or any(
        _at(point, points, values) != values[point] for point in list(values)[threshold:]
    ):
        raise ProtocolRefused("the shares do not belong to one secret; one was changed, or is of another")
    return found.to_bytes(KEY_BYTES, "big")


def _at(where: int, points: tuple[int, ...], values: Mapping[int, int]) -> int:
    factors = _factors(where, points)
    return sum(factor * values[point] for factor, point in zip(factors, points, strict=True)) % PRIME


@lru_cache(maxsize=256)  # a server combines the shares of the same holders for every client
def _factors(where: int, points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's: what the value at each point counts for the value at `where`."""
    found = []
    for mine in points:
        above, below = 1, 1
        for other in points:
            if other != mine:
                above = above * (where - other) % PRIME
                below = below * (mine - other) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
