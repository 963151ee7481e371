"""Compiled code of ternary: five items a byte."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import float32, uint8, uint32

from manyhands.native.bits import bits_of, float_of
from manyhands.native.decorators import njit
from manyhands.wire.kernels.marks import NOT_FINITE
from manyhands.wire.kernels.random_kernels import uniform_at

__all__ = ["BLOCK", "VALUES", "pack_ternary", "unpack_ternary"]

BLOCK: Final = 640
VALUES: Final = 243
_BYTES: Final = BLOCK // 5
_TRITS: Final = np.array([[code // 3**k % 3 for k in range(5)] for code in range(VALUES)], np.uint8).ravel()


@njit("void(float32[::1], uint32[::1], uint8[::1], uint32, uint32)", cache=True, nogil=True)
def pack_ternary(values, scales, codes, low, high):  # type: ignore[no-untyped-def]
    trits = np.zeros(BLOCK, np.uint8)
    for block in range(len(scales)):
        part = values[BLOCK * block : BLOCK * block + BLOCK]
        largest = uint32(0)
        for i in range(len(part)):
            largest = max(largest, uint32(bits_of(part[i]) & uint32(0x7FFFFFFF)))
        if len(part) < BLOCK or largest >= uint32(0x7F800000):
            trits[:] = 0
        scales[block] = largest if largest < uint32(0x7F800000) else uint32(NOT_FINITE)
        if largest < uint32(0x7F800000):
            scale, first = float_of(largest), BLOCK * block
            for i in range(len(part)):
                kept = uniform_at(uint32(first + i), low, high) * scale < abs(part[i])
                sign = uint32(uint32(bits_of(part[i]) >> uint32(31)) + uint32(1))
                trits[i] = uint8(sign) if kept else uint8(0)
        room = codes[_BYTES * block : _BYTES * block + _BYTES]
        for k in range(len(room)):
            five = trits[5 * k : 5 * k + 5]
            room[k] = (
                five[0] + uint8(3) * five[1] + uint8(9) * five[2] + uint8(27) * five[3] + uint8(81) * five[4]
            )


@njit("void(uint32[::1], uint8[::1], float32[::1])", cache=True, nogil=True)
def unpack_ternary(scales, codes, into):  # type: ignore[no-untyped-def]
    values = np.zeros(3, np.float32)
    whole = len(into) // 5
    for block in range(len(scales)):
        scale = float_of(scales[block])
        values[0] = scale * float32(0)  # NaN for the mark
        values[1], values[2] = scale, -scale
        begin, end = _BYTES * block, min(whole, _BYTES * block + _BYTES)
        for k in range(begin, end):
            five = _TRITS[5 * codes[k] : 5 * codes[k] + 5]
            room = into[5 * k : 5 * k + 5]
            for i in range(5):
                room[i] = values[five[i]]
        if block == len(scales) - 1:
            for i in range(len(into) - 5 * whole):
                into[5 * whole + i] = values[_TRITS[5 * codes[whole] + i]]
