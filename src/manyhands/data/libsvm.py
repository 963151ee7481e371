"""LIBSVM's text format: a label, then `index:value` for every feature that is not zero.

    +1 3:1 11:0.5 14:1    # a comment

Indices are integers from 0 (files usually count from 1) in any order; none may come twice in a line.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.data.parse_kernels import (
    BAD_LABEL,
    BAD_VALUE,
    MOST_INDEX,
    TOO_LARGE,
    byte,
    end_of_line,
    ends_token,
    has_digit,
    is_blank,
    keep_bad,
    number,
    place_of,
)
from manyhands.native.decorators import helper, njit

BAD_INDEX, NEGATIVE, TWICE = 10, 11, 12
WRONG = {
    BAD_LABEL: "label {token} is not a number; a line is a label and then index:value pairs",
    BAD_INDEX: "{token} is not an index:value pair; an index is an integer, as in 3:0.5",
    NEGATIVE: "feature {token} has a negative index; indices are integers of at least 0",
    BAD_VALUE: "feature {token} has a value that is not a finite number",
    TOO_LARGE: "feature {token} has an index too large for a table; give a number of bits to hash into",
    TWICE: "feature {token} appears twice in this line; give each feature once",
}  # by code, what is wrong with a line

_COLON, _HASH, _MINUS, _LINE_FEED, _SPACE, _ZERO = 58, 35, 45, 10, 32, 48
_LONGEST = 10**17  # an index beyond this is read no further, so that it cannot wrap round


def most_entries(text: Any) -> int:
    """At least as many as the features that `text` (an array of bytes) holds."""
    return int(np.count_nonzero(text == _COLON))


@helper()
def _index(text: int, at: int) -> Any:
    value = np.int64(0)
    while has_digit(byte(text, at)):
        if value < _LONGEST:
            value = value * 10 + (np.int64(byte(text, at)) - _ZERO)
        at += 1
    return value, at


@helper()
def _second_of_two(text: int, at: int, end: int) -> int:
    """Where a feature of the good line at `at` comes for the second time; -1 where none does."""
    pairs, bits = 0, 1
    for place in range(at, end):
        pairs += byte(text, place) == _COLON
    while 1 << bits < 2 * pairs:
        bits += 1
    keys = np.empty(1 << bits, np.int64)  # a hash table of those that have come, -1 where there is none
    for place in range(keys.size):
        keys[place] = -1
    while at < end and byte(text, at) != _HASH:
        start = at
        while not ends_token(byte(text, at)) and byte(text, at) != _HASH:
            if byte(text, at) == _COLON:
                key, _ = _index(text, start)
                place = place_of(key, 64 - bits)
                while keys[place] >= 0:
                    if keys[place] == key:
                        return start
                    place = (place + 1) & (keys.size - 1)
                keys[place] = key
            at += 1
        while is_blank(byte(text, at)):
            at += 1
    return -1


@helper()
def _features(text: int, at: int, entry: int, shift: int, indices: Any, values: Any) -> Any:
    """Read to the end of the line, or to what is wrong: that place, next entry, largest index, whether in order."""
    previous, largest, ascends = np.int64(-1), np.int64(-1), True
    while True:
        while is_blank(byte(text, at)):
            at += 1
        if byte(text, at) == _LINE_FEED or byte(text, at) == _HASH:
            return at, entry, largest, ascends, 0
        begin, key = at, np.int64(0)
        while has_digit(byte(text, at)):
            key = min(key * 10 + (np.int64(byte(text, at)) - _ZERO), np.int64(_LONGEST))
            at += 1
        if at == begin or byte(text, at) != _COLON:
            return begin, entry, largest, ascends, NEGATIVE if byte(text, begin) == _MINUS else BAD_INDEX
        if key >= _LONGEST or (shift == 0 and key > MOST_INDEX):
            return begin, entry, largest, ascends, TOO_LARGE
        at += 1
        # A single digit: most values of most files.
        if has_digit(byte(text, at)) and byte(text, at + 1) == _SPACE:
            value = np.float64(np.int64(byte(text, at)) - _ZERO)
            at += 1
        else:
            start = at
            value, at = number(text, at)
            narrow = np.float32(value)
            if (
                at == start
                or not (ends_token(byte(text, at)) or byte(text, at) == _HASH)
                or not np.isfinite(narrow)
            ):
                return begin, entry, largest, ascends, BAD_VALUE
        ascends &= bool(key > previous)
        previous = key
        place = place_of(key, shift)
        indices[entry] = place
        values[entry] = value
        largest = max(largest, place)
        entry += 1


@njit(cache=True, nogil=True)
def parse(
    letters: Any, shift: int, starts: Any, indices: Any, values: Any, labels: Any, weights: Any, problems: Any
) -> Any:
    """Read the lines of `letters`, which end with a line feed, into the arrays of a `Rows`.

    Returns the number of rows, of entries and of lines, the size of the table, and that no names are numbers.
    """
    text, at, row = letters.ctypes.data, 0, 0
    line, entry, largest = np.int64(0), np.int64(0), np.int64(-1)
    starts[0] = 0
    while at < letters.size:
        while is_blank(byte(text, at)):
            at += 1
        if byte(text, at) != _LINE_FEED and byte(text, at) != _HASH:
            begin = at
            label, at = number(text, at)
            if (
                at == begin
                or not (ends_token(byte(text, at)) or byte(text, at) == _HASH)
                or not np.isfinite(label)
            ):
                keep_bad(problems, 0, line, begin, BAD_LABEL)
            else:
                first = at
                at, end, most, ascends, wrong = _features(text, at, entry, shift, indices, values)
                if wrong == 0 and not ascends:
                    second = _second_of_two(text, first, at)
                    if second >= 0:
                        at, wrong = second, TWICE
                if wrong != 0:
                    keep_bad(problems, 0, line, at, wrong)
                else:
                    labels[row] = label
                    weights[row] = 1.0
                    entry = end
                    row += 1
                    starts[row] = entry
                    largest = max(largest, most)
        at = end_of_line(text, at) + 1
        line += 1
    return row, entry, line, largest + 1, (np.int64(0), np.int64(0))
