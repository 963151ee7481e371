"""Compiled parts of the readers of sparse text: numbers, and features that become indices.

A block of text ends with a line feed, so that no loop needs to look for the block's end: every loop stops there; and
PADDING bytes of the caller's come after it, so that eight bytes may be read at once anywhere. A line that is wrong is
left out, and `problems` gets two rows of (how many, the first one's line, place and code): of lines that are wrong by
themselves, and of lines that the settings of reading reject, which are never skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types, uint64
from numba.extending import intrinsic

from manyhands.native.decorators import helper, inlined

BAD_LABEL, BAD_VALUE, TOO_LARGE = 1, 2, 3  # codes of what is wrong with a line; each format has more

# The largest index that is a row of a table without hashing: indices are kept in 32 bits
MOST_INDEX = 2**31 - 2

# 2^64 over the golden ratio: multiplied by it, neighbours fall far apart (Knuth, volume 3, section 6.4)
GOLDEN = 0x9E3779B97F4A7C15

PADDING = 8  # bytes that must come after a block of text, whatever they are

_POWERS = np.array([10.0**exponent for exponent in range(23)])  # all of them exact
_WHOLE_POWERS = np.array([10**exponent for exponent in range(9)], np.int64)
_MOST_DIGITS = 18  # of a mantissa in 63 bits
_LINE_FEED, _SPACE, _PLUS, _MINUS, _POINT = 10, 32, 43, 45, 46


@intrinsic  # type: ignore[untyped-decorator]
def byte(_typing: Any, _text: Any, _at: Any) -> Any:
    """The byte at `at` of the text at the address `text`: an array would be unpacked and counted by every function."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(builder.add(args[0], args[1]), ir.IntType(8).as_pointer()))

    return types.uint8(types.int64, types.int64), codegen


@inlined()
def has_digit(letter: int) -> Any:
    """Whether a byte is one of 0 to 9: one comparison, as bytes wrap round."""
    return np.uint8(letter - np.uint8(48)) < np.uint8(10)


@inlined()
def is_blank(letter: int) -> bool:
    # Between two tokens of a line: space, tab, return (and any other control)
    return letter <= _SPACE and letter != _LINE_FEED


@inlined()
def ends_token(letter: int) -> bool:
    return letter <= _SPACE  # blank, or the end of the line


@intrinsic  # type: ignore[untyped-decorator]
def _eight(_typing: Any, _address: Any) -> Any:
    """The eight bytes at an address, which need not be aligned, the first as the lowest."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _trailing_zeros(_typing: Any, _value: Any) -> Any:
    """How many of the lowest bits are 0; 64 for 0."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@inlined()
def _digits(address: int) -> Any:
    """The number that the digits at an address make, at most eight of them, and how many they are.

    Without a loop, whose end a processor would have to guess: bytes that are no digits are found by a carry into their
    highest bits, those before them are moved up so that zeros lead, and neighbours are added up in pairs, three times.
    """
    word = _eight(address) ^ uint64(0x3030303030303030)
    others = (word | (word + uint64(0x7676767676767676))) & uint64(0x8080808080808080)
    count = _trailing_zeros(others) >> uint64(3)
    if count == uint64(0):
        return int64(0), int64(0)
    word <<= uint64(64) - uint64(8) * count
    word = (word * uint64(10) + (word >> uint64(8))) & uint64(0x00FF00FF00FF00FF)
    word = (word * uint64(100) + (word >> uint64(16))) & uint64(0x0000FFFF0000FFFF)
    word = (word * uint64(10000) + (word >> uint64(32))) & uint64(0xFFFFFFFF)
    return int64(word), int64(count)


@helper()
def end_of_line(text: int, at: int) -> int:
    while byte(text, at) != _LINE_FEED:
        at += 1
    return at


