"""Compiled code of QSGD: levels drawn up or down."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import float32, int64, uint8, uint32

from manyhands.native.bits import bits_of, float_of
from manyhands.native.decorators import njit
from manyhands.wire.kernels.marks import NOT_FINITE
from manyhands.wire.kernels.random_kernels import uniform_at

__all__ = ["BLOCK", "draw_levels", "multiply"]

BLOCK: Final = 512


@njit(
    "void(float32[::1], uint32[::1], uint8[::1], int64, uint32, uint32)",
    cache=True, nogil=True, fastmath={"reassoc", "contract"},
)  # fmt: skip
def draw_levels(values, scales, codes, levels, low, high):  # type: ignore[no-untyped-def]
    """Scale, and round up or down at random."""
    most = float32(levels)
    for block in range(len(scales)):
        part = values[BLOCK * block : BLOCK * block + BLOCK]
        room = codes[BLOCK * block : BLOCK * block + BLOCK]
        total = float32(0)
        for i in range(len(part)):
            total += part[i] * part[i]
        norm = np.sqrt(total)
        bits = bits_of(norm)
        scales[block] = bits if bits < uint32(0x7F800000) else uint32(NOT_FINITE)
        if bits >= uint32(0x7F800000) or bits < uint32(0x02000000):
            room[:] = uint8(levels)
            continue
        factor, first = most / norm, BLOCK * block
        for i in range(len(part)):
            level = np.floor(abs(part[i]) * factor + uniform_at(uint32(first + i), low, high))
            level = min(level, most)
            room[i] = uint8(levels + int64(-level if part[i] < float32(0) else level))


@njit("void(uint32[::1], uint8[::1], int64, float32[::1])", cache=True, nogil=True)
def multiply(scales, codes, levels, into):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = codes[BLOCK * block : BLOCK * block + BLOCK]
        room = into[BLOCK * block : BLOCK * block + BLOCK]
        scale = float_of(scales[block]) / float32(levels)
        for i in range(len(part)):
            room[i] = float32(int64(part[i]) - levels) * scale
