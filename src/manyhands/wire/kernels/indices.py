"""Ascending indices in few bits (Elias 1974, Fano 1971), and items to and from the places that they name.

Of `count` indices below `below`, the lowest l = ⌊log₂(below / count)⌋ bits of each travel as they are. The rest of the
j-th is a bit, set at place rest + j of count + (below - 1 >> l) bits: about 2 + log₂(below / count) bits an index.
"""

from __future__ import annotations

from typing import Final

from numba import int64, uint8, uint32, uint64

from manyhands.native.decorators import njit

__all__ = ["add_at", "index_bytes", "low_bits", "read_indices", "write_indices"]

_WORD: Final = 8


def low_bits(below: int, count: int) -> int:
    """How many bits of each travel as they are."""
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


@njit("void(float32[::1], uint32[::1], float32[::1])", cache=True, nogil=True)
def pick(values, indices, into):  # type: ignore[no-untyped-def]
    for j in range(len(indices)):
        into[j] = values[indices[j]]
