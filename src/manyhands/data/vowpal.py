"""Vowpal Wabbit's text format: a label, perhaps an importance and a tag, then namespaces of features.

    1 2.0 'tag |user age:0.3 city_paris |words the cat the mat      # label 1, counts twice
    |words no label, to be predicted

A name is hashed together with its namespace; `the`, given twice, counts twice. A name that is all digits is an index as
it stands, so that a file reads like its LIBSVM form; that is well defined as long as only one namespace of the file has
such names, and refused where two do. With `hash=all` they are hashed with their namespace like all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

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
from manyhands.native.decorators import helper, inlined, njit

BAD_IMPORTANCE, BASE, NO_BAR, NO_NAME, BAD_SCALE, NEEDS_BITS, TWO_SPACES = 20, 21, 22, 23, 24, 25, 26
WRONG = {
    BAD_LABEL: "label {token} is not a number; a line is a label and then |namespace name:value ...",
    BAD_IMPORTANCE: "importance {token} is not a number of at least 0",
    BASE: "{token} is a third number before the |, an initial prediction, which is not supported; leave it out",
    NO_BAR: "{token} begins a line without a |, which must come before the features",
    NO_NAME: "feature {token} has no name",
    BAD_VALUE: "feature {token} has a value that is not a finite number",
    BAD_SCALE: "namespace {token} has a scale that is not a finite number",
    TOO_LARGE: "feature {token} has an index too large for a table; give a number of bits to hash into",
    NEEDS_BITS: "feature {token} has a name, which must be hashed; give a number of bits, such as 18, to hash into",
    TWO_SPACES: (
        "feature {token} is a number, and so are features of another namespace before it; give hash=all and a number "
        "of bits to keep them separate"
    ),
}  # by code, what is wrong with a line

NUMBERS, ALL = 0, 1  # how names that are all digits are taken: as they stand, or hashed like the others

_BAR, _COLON, _QUOTE, _LINE_FEED, _ZERO = 124, 58, 39, 10, 48
_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3  # of the hash FNV-1a with 64 bits
_MOST_DIGITS = 17


def most_entries(text: Any) -> int:
    """At least as many as the features that `text` (an array of bytes) holds: each has a blank before it."""
    return int(np.count_nonzero(text <= 32))


@helper()
def _name(text: int, at: int, state: int) -> Any:
    """The hash of a name, continued from `state`, and where the name ends."""
    state = uint64(state)
    while not ends_token(byte(text, at)) and byte(text, at) != _COLON and byte(text, at) != _BAR:
        state = (state ^ uint64(byte(text, at))) * uint64(_PRIME)
        at += 1
    return state, at


@inlined()
def _scale(text: int, at: int) -> Any:
    """The number after a colon, or 1 without a colon, and where it ends; -1 where there is no finite number."""
    if byte(text, at) != _COLON:
        return 1.0, at
    value, end = number(text, at + 1)
    ends = ends_token(byte(text, end)) or byte(text, end) == _BAR
    if end == at + 1 or not ends or not np.isfinite(np.float32(value)):
        return 0.0, -1
    return value, end


@helper()
def _has_bar(text: int, at: int) -> bool:
    while byte(text, at) != _LINE_FEED:
        if byte(text, at) == _BAR:
            return True
        at += 1
    return False


@helper()
def _header(text: int, at: int) -> Any:
    """What stands before the first bar: label, importance, where the bar is, and what is wrong."""
    label, importance, numbers, begin = np.nan, 1.0, 0, at
    while byte(text, at) != _BAR:
        if is_blank(byte(text, at)):
            at += 1
            continue
        if byte(text, at) == _LINE_FEED:
            return label, importance, begin, NO_BAR
        token = at
        while not ends_token(byte(text, at)) and byte(text, at) != _BAR:
            at += 1
        if byte(text, token) == _QUOTE or byte(text, at) == _BAR:
            continue  # a tag
        value, end = number(text, token)
        bad = end != at or not np.isfinite(value)
        if numbers == 0:
            if bad:
                return label, importance, token, BAD_LABEL
            label = value
        elif numbers == 1:
            if bad or value < 0:
                return label, importance, token, BAD_IMPORTANCE
            importance = value
        else:
            return label, importance, token, BASE
        numbers += 1
    return label, importance, at, 0


@inlined()
def _feature(text: int, at: int, space: int, shift: int, hashes: int) -> Any:
    """A feature's name: its key, where it ends, whether it is a number that stands for itself, and what is wrong."""
    begin, key = at, np.int64(0)
    while has_digit(byte(text, at)) and at - begin <= _MOST_DIGITS:
        key = key * 10 + (np.int64(byte(text, at)) - _ZERO)
        at += 1
    if at > begin and (ends_token(byte(text, at)) or byte(text, at) == _COLON or byte(text, at) == _BAR):
        if hashes == NUMBERS:
            return key, at, True, TOO_LARGE if shift == 0 and key > MOST_INDEX else 0
        key = np.int64(uint64(key) + uint64(space))
    else:
        state, at = _name(text, begin, uint64(space))
        key = np.int64(state)
    if at == begin:
        return key, at, False, NO_NAME
    return key, at, False, NEEDS_BITS if shift == 0 else 0


