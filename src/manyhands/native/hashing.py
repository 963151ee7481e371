"""XXH64 over memory, compiled: a 64-bit hash at the speed of memory, to tell whether two gradients are the same.

The function is Yann Collet's (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), so that its published values hold here
too. It finds accidents, not malice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.native.decorators import inlined, njit

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_FULL = np.uint64(64)
_MASK = (1 << 64) - 1


def warm() -> None:
    xxh64(np.empty(0, np.uint8))


def xxh64(data: Any, seed: int = 0) -> int:
    """The XXH64 of a contiguous one-dimensional numpy array of bytes, from 0 to 2**64 - 1."""
    return int(_xxh64(data, np.uint64(seed & _MASK))) & _MASK


@inlined()
def _rotated(value: Any, by: Any) -> Any:
    return (value << by) | (value >> (_FULL - by))


@inlined()
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, np.uint64(31)) * _P1


@inlined()
def _merged(total: Any, lane: Any) -> Any:
    return (total ^ _round(np.uint64(0), lane)) * _P1 + _P4


@njit(cache=True, nogil=True)
def _xxh64(data: Any, seed: Any) -> Any:
    size = data.size
    words = data[: size // 8 * 8].view(np.uint64)
    count = words.size // 4 * 4
    if size >= 32:
        one, two, three, four = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        for index in range(0, count, 4):  # four lanes, so that no multiplication waits for the one before
            one = _round(one, words[index])
            two = _round(two, words[index + 1])
            three = _round(three, words[index + 2])
            four = _round(four, words[index + 3])
        total = _rotated(one, np.uint64(1)) + _rotated(two, np.uint64(7))
        total += _rotated(three, np.uint64(12)) + _rotated(four, np.uint64(18))
        total = _merged(_merged(_merged(_merged(total, one), two), three), four)
    else:
        total = seed + _P5
    total += np.uint64(size)
    for index in range(count, words.size):
        total ^= _round(np.uint64(0), words[index])
        total = _rotated(total, np.uint64(27)) * _P1 + _P4
    at = words.size * 8
    if size - at >= 4:
        half = np.uint64(data[at : at + 4].view(np.uint32)[0])
        total = _rotated(total ^ (half * _P1), np.uint64(23)) * _P2 + _P3
        at += 4
    for index in range(at, size):
        total = _rotated(total ^ (np.uint64(data[index]) * _P5), np.uint64(11)) * _P1
    total = (total ^ (total >> np.uint64(33))) * _P2
    total = (total ^ (total >> np.uint64(29))) * _P3
    return total ^ (total >> np.uint64(32))
