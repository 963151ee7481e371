"""Words to numbers, straight from bytes: a hash table that compiled code fills and asks, without Python strings.

Open addressing over 64-bit FNV-1a hashes (Fowler, Noll, Vo), at most half full; a match compares the bytes themselves,
so two words never become one. Words get numbers in the order in which they first come, and their bytes lie one after
the other in one arena.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.native.decorators import inlined, njit

BREAK = -1  # stands for the end of a line among the numbers of words

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_HALF = np.uint64(32)
_EMPTY = np.int32(-1)
_SPACE, _NEWLINE, _RETURN, _TAB = 32, 10, 13, 9


class WordTable:
    """Counts words and numbers them; one thread fills it, any number may ask `numbers`."""

    def __init__(self, room: int = 1 << 12) -> None:
        slots = 1 << max(4, (2 * room - 1).bit_length())
        self._slots = np.full(slots, _EMPTY, np.int32)
        self._hashes = np.empty(slots // 2, np.uint64)
        self._starts = np.zeros(slots // 2 + 1, np.int64)
        self._counts = np.zeros(slots // 2, np.int64)
        self._arena = np.empty(16 * slots // 2, np.uint8)
        self._size = np.zeros(1, np.int64)

    @classmethod
    def of(cls, words: Iterable[bytes]) -> Self:
        """A table in which each of these different words has its place in the order as its number."""
        every = list(words)
        table = cls(len(every) + 1)
        table.count(b"\n".join(every))
        return table

    def __len__(self) -> int:
        return int(self._size[0])

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays())

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: len(self)]

    def word(self, number: int) -> bytes:
        return self._arena[self._starts[number] : self._starts[number + 1]].tobytes()

    def count(self, text: bytes) -> int:
        data = np.frombuffer(text, np.uint8)
        done = np.zeros(2, np.int64)  # bytes, words
        while True:
            _count(data, *self._arrays(), done)
            if done[0] == len(data):
                return int(done[1])
            self._grow(len(data) - int(done[0]))

    def absorb(self, other: WordTable) -> None:
        done, theirs = np.zeros(1, np.int64), (other._hashes, other._starts, other._counts, other._arena)
        while True:
            _absorb(*theirs, len(other), *self._arrays(), done)
            if done[0] == len(other):
                return
            self._grow(int(other._starts[done[0] + 1] - other._starts[done[0]]))

    def numbers(self, text: bytes, out: NDArray[np.int32]) -> int:
        """Write the numbers of the words of `text` to `out` and return how many; words not in the table are left out.

        A line's end is a `BREAK`, several in a row are one. `out` needs room for as many as `text` has bytes.
        """
        data = np.frombuffer(text, np.uint8)
        return int(_numbers(data, self._slots, self._hashes, self._starts, self._arena, out))

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self._slots, self._hashes, self._starts, self._counts, self._arena, self._size

    def _grow(self, longest: int) -> None:
        """Make room: twice the entries when they are used up, twice the arena (and a word of `longest` bytes) else."""
        size = len(self)
        if size == len(self._hashes):
            self._hashes, self._counts = _longer(self._hashes, size), _longer(self._counts, size)
            self._starts = _longer(self._starts, size)
            self._slots = np.full(4 * size, _EMPTY, np.int32)
            _rehash(self._slots, self._hashes, size)
        else:
            # A word is at most as long as what is left, but no single word needs all of a long text.
            self._arena = _longer(self._arena, len(self._arena) + min(longest, 1 << 16))


def warm() -> None:
    """Compile everything here, by counting two words, which is one more than there is room for at first."""
    table, other = WordTable(1), WordTable()
    table._grow(0)
    table.count(b"two words")
    other.absorb(table)
    table.numbers(b"words\n", np.empty(6, np.int32))


def _longer(array: NDArray[Any], more: int) -> NDArray[Any]:
    return np.concatenate([array, np.zeros(more, array.dtype)])


@inlined()
def _white(byte: Any) -> Any:
    return byte == _SPACE or (byte >= _TAB and byte <= _RETURN)


@njit(inline="always")
def _same(one: Any, at: int, other: Any, start: int, length: int) -> Any:
    for index in range(length):  # noqa: SIM110 - compiled, and numba has no generators to give to all()
        if one[at + index] != other[start + index]:
            return False
    return True


@njit(inline="always")
def _slot(slots: Any, hashes: Any, starts: Any, arena: Any, word: Any) -> Any:
    """The slot of a word, `word` = (its bytes' array, where, how long, hash), or the empty one where it belongs."""
    data, at, length, code = word
    mask = slots.size - 1
    place = np.int64((code ^ (code >> _HALF)) & np.uint64(mask))
    while True:
        entry = slots[place]
        if entry < 0:
            return place
        start = starts[entry]
        same_size = hashes[entry] == code and starts[entry + 1] - start == length
        if same_size and _same(data, at, arena, start, length):
            return place
        place = (place + 1) & mask


@njit(inline="always")
def _add(table: Any, word: Any, times: int) -> Any:
    slots, hashes, starts, counts, arena, size = table
    data, at, length, code = word
    place = _slot(slots, hashes, starts, arena, word)
    entry = slots[place]
    if entry < 0:
        entry = np.int32(size[0])
        begin = starts[entry]
        if entry == hashes.size or begin + length > arena.size:
            return False
        for index in range(length):
            arena[begin + index] = data[at + index]
        starts[entry + 1] = begin + length
        hashes[entry] = code
        counts[entry] = 0
        slots[place] = entry
        size[0] += 1
    counts[entry] += times
    return True


@njit(inline="always")
def _word_at(data: Any, at: int) -> Any:
    code, end = _FNV_OFFSET, at
    while end < data.size and not _white(data[end]):
        code = (code ^ np.uint64(data[end])) * _FNV_PRIME
        end += 1
    return end, code


@njit(cache=True, nogil=True)
def _count(
    data: Any, slots: Any, hashes: Any, starts: Any, counts: Any, arena: Any, size: Any, done: Any
) -> None:
    at = done[0]
    while at < data.size:
        if _white(data[at]):
            at += 1
            continue
        end, code = _word_at(data, at)
        if not _add((slots, hashes, starts, counts, arena, size), (data, at, end - at, code), 1):
            break
        done[1] += 1
        at = end
    done[0] = at


@njit(cache=True, nogil=True)
def _absorb(
    other_hashes: Any, other_starts: Any, other_counts: Any, other_arena: Any, other_size: Any,
    slots: Any, hashes: Any, starts: Any, counts: Any, arena: Any, size: Any, done: Any,
) -> None:  # fmt: skip
    for entry in range(done[0], other_size):
        at = other_starts[entry]
        word = (other_arena, at, other_starts[entry + 1] - at, other_hashes[entry])
        if not _add((slots, hashes, starts, counts, arena, size), word, other_counts[entry]):
            return
        done[0] = entry + 1


@njit(cache=True, nogil=True)
def _rehash(slots: Any, hashes: Any, size: int) -> None:
    mask = slots.size - 1
    for entry in range(size):
        code = hashes[entry]
        place = np.int64((code ^ (code >> _HALF)) & np.uint64(mask))
        while slots[place] >= 0:
            place = (place + 1) & mask
        slots[place] = entry


@njit(cache=True, nogil=True)
def _numbers(data: Any, slots: Any, hashes: Any, starts: Any, arena: Any, out: Any) -> Any:
    found, at = 0, 0
    while at < data.size:
        byte = data[at]
        if _white(byte):
            if byte == _NEWLINE and (found == 0 or out[found - 1] != BREAK):
                out[found] = BREAK
                found += 1
            at += 1
            continue
        end, code = _word_at(data, at)
        entry = slots[_slot(slots, hashes, starts, arena, (data, at, end - at, code))]
        if entry >= 0:
            out[found] = entry
            found += 1
        at = end
    return found
