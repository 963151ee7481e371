"""Shamir's secret sharing (Communications of the ACM, 1979), over the integers modulo the prime 2⁵²¹ - 1.

A secret of 32 bytes is the value at zero of a random polynomial of degree t - 1; a share is its value at the holder's
point. Any t shares give the polynomial; with t - 1 every secret is as likely as any other, since through them and any
value at zero goes exactly one polynomial.

The field is far wider than a secret, so that shares of different secrets give a number that is none. A change that was
chosen with care is noticed only by a share beyond the t, or by whoever knows a digest of the secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from manyhands.strategies.federated.secure.primitives import KEY_BYTES, Draw, ProtocolRefused

__all__ = ["PRIME", "SHARE_BYTES", "combine", "split"]

PRIME: Final = 2**521 - 1
SHARE_BYTES: Final = 66
_DRAWN: Final = SHARE_BYTES + 32
"""A number of so many bytes, modulo the prime, is uniform to within 2⁻²⁵⁶."""


def split(secret: bytes, threshold: int, points: Sequence[int], draw: Draw = os.urandom) -> dict[int, bytes]:
    """A share for each point, any `threshold` of which give the secret; points are distinct and above 0."""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"a secret has {KEY_BYTES} bytes, and this one {len(secret)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold {threshold}: must be at least 1 and at most the {len(points)} points")
    if len(set(points)) < len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError(f"points {list(points)}: must be distinct and above 0")
    terms = [int.from_bytes(secret, "big")]
    terms += [int.from_bytes(draw(_DRAWN), "big") % PRIME for _ in range(threshold - 1)]
    return {point: _value(terms, point).to_bytes(SHARE_BYTES, "big") for point in points}


def combine(shares: Sequence[tuple[int, bytes]], threshold: int) -> bytes:
    """The secret of (point, share) pairs; ProtocolRefused where they are too few, doubled, or not of one secret.

    Shares beyond the threshold are checked against the others.
    """
    if len(shares) < threshold:
        raise ProtocolRefused(f"{len(shares)} shares, and it takes {threshold}")
    values: dict[int, int] = {}
    for point, share in sorted(shares):
        value = int.from_bytes(share, "big")
        if not 0 < point < PRIME or len(share) != SHARE_BYTES or value >= PRIME:
            raise ProtocolRefused(f"the share at {point} is none")
        if point in values:
            raise ProtocolRefused(f"two shares are of point {point}")
        values[point] = value
    points = tuple(values)[:threshold]
    found = _at(0, points, values)
    if found >> (8 * KEY_BYTES) or any(
        _at(point, points, values) != values[point] for point in list(values)[threshold:]
    ):
        raise ProtocolRefused("shares do not belong to one secret; one was changed, or is of another")
    return found.to_bytes(KEY_BYTES, "big")


def _value(terms: Sequence[int], point: int) -> int:
    found = 0
    for term in reversed(terms):
        found = (found * point + term) % PRIME
    return found


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