@helper()
def _features(
    text: int, at: int, entry: int, shift: int, hashes: int, numbered: Any, indices: Any, values: Any
) -> Any:
    """Read to the end of the line: that place, next entry, largest index, what is wrong, and `numbered` again."""
    largest, space, scale = np.int64(-1), np.int64(0), 1.0
    has_numbers, numbers_in = numbered  # kept in registers: stores to an array here would cost half the speed
    while byte(text, at) != _LINE_FEED:
        if is_blank(byte(text, at)):
            at += 1
            continue
        begin = at
        if byte(text, at) == _BAR:
            state, at = _name(text, at + 1, uint64(_OFFSET))
            space = np.int64(state)
            scale, at = _scale(text, at)
            if at < 0:
                return begin, entry, largest, BAD_SCALE, (has_numbers, numbers_in)
            continue
        key, at, is_number, wrong = _feature(text, at, space, shift, hashes)
        if is_number:
            if has_numbers and numbers_in != space:
                wrong = TWO_SPACES
            has_numbers, numbers_in = np.int64(1), space
        if wrong != 0:
            return begin, entry, largest, wrong, (has_numbers, numbers_in)
        if byte(text, at) == _COLON and has_digit(byte(text, at + 1)) and ends_token(byte(text, at + 2)):
            value = np.float64(np.int64(byte(text, at + 1)) - _ZERO)  # a digit: spares most of the work
            at += 2
        else:
            value, at = _scale(text, at)
            if at < 0:
                return begin, entry, largest, BAD_VALUE, (has_numbers, numbers_in)
        place = place_of(key, shift)
        indices[entry] = place
        values[entry] = value * scale
        largest = max(largest, place)
        entry += 1
    return at, entry, largest, 0, (has_numbers, numbers_in)


@njit(cache=True, nogil=True)
def parse(
    letters: Any,
    shift: int,
    hashes: int,
    starts: Any,
    indices: Any,
    values: Any,
    labels: Any,
    weights: Any,
    problems: Any,
) -> Any:
    """As `libsvm.parse`; the last result says whether names are numbers, and the hash of their namespace."""
    text, at, row = letters.ctypes.data, 0, 0
    line, entry, largest = np.int64(0), np.int64(0), np.int64(-1)
    numbered = (np.int64(0), np.int64(0))
    starts[0] = 0
    while at < letters.size:
        while is_blank(byte(text, at)):
            at += 1
        if byte(text, at) != _LINE_FEED:
            begin = at
            label, importance, at, wrong = _header(text, at)
            if wrong != 0 and not _has_bar(text, begin):
                at, wrong = begin, NO_BAR  # says more than what is wrong with what may be no header at all
            if wrong == 0:
                at, end, most, wrong, numbered = _features(
                    text, at, entry, shift, hashes, numbered, indices, values
                )
            if wrong == 0:
                labels[row] = label
                weights[row] = importance
                entry = end
                row += 1
                starts[row] = entry
                largest = max(largest, most)
            else:
                keep_bad(problems, int(wrong in (NEEDS_BITS, TWO_SPACES)), line, at, wrong)
        at = end_of_line(text, at) + 1
        line += 1
    return row, entry, line, largest + 1, numbered
