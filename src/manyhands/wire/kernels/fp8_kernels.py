"""Compiled code of fp8: a power of two for each block, a byte for each item."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import int64, uint8, uint32

from manyhands.native.bits import bits_of, float_of
from manyhands.native.decorators import njit

__all__ = ["BLOCK", "MARK", "pack_fp8", "unpack_fp8"]

BLOCK: Final = 256
MARK: Final = 255


@njit("void(float32[::1], uint8[::1], uint8[::1], int64, int64, int64)", cache=True, nogil=True)
def pack_fp8(values, powers, codes, fraction, bias, most):  # type: ignore[no-untyped-def]
    """Scale each block by a power of two and round to fp8."""
    cut = uint32(23 - fraction)
    half, shifted = uint32((1 << (22 - fraction)) - 1), uint32((127 - bias) << fraction)
    smallest = float_of(uint32((127 + 1 - bias) << 23))
    step = float_of(uint32((127 + bias - 1 + fraction) << 23))
    top = 15 if fraction == 2 else 8  # the exponent of the largest number
    for block in range(len(powers)):
        part = values[BLOCK * block : BLOCK * block + BLOCK]
        room = codes[BLOCK * block : BLOCK * block + BLOCK]
        largest = uint32(0)
        for i in range(len(part)):
            largest = max(largest, uint32(bits_of(part[i]) & uint32(0x7FFFFFFF)))
        if largest >= uint32(0x7F800000):
            powers[block] = uint8(MARK)
            room[:] = 0
            continue
        exponent = int64(largest >> uint32(23)) + (
            1 if (largest & uint32(0x7FFFFF)) > uint32(0x600000) else 0
        )
        power = max(1, exponent - top)
        powers[block] = uint8(power)
        factor = float_of(uint32(254 - power) << uint32(23))
        for i in range(len(part)):
            scaled = part[i] * factor
            bits = bits_of(scaled)
            sign = uint32(bits >> uint32(24)) & uint32(0x80)
            size = uint32(bits & uint32(0x7FFFFFFF))
            odd = uint32(size >> cut) & uint32(1)
            normal = uint32(uint32(uint32(size + half) + odd) >> cut) - shifted
            small = uint32(np.rint(abs(scaled) * step))
            code = small if float_of(size) < smallest else uint32(normal)
            room[i] = uint8(sign | min(uint32(code), uint32(most)))


@njit("boolean(uint8[::1], uint8[::1], float32[::1], int64, int64, int64)", cache=True, nogil=True)
def unpack_fp8(powers, codes, into, fraction, bias, most):  # type: ignore[no-untyped-def]
    """Decode; returns whether some code is not a number of the format."""
    cut = uint32(23 - fraction)
    rise = float_of(uint32((254 - bias) << 23))
    wrong = uint32(0)
    for block in range(len(powers)):
        part = codes[BLOCK * block : BLOCK * block + BLOCK]
        room = into[BLOCK * block : BLOCK * block + BLOCK]
        if powers[block] == uint8(MARK):
            room[:] = np.nan
            continue
        power = float_of(uint32(powers[block]) << uint32(23))
        for i in range(len(part)):
            code = uint32(part[i])
            size = uint32(code & uint32(0x7F))
            wrong |= uint32(1) if size > uint32(most) else uint32(0)
            number = float_of(uint32(size << cut)) * rise * power
            room[i] = float_of(uint32(bits_of(number) | uint32(uint32(code & uint32(0x80)) << uint32(24))))
    return wrong != uint32(0)
