"""Compiled arithmetic of the codecs that send every item in fewer bits: fp8, int8, int4, QSGD, ternary and sign.

Items go block by block, each with a scale. A block that holds something that is not finite has the mark in its place.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import float32, int8, int64, uint8, uint32, uint64

from manyhands.native.bits import bits_of, float_of, uniform_at
from manyhands.native.decorators import njit

NOT_FINITE: Final = 0x7FC00000  # the bits of a scale that say: something in this block is not finite

FP8_BLOCK: Final = 256
FP8_MARK: Final = 255
INT8_BLOCK: Final = 256
INT4_BLOCK: Final = 64
QSGD_BLOCK: Final = 512
TERNARY_BLOCK: Final = 640
TERNARY_VALUES: Final = 243
SIGN_BLOCK: Final = 1024
_BYTES: Final = TERNARY_BLOCK // 5
_DIGITS = [code // 3**k % 3 for code in range(TERNARY_VALUES) for k in range(5)]
_TRITS: Final = np.array(_DIGITS, np.uint8)


@njit("void(float32[::1], uint8[::1], uint8[::1], int64, int64, int64)", cache=True, nogil=True)
def pack_fp8(values, powers, codes, fraction, bias, most):  # type: ignore[no-untyped-def]
    cut = uint32(23 - fraction)
    half, shifted = uint32((1 << (22 - fraction)) - 1), uint32((127 - bias) << fraction)
    smallest = float_of(uint32((127 + 1 - bias) << 23))
    step = float_of(uint32((127 + bias - 1 + fraction) << 23))
    top = 15 if fraction == 2 else 8  # the exponent of the largest number
    for block in range(len(powers)):
        part = values[FP8_BLOCK * block : FP8_BLOCK * block + FP8_BLOCK]
        room = codes[FP8_BLOCK * block : FP8_BLOCK * block + FP8_BLOCK]
        largest = uint32(0)
        for i in range(len(part)):
            largest = max(largest, uint32(bits_of(part[i]) & uint32(0x7FFFFFFF)))
        if largest >= uint32(0x7F800000):
            powers[block] = uint8(FP8_MARK)
            room[:] = 0
            continue
        rounds_up = (largest & uint32(0x7FFFFF)) > uint32(0x600000)
        exponent = int64(largest >> uint32(23)) + (1 if rounds_up else 0)
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
        part = codes[FP8_BLOCK * block : FP8_BLOCK * block + FP8_BLOCK]
        room = into[FP8_BLOCK * block : FP8_BLOCK * block + FP8_BLOCK]
        if powers[block] == uint8(FP8_MARK):
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


@njit("void(float32[::1], uint32[::1], int8[::1], int64, int64)", cache=True, nogil=True)
def pack_even(values, scales, codes, size, most):  # type: ignore[no-untyped-def]
    """Codes from -most to most, which is the largest of each block of `size`."""
    for block in range(len(scales)):
        part = values[size * block : size * block + size]
        room = codes[size * block : size * block + size]
        largest = uint32(0)
        for i in range(len(part)):  # as integers: of numbers without a sign, the larger has the larger bits
            largest = max(largest, uint32(bits_of(part[i]) & uint32(0x7FFFFFFF)))
        factor = float32(0)
        if largest >= uint32(0x7F800000):
            scales[block] = uint32(NOT_FINITE)
        elif largest < uint32(0x02000000):  # 2^-123: too small for a scale
            scales[block] = uint32(0)
        else:
            scales[block] = bits_of(float_of(largest) / float32(most))
            factor = float32(most) / float_of(largest)
        if factor == float32(0):
            room[:] = 0
        else:
            for i in range(len(part)):
                room[i] = int8(np.rint(part[i] * factor))


@njit("void(uint32[::1], int8[::1], float32[::1], int64)", cache=True, nogil=True)
def unpack_even(scales, codes, into, size):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = codes[size * block : size * block + size]
        room = into[size * block : size * block + size]
        scale = float_of(scales[block])
        for i in range(len(part)):
            room[i] = float32(part[i]) * scale


@njit(
    "void(float32[::1], uint32[::1], uint8[::1], int64, uint32, uint32)",
    cache=True, nogil=True, fastmath={"reassoc", "contract"},
)  # fmt: skip
def draw_levels(values, scales, codes, levels, low, high):  # type: ignore[no-untyped-def]
    most = float32(levels)
    for block in range(len(scales)):
        part = values[QSGD_BLOCK * block : QSGD_BLOCK * block + QSGD_BLOCK]
        room = codes[QSGD_BLOCK * block : QSGD_BLOCK * block + QSGD_BLOCK]
        total = float32(0)
        for i in range(len(part)):
            total += part[i] * part[i]
        norm = np.sqrt(total)
        bits = bits_of(norm)
        scales[block] = bits if bits < uint32(0x7F800000) else uint32(NOT_FINITE)
        if bits >= uint32(0x7F800000) or bits < uint32(0x02000000):
            room[:] = uint8(levels)
            continue
        factor, first = most / norm, QSGD_BLOCK * block
        for i in range(len(part)):
            level = np.floor(abs(part[i]) * factor + uniform_at(uint32(first + i), low, high))
            level = min(level, most)
            room[i] = uint8(levels + int64(-level if part[i] < float32(0) else level))


@njit("void(uint32[::1], uint8[::1], int64, float32[::1])", cache=True, nogil=True)
def multiply_levels(scales, codes, levels, into):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = codes[QSGD_BLOCK * block : QSGD_BLOCK * block + QSGD_BLOCK]
        room = into[QSGD_BLOCK * block : QSGD_BLOCK * block + QSGD_BLOCK]
        scale = float_of(scales[block]) / float32(levels)
        for i in range(len(part)):
            room[i] = float32(int64(part[i]) - levels) * scale


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


@njit("void(float32[::1], uint32[::1], uint8[::1], uint32, uint32)", cache=True, nogil=True)
def pack_ternary(values, scales, codes, low, high):  # type: ignore[no-untyped-def]
    trits = np.zeros(TERNARY_BLOCK, np.uint8)
    for block in range(len(scales)):
        part = values[TERNARY_BLOCK * block : TERNARY_BLOCK * block + TERNARY_BLOCK]
        largest = uint32(0)
        for i in range(len(part)):
            largest = max(largest, uint32(bits_of(part[i]) & uint32(0x7FFFFFFF)))
        if len(part) < TERNARY_BLOCK or largest >= uint32(0x7F800000):
            trits[:] = 0
        scales[block] = largest if largest < uint32(0x7F800000) else uint32(NOT_FINITE)
        if largest < uint32(0x7F800000):
            scale, first = float_of(largest), TERNARY_BLOCK * block
            for i in range(len(part)):
                kept = uniform_at(uint32(first + i), low, high) * scale < abs(part[i])
                sign = uint32(uint32(bits_of(part[i]) >> uint32(31)) + uint32(1))
                trits[i] = uint8(sign) if kept else uint8(0)
        room = codes[_BYTES * block : _BYTES * block + _BYTES]
        for k in range(len(room)):
            five = trits[5 * k : 5 * k + 5]
            low = five[0] + uint8(3) * five[1] + uint8(9) * five[2]
            room[k] = low + uint8(27) * five[3] + uint8(81) * five[4]


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


@njit("void(float32[::1], uint32[::1], uint32[::1])", cache=True, nogil=True, fastmath={"reassoc"})
def pack_sign(values, scales, words):  # type: ignore[no-untyped-def]
    for block in range(len(scales)):
        part = values[SIGN_BLOCK * block : SIGN_BLOCK * block + SIGN_BLOCK]
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
        word, scale = words[number], scales[number // (SIGN_BLOCK // 32)]
        room = into[32 * number : 32 * number + 32]
        for k in range(32):
            room[k] = float_of(uint32(scale | uint32(uint32(word >> uint32(k)) << uint32(31))))
    for k in range(len(into) - 32 * whole):
        sign = uint32(uint32(words[whole] >> uint32(k)) << uint32(31))
        into[32 * whole + k] = float_of(uint32(scales[whole // (SIGN_BLOCK // 32)] | sign))
