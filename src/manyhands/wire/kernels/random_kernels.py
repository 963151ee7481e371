"""Random numbers by place: the i-th of a key is a function of both, so nothing is carried from one to the next."""

from __future__ import annotations

from numba import float32, uint32

from manyhands.native.decorators import inlined

__all__ = ["bits_at", "uniform_at"]


@inlined()
def bits_at(place: int, low: int, high: int) -> int:
    """32 bits: two rounds of multiplying and shifting, each begun with half of the key."""
    x = uint32(uint32(place) * uint32(0x9E3779B1)) ^ low
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x ^ (x >> uint32(15))) ^ high
    x = uint32(uint32(x) * uint32(0x846CA68B))
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    return uint32(x ^ (x >> uint32(15)))  # type: ignore[no-any-return]


@inlined()
def uniform_at(place: int, low: int, high: int) -> float:
    """From 0 to below 1, in steps of 2^-24."""
    return float32(bits_at(place, low, high) >> uint32(8)) * float32(2.0**-24)  # type: ignore[no-any-return]
