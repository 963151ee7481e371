"""Compiled loops of co-occurrence counting: the rows of the matrix one at a time, each summed in a dense row.

For each word, the places where it stands are visited in the order of the text, and the words around them add
1/distance, or 1, to a dense row of float64. Which cells of the row are in use is kept in a bitmap with a summary above
it, so that emptying the row gives its records sorted, in time that depends on how many there are. The order of every
sum is that of the text, whoever computes it: the number of threads changes no bit.

`keys` and `counts` are one buffer of 16-byte records, seen as int64 (word | context << 32) and as float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from manyhands.native.decorators import helper, njit
from manyhands.workloads.glove.word_table import BREAK

MERGE_DONE, MERGE_FULL = -1, -2


def warm() -> None:
    """Compile everything here: count and merge nothing, shuffle two records that lie apart as those of a file do."""
    text, starts, places = np.full(2, BREAK, np.int32), np.zeros(2, np.int64), np.empty(2, np.int32)
    place_words(text, starts, places)
    dense = np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
    out = np.empty(2, np.int64), np.empty(2)
    count_rows(text, (starts, places), (0, 1), 1, np.ones(1), (True, True), dense, out)
    runs, nothing = (np.empty((1, 2), np.int64), np.empty((1, 2))), np.zeros(1, np.int64)
    merge_rows(np.array([1, 0, 0]), runs, nothing, nothing, dense, out)
    records, others, state = np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(1, np.uint64)
    shuffle_pairs(records[0::2], records[1::2], state)
    chosen, ends = np.empty(2, np.int32), np.zeros(1, np.int64)
    deal_pairs(records[0::2], records[1::2], others[0::2], others[1::2], chosen, ends, state)


@intrinsic  # type: ignore[untyped-decorator]
def _lowest_bit(typingctx: Any, word: Any) -> Any:  # noqa: ARG001 - numba decides what it is called with
    """The place of the lowest 1 in an int64 that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


@helper()
def _empty(row: Any, used: Any, groups: Any, word: int, keys: Any, counts: Any, at: int) -> Any:
    """Write the cells in use as sorted records from record `at` on and clear them; return where the next one goes."""
    for group in range(groups.size):
        members = groups[group]
        groups[group] = 0
        while members != 0:
            place = (group << 6) + _lowest_bit(members)
            members &= members - 1
            cells = used[place]
            used[place] = 0
            while cells != 0:
                cell = (place << 6) + _lowest_bit(cells)
                cells &= cells - 1
                keys[2 * at] = (word + 1) | ((cell + 1) << 32)
                counts[2 * at + 1] = row[cell]
                row[cell] = 0.0
                at += 1
    return at


@njit(cache=True, nogil=True)
def place_words(numbers: Any, starts: Any, places: Any) -> None:
    """Where each word stands: `places[starts[w] : starts[w + 1]]`, rising, for the words among `numbers`.

    `starts` has one item more than there are words and comes filled with zeros.
    """
    for index in range(numbers.size):
        if numbers[index] != BREAK:
            starts[numbers[index] + 1] += 1
    for word in range(1, starts.size):
        starts[word] += starts[word - 1]
    for index in range(numbers.size):
        word = numbers[index]
        if word != BREAK:
            places[starts[word]] = index
            starts[word] += 1
    for word in range(starts.size - 1, 0, -1):  # each start has moved to its end: move them all up by one
        starts[word] = starts[word - 1]
    starts[0] = 0


