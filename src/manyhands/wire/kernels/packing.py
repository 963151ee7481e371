"""Numbers of a few bits, one after the other without a gap: the first in the lowest bits of the first byte."""

from __future__ import annotations

from numba import uint8, uint64

from manyhands.native.decorators import njit

__all__ = ["pack_bits", "packed_bytes", "unpack_bits"]


def packed_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


@njit("void(uint8[::1], int64, uint8[::1])", cache=True, nogil=True)
def pack_bits(codes, width, into):  # type: ignore[no-untyped-def]
    whole = len(codes) // 8
    for group in range(whole):
        word = uint64(0)
        part = codes[8 * group : 8 * group + 8]
        for k in range(8):
            word |= uint64(part[k]) << uint64(width * k)
        room = into[width * group : width * group + width]
        for k in range(width):
            room[k] = uint8(word >> uint64(8 * k))
    word = uint64(0)
    left = len(codes) - 8 * whole
    for k in range(left):
        word |= uint64(codes[8 * whole + k]) << uint64(width * k)
    for k in range((left * width + 7) // 8):
        into[width * whole + k] = uint8(word >> uint64(8 * k))


@njit("void(uint8[::1], int64, uint8[::1])", cache=True, nogil=True)
def unpack_bits(packed, width, codes):  # type: ignore[no-untyped-def]
    whole = len(codes) // 8
    mask = (uint64(1) << uint64(width)) - uint64(1)
    for group in range(whole):
        word = uint64(0)
        room = packed[width * group : width * group + width]
        for k in range(width):
            word |= uint64(room[k]) << uint64(8 * k)
        part = codes[8 * group : 8 * group + 8]
        for k in range(8):
            part[k] = uint8((word >> uint64(width * k)) & mask)
    word = uint64(0)
    left = len(codes) - 8 * whole
    for k in range((left * width + 7) // 8):
        word |= uint64(packed[width * whole + k]) << uint64(8 * k)
    for k in range(left):
        codes[8 * whole + k] = uint8((word >> uint64(width * k)) & mask)
