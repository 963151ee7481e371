"""The cryptography that secure aggregation stands on: names and sizes fixed here, the work done by `cryptography`.

| for | what |
|---|---|
| a secret that two clients share | X25519 (RFC 7748) |
| keys from it | HKDF-SHA256 (RFC 5869) |
| shares on their way through the server | AES-256-GCM, with who sends what to whom in which round as associated data |
| masks | AES-256 in counter mode |
| who a client is | Ed25519 (RFC 8032) |

The package is asked for when one of them is first used, so that everything else works without it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError, UserError

__all__ = [
    "KEY_BYTES",
    "NONCE_BYTES",
    "SEAL_BYTES",
    "SIGNATURE_BYTES",
    "Draw",
    "ProtocolRefused",
    "agree",
    "derive",
    "digest_of",
    "mask_words",
    "need_cryptography",
    "open_sealed",
    "public_identity",
    "public_key",
    "seal",
    "sign",
    "verify",
]

KEY_BYTES: Final = 32
"""Bytes of a public key, a secret key, a seed and a digest."""
SIGNATURE_BYTES: Final = 64
NONCE_BYTES: Final = 12
SEAL_BYTES: Final = NONCE_BYTES + 16
"""What sealing adds to a text: its nonce and its tag."""

Draw = Callable[[int], bytes]
"""So many random bytes; `os.urandom`, but in tests."""


class ProtocolRefused(ManyhandsError):
    """A party of a secure round received a message that it must not answer; the text says what was wrong."""


def need_cryptography() -> None:
    """UserError that names the extra, where the package is not installed."""
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
    """The X25519 public key of a secret of 32 bytes."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, theirs: bytes) -> bytes:
    """X25519: what the owner of `secret` and the owner of the public key `theirs` both know.

    ProtocolRefused where `theirs` is one of the few points with which every agreement is zero.
    """
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    mine = X25519PrivateKey.from_private_bytes(secret)
    try:
        return mine.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise ProtocolRefused("a public key is not one that anybody can have drawn") from error


def derive(secret: bytes, salt: bytes, info: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    """Derive a key with HKDF-SHA256."""
    need_cryptography()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=num_bytes, salt=salt, info=info).derive(secret)


def seal(key: bytes, text: bytes, context: bytes, draw: Draw = os.urandom) -> bytes:
    """AES-256-GCM: nonce, ciphertext and tag; `context` is not in it, but must be the same to open it."""
    need_cryptography()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = draw(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, context)


def open_sealed(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """What `seal` was given; ProtocolRefused if anything of it was changed on the way."""
    need_cryptography()
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:
        raise ProtocolRefused(
            "a sealed share does not open: it was changed, or sealed for another"
        ) from error


def public_identity(secret: bytes) -> bytes:
    """The Ed25519 public key of a secret of 32 bytes."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, text: bytes) -> bytes:
    """Sign with Ed25519."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret).sign(text)


def verify(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the owner of `public` signed the text."""
    need_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def mask_words(key: bytes, length: int, dtype: np.dtype[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """`length` words that look random without the key: AES-256 in counter mode from zero.

    Every key is used for one mask only.
    """
    need_cryptography()
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    found = stream.update(bytes(length * dtype.itemsize)) + stream.finalize()
    return np.frombuffer(found, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)