@njit(cache=True, nogil=True)
def count_rows(
    text: Any, index: Any, rows: Any, carried: int, weights: Any, kinds: Any, dense: Any, out: Any
) -> Any:
    """The records of some rows, sorted; returns how many.

    `text` holds numbers of words with a BREAK at both ends; its first `carried` items belong to the part before, so
    that pairs among them are counted already. `index` = (starts, places) from `place_words`, `rows` = (first, last
    + 1), `dense` = (row, used, groups), all zero, `out` = (keys, counts) with enough room. `weights` are what words
    count at distances 1, 2, … up to the window, above 0. The record of a pair is (left, right); of `kinds` =
    (symmetric, diagonal) the first adds (right, left), and without the second a word is no context of itself.
    """
    starts, places = index
    row, used, groups = dense
    keys, counts = out
    symmetric, diagonal = kinds
    at = 0
    for word in range(rows[0], rows[1]):
        for visit in range(starts[word], starts[word + 1]):
            place = np.int64(places[visit])
            for step in range(1, -2 if symmetric else 0, -2):  # to the right, to the left
                for distance in range(1, weights.size + 1):
                    other = place + step * distance
                    cell = np.int64(text[other])
                    if cell == BREAK:
                        break
                    if (diagonal or cell != word) and (place >= carried or other >= carried):
                        # Written out here and in merge_rows: in a function of its own it would count references to
                        # its arrays, with atomics, for every pair.
                        before = row[cell]
                        if before == 0.0:  # the first weight of a cell, never 0, marks it
                            used[cell >> 6] |= np.int64(1) << (cell & 63)
                            groups[cell >> 12] |= np.int64(1) << ((cell >> 6) & 63)
                        row[cell] = before + weights[distance - 1]
        if starts[word] < starts[word + 1]:
            at = _empty(row, used, groups, word, keys, counts, at)
    return at


@njit(cache=True, nogil=True)
def merge_rows(state: Any, runs: Any, cursors: Any, ends: Any, dense: Any, out: Any) -> Any:
    """Merge sorted runs row by row, equal pairs summed in the order of the runs, as far as the buffers go.

    `runs` = (keys, counts) are the buffers of all runs, one row each, of which items `cursors[r]` to `ends[r]` are
    waiting; a run with `ends[r] == 0` is at its end. Returns a run whose buffer must be refilled, MERGE_FULL where
    `out` must be emptied, or MERGE_DONE. `state` = [word, run, records in out] resumes.
    """
    run_keys, run_counts = runs
    row, used, groups = dense
    keys, counts = out
    while state[0] < row.size:
        if state[2] + row.size > keys.size // 2:
            return MERGE_FULL
        wanted = state[0] + 1
        while state[1] < cursors.size:
            run = state[1]
            cursor, end = cursors[run], ends[run]
            own_keys, own_counts = run_keys[run], run_counts[run]
            while cursor < end and (own_keys[2 * cursor] & 0xFFFFFFFF) == wanted:
                cell = (own_keys[2 * cursor] >> 32) - 1
                before = row[cell]
                if before == 0.0:
                    used[cell >> 6] |= np.int64(1) << (cell & 63)
                    groups[cell >> 12] |= np.int64(1) << ((cell >> 6) & 63)
                row[cell] = before + own_counts[2 * cursor + 1]
                cursor += 1
            cursors[run] = cursor
            if cursor == end and end != 0:
                return run
            state[1] = run + 1
        state[2] = _empty(row, used, groups, state[0], keys, counts, state[2])
        state[0] += 1
        state[1] = 0
    return MERGE_DONE


@helper()
def _below(limit: int, state: Any) -> Any:
    """A number from 0 to limit - 1: SplitMix64 (Steele, Lea, Flood 2014), its upper 53 bits as a fraction."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.int64(np.float64(mixed >> np.uint64(11)) * 2.0**-53 * limit)


@njit(cache=True, nogil=True)
def shuffle_pairs(pairs: Any, bits: Any, state: Any) -> None:
    """Fisher and Yates, in place."""
    for last in range(pairs.size - 1, 0, -1):
        other = _below(last + 1, state)
        pairs[last], pairs[other] = pairs[other], pairs[last]
        bits[last], bits[other] = bits[other], bits[last]


@njit(cache=True, nogil=True)
def deal_pairs(
    pairs: Any, bits: Any, out_pairs: Any, out_bits: Any, chosen: Any, ends: Any, state: Any
) -> None:
    """Draw a part for each record and put those of one part together; `ends` says where each part ends."""
    ends[:] = 0
    for index in range(pairs.size):
        chosen[index] = _below(ends.size, state)
        ends[chosen[index]] += 1
    for part in range(1, ends.size):
        ends[part] += ends[part - 1]
    for index in range(pairs.size - 1, -1, -1):
        ends[chosen[index]] -= 1
        out_pairs[ends[chosen[index]]] = pairs[index]
        out_bits[ends[chosen[index]]] = bits[index]
    for part in range(ends.size - 1):  # each end has moved to its start, which is the end of the part before
        ends[part] = ends[part + 1]
    ends[-1] = pairs.size