@helper()
def _long_mantissa(text: int, at: int) -> Any:
    """The first digits at `at`, as many as fit, and the power of ten that they leave out; a point may be among them."""
    mantissa, exponent, room, fraction = np.int64(0), 0, _MOST_DIGITS, 0
    while has_digit(byte(text, at)) or (byte(text, at) == _POINT and not fraction):
        if byte(text, at) == _POINT:
            fraction = 1
        elif room > 0:
            mantissa = mantissa * 10 + (np.int64(byte(text, at)) - 48)
            room -= 1 if mantissa else 0  # leading zeros take no room
            exponent -= fraction
        else:
            exponent += 1 - fraction
        at += 1
    return mantissa, exponent


@inlined()
def _exponent(text: int, at: int) -> Any:
    """The exponent at `at`, after its e, and where it ends: at `at` itself where there is none."""
    mark = at
    below = byte(text, mark) == _MINUS
    if below or byte(text, mark) == _PLUS:
        mark += 1
    power, end = np.int64(0), mark
    while has_digit(byte(text, end)):
        power = min(power * 10 + (np.int64(byte(text, end)) - 48), np.int64(100_000))
        end += 1
    return -power if below else power, (end if end > mark else at)


@helper()
def number(text: int, at: int) -> Any:
    """A decimal number at `at`: its value and where it ends, which is `at` itself where there is none.

    The value is the nearest double as long as there are at most 15 digits and the exponent is within ±22, and at
    most a few units of the last place of a double away beyond that.
    """
    begin = at
    negative = byte(text, at) == _MINUS
    if negative or byte(text, at) == _PLUS:
        at += 1
    first, mantissa = at, np.int64(0)
    while has_digit(byte(text, at)):
        mantissa = mantissa * 10 + (np.int64(byte(text, at)) - 48)  # too many wrap: see below
        at += 1
    count, exponent = at - first, 0
    if byte(text, at) == _POINT:
        at += 1
        point = at
        fraction, found = _digits(text + at)
        mantissa = mantissa * _WHOLE_POWERS[found] + fraction
        at += found
        while has_digit(byte(text, at)):
            mantissa = mantissa * 10 + (np.int64(byte(text, at)) - 48)
            at += 1
        exponent = point - at
        count -= exponent
    if count == 0:
        return 0.0, begin
    if count > _MOST_DIGITS:
        mantissa, exponent = _long_mantissa(text, first)
    if byte(text, at) | 32 == 101:  # e or E
        power, end = _exponent(text, at + 1)
        if end == at + 1:
            return 0.0, begin
        exponent += power
        at = end
    value = np.float64(mantissa)
    if exponent < -22 or exponent > 22:
        value = _scaled(value, exponent)
    elif exponent < 0:
        value /= _POWERS[-exponent]
    elif exponent > 0:
        value *= _POWERS[exponent]
    return -value if negative else value, at


@helper(error_model="numpy")
def _scaled(value: float, exponent: int) -> Any:
    """Value times a power of ten, without leaving the range of a double on the way."""
    while exponent > 22 and value != 0.0 and value < np.inf:
        value *= 1e22
        exponent -= 22
    while exponent < -22 and value != 0.0:
        value /= 1e22
        exponent += 22
    if value == 0.0 or value == np.inf:
        return value
    return value * _POWERS[exponent] if exponent > 0 else value / _POWERS[-exponent]


@inlined()
def place_of(key: int, shift: int) -> Any:
    """The row of a feature: its own number (`shift` 0), or hashed, the upper bits of a product: 64 - `shift` bits."""
    if shift == 0:
        return key
    return np.int64((uint64(key) * uint64(GOLDEN)) >> uint64(shift))


@inlined()
def keep_bad(problems: Any, kind: int, line: int, at: int, code: int) -> None:
    """Count a line that is wrong (`kind` 0) or rejected (1), and keep the place of the first."""
    if problems[kind, 0] == 0:
        problems[kind, 1], problems[kind, 2], problems[kind, 3] = line, at, code
    problems[kind, 0] += 1
