"""Compiled code of random-k: one item of each stretch."""

from __future__ import annotations

from numba import float32, int64, uint32, uint64

from manyhands.native.decorators import njit
from manyhands.wire.kernels.random_kernels import bits_at

__all__ = ["draw", "enlarge"]


@njit("void(int64, uint32[::1], uint32, uint32)", cache=True, nogil=True)
def draw(count, indices, low, high):  # type: ignore[no-untyped-def]
    """One place of each stretch."""
    stretches, end = len(indices), 0
    for j in range(stretches):
        begin, end = end, int64(uint64(count * (j + 1)) // uint64(stretches))
        bits = uint64(bits_at(uint32(j), low, high))
        indices[j] = uint32(begin + int64((bits * uint64(end - begin)) >> uint64(32)))


@njit("void(float32[::1], int64, uint32[::1], float32[::1])", cache=True, nogil=True)
def enlarge(values, count, indices, kept):  # type: ignore[no-untyped-def]
    """The items at these places, times the lengths of their stretches of `count` items in all."""
    stretches, end = len(indices), 0
    for j in range(stretches):
        begin, end = end, int64(uint64(count * (j + 1)) // uint64(stretches))
        kept[j] = values[indices[j]] * float32(end - begin)
