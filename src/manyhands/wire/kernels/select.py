"""Which items are the largest: by counting their bits, in three passes and without sorting."""

from __future__ import annotations

import numpy as np
from numba import int64, uint32

from manyhands.native.bits import bits_of
from manyhands.native.decorators import njit

__all__ = ["largest", "not_below"]


@njit("int64(float32[::1], int64, uint32[::1], float32[::1])", cache=True, nogil=True)
def largest(values, count, indices, kept):  # type: ignore[no-untyped-def]
    """The `count` items of the largest size, in their order; among equals the first. NaN counts as the largest."""
    mask = uint32(0x7FFFFFFF)
    upper, lower = np.zeros(1 << 15, np.int64), np.zeros(1 << 16, np.int64)
    for i in range(len(values)):
        upper[int64(uint32(bits_of(values[i]) & mask) >> uint32(16))] += 1
    at, above = (1 << 15) - 1, 0
    while above + upper[at] < count:
        above += upper[at]
        at -= 1
    for i in range(len(values)):
        bits = uint32(bits_of(values[i]) & mask)
        if int64(bits >> uint32(16)) == at:
            lower[int64(bits & uint32(0xFFFF))] += 1
    low = (1 << 16) - 1
    while above + lower[low] < count:
        above += lower[low]
        low -= 1
    border, equal, found = uint32((at << 16) | low), count - above, 0
    for i in range(len(values)):
        bits = uint32(bits_of(values[i]) & mask)
        if bits >= border:
            if bits == border:
                if equal == 0:
                    continue
                equal -= 1
            indices[found], kept[found] = uint32(i), values[i]
            found += 1
    return found


@njit("int64(float32[::1], float32, uint32[::1], float32[::1])", cache=True, nogil=True)
def not_below(values, border, indices, kept):  # type: ignore[no-untyped-def]
    """All items of at least this size, in their order; -1 where there is no room for them."""
    least, found = uint32(bits_of(border) & uint32(0x7FFFFFFF)), 0
    for i in range(len(values)):
        if uint32(bits_of(values[i]) & uint32(0x7FFFFFFF)) >= least:
            if found == len(indices):
                return -1
            indices[found], kept[found] = uint32(i), values[i]
            found += 1
    return found
