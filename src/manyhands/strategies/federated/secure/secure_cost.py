"""What a secure round costs a client in bytes: the published formula, and ours, which says what comes on top.

Bonawitz et al. (CCS 2017) count for one of n users with m words modulo R: 2n public keys, 5n - 4 shares, the vector,
2n·|key| + (5n - 4)·|share| + m⌈log₂ R⌉ bits. That is the protocol against a server that is curious but honest.
"""

from __future__ import annotations

from typing import Final

from manyhands.strategies.federated.secure.primitives import KEY_BYTES, SEAL_BYTES, SIGNATURE_BYTES
from manyhands.strategies.federated.secure.secure_messages import SecureTerms
from manyhands.strategies.federated.secure.shamir import SHARE_BYTES

__all__ = ["MESSAGES", "client_bytes", "published_bits"]

MESSAGES: Final = 5
"""That a client sends in a round, and receives."""
_NUMBER: Final = 4


def published_bits(clients: int, items: int, ring: int, key: int = 256, share: int = 256) -> int:
    """What one client sends and receives by the published formula, in bits."""
    return 2 * clients * key + (5 * clients - 4) * share + items * ring


def client_bytes(terms: SecureTerms) -> int:
    """What one client sends and receives in a round that nobody leaves.

    On top of the formula, with our sizes of keys and shares: signatures, the digests that bind a round, the seals of
    shares, and the numbers of clients and rows.
    """
    n = terms.clients
    published = published_bits(n, terms.length, terms.fixed.ring, 8 * KEY_BYTES, 8 * SHARE_BYTES) // 8
    signatures = 2 * n * SIGNATURE_BYTES + SIGNATURE_BYTES + SIGNATURE_BYTES
    digests = (n + 1) * 3 * KEY_BYTES + 2 * KEY_BYTES
    seals = 2 * (n - 1) * SEAL_BYTES
    return published + signatures + digests + seals + _numbers(n)


def _numbers(clients: int) -> int:
    """Of rows, and of the clients in them, in every message of `messages`."""
    advertised = 1 + (1 + clients)
    shares = 2 * (1 + clients - 1)
    survivors = 2 + clients
    request = survivors + 1 + clients
    reply = 2 + clients
    return _NUMBER * (advertised + shares + survivors + request + reply)
