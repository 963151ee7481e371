"""Compiled code of the codecs that send a few items: which are the largest, which are drawn, and where they belong.

Ascending indices travel in few bits (Elias 1974, Fano 1971). Of `count` indices below `below`, the lowest
l = ⌊log₂(below / count)⌋ bits of each travel as they are. The rest of the j-th is a bit, set at place rest + j of
count + (below - 1 >> l) bits: about 2 + log₂(below / count) bits an index.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import float32, int64, uint8, uint32, uint64

from manyhands.native.bits import bits_at, bits_of
from manyhands.native.decorators import njit

_WORD: Final = 8


def low_bits(below: int, count: int) -> int:
    return max(0, (below // max(1, count)).bit_length() - 1)


def index_bytes(below: int, count: int) -> int:
    if count == 0:
        return 0
    low = low_bits(below, count)
    return -(-count * low // 8) + -(-(count + (below - 1 >> low)) // 8)


@njit("void(uint32[::1], int64, uint8[::1])", cache=True, nogil=True)
def write_indices(indices, low, into):  # type: ignore[no-untyped-def]
    into[:] = uint8(0)
    first = (len(indices) * low + 7) // 8
    mask = (uint64(1) << uint64(low)) - uint64(1)
    word, filled, at = uint64(0), 0, 0
    for j in range(len(indices)):
        index = uint64(indices[j])
        word |= (index & mask) << uint64(filled)
        filled += low
        while filled >= _WORD:
            into[at] = uint8(word)
            word >>= uint64(_WORD)
            filled -= _WORD
            at += 1
        place = int64(index >> uint64(low)) + j
        into[first + (place >> 3)] |= uint8(1) << uint8(place & 7)
    if filled:
        into[at] = uint8(word)


@njit("boolean(uint8[::1], int64, int64, uint32[::1])", cache=True, nogil=True)
def read_indices(encoded, low, below, indices):  # type: ignore[no-untyped-def]
    """Read them back; False where they are not so many, do not ascend or reach `below`."""
    first = (len(indices) * low + 7) // 8
    mask = (uint64(1) << uint64(low)) - uint64(1)
    word, filled, at, j, before = uint64(0), 0, 0, 0, -1
    for byte in range(first, len(encoded)):
        bits = encoded[byte]
        if bits == uint8(0):
            continue
        for k in range(8):
            if not (bits >> uint8(k)) & uint8(1):
                continue
            if j == len(indices):
                return False
            while filled < low:
                word |= uint64(encoded[at]) << uint64(filled)
                filled += _WORD
                at += 1
            rest = 8 * (byte - first) + k - j
            index = (rest << low) | int64(word & mask)
            word >>= uint64(low)
            filled -= low
            if index <= before or index >= below:
                return False
            indices[j] = uint32(index)
            before = index
            j += 1
    return j == len(indices)


@njit("void(float32[::1], uint32[::1], float32[::1], float32)", cache=True, nogil=True)
def add_at(values, indices, into, alpha):  # type: ignore[no-untyped-def]
    """Add values, times `alpha`, at their places, which are within `into`."""
    for j in range(len(indices)):
        into[indices[j]] += values[j] * alpha


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


@njit("void(int64, uint32[::1], uint32, uint32)", cache=True, nogil=True)
def draw(count, indices, low, high):  # type: ignore[no-untyped-def]
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
