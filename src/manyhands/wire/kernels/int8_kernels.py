"""Compiled code of int8: a scale for each block, a byte for each item."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import float32, int8, uint32

from manyhands.native.bits import bits_of, float_of
from manyhands.native.decorators import njit
from manyhands.wire.kernels.marks import NOT_FINITE

__all__ = ["BLOCK", "pack_int8", "unpack_int8"]

BLOCK: Final = 256


@njit("void(float32[::1], uint32[::1], int8[::1])", cache=True, nogil=True)
def pack_int8(values, scales, codes):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = values[BLOCK * block : BLOCK * block + BLOCK]
        room = codes[BLOCK * block : BLOCK * block + BLOCK]
        largest = uint32(0)
        for i in range(len(part)):  # as integers: of numbers without a sign, the larger has the larger bits
            largest = max(largest, uint32(bits_of(part[i]) & uint32(0x7FFFFFFF)))
        factor = float32(0)
        if largest >= uint32(0x7F800000):
            scales[block] = uint32(NOT_FINITE)
        elif largest < uint32(0x02000000):  # 2^-123: too small for a scale
            scales[block] = uint32(0)
        else:
            scales[block] = bits_of(float_of(largest) / float32(127))
            factor = float32(127) / float_of(largest)
        if factor == float32(0):
            room[:] = 0
        else:
            for i in range(len(part)):
                room[i] = int8(np.rint(part[i] * factor))


@njit("void(uint32[::1], int8[::1], float32[::1])", cache=True, nogil=True)
def unpack_int8(scales, codes, into):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = codes[BLOCK * block : BLOCK * block + BLOCK]
        room = into[BLOCK * block : BLOCK * block + BLOCK]
        scale = float_of(scales[block])
        for i in range(len(part)):
            room[i] = float32(part[i]) * scale
