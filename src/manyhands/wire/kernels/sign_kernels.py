"""Compiled code of signs: a mean for each block, a bit for each item."""

from __future__ import annotations

from typing import Final

from numba import float32, uint32

from manyhands.native.bits import bits_of, float_of
from manyhands.native.decorators import njit
from manyhands.wire.kernels.marks import NOT_FINITE

__all__ = ["BLOCK", "pack_sign", "unpack_sign"]

BLOCK: Final = 1024


@njit("void(float32[::1], uint32[::1], uint32[::1])", cache=True, nogil=True, fastmath={"reassoc"})
def pack_sign(values, scales, words):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = values[BLOCK * block : BLOCK * block + BLOCK]
        total = float32(0)
        for i in range(len(part)):
            total += abs(part[i])
        scale = bits_of(total / float32(len(part)))
        scales[block] = scale if scale < uint32(0x7F800000) else uint32(NOT_FINITE)
    whole = len(values) // 32
    for number in range(whole):
        part = values[32 * number : 32 * number + 32]
        word = uint32(0)
        for k in range(32):
            word |= uint32(uint32(bits_of(part[k]) >> uint32(31)) << uint32(k))
        words[number] = word
    if whole < len(words):
        word = uint32(0)
        for k in range(len(values) - 32 * whole):
            word |= uint32(uint32(bits_of(values[32 * whole + k]) >> uint32(31)) << uint32(k))
        words[whole] = word


@njit("void(uint32[::1], uint32[::1], float32[::1])", cache=True, nogil=True)
def unpack_sign(scales, words, into):  # type: ignore[no-untyped-def]
    whole = len(into) // 32
    for number in range(whole):
        word, scale = words[number], scales[number // (BLOCK // 32)]
        room = into[32 * number : 32 * number + 32]
        for k in range(32):
            room[k] = float_of(uint32(scale | uint32(uint32(word >> uint32(k)) << uint32(31))))
    for k in range(len(into) - 32 * whole):
        sign = uint32(uint32(words[whole] >> uint32(k)) << uint32(31))
        into[32 * whole + k] = float_of(uint32(scales[whole // (BLOCK // 32)] | sign))
