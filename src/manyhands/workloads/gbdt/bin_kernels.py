"""Compiled binning: where the values of a feature are cut, and which bin each value of a table is in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from manyhands.native.decorators import helper, inlined, njit

TILE = 8  # columns whose bytes lie side by side in a row of a tile

_ROWS = 512  # at a time: a feature's bounds and these rows stay in the nearest cache


@inlined()
def _between(low: float, high: float) -> float:
    """A bound that `low` does not exceed and `high` does."""
    middle = low / 2 + high / 2
    return middle if low <= middle < high else low


@njit(cache=True, nogil=True, error_model="numpy")
def cut(values: Any, counts: Any, most: int, least_rows: int, bounds: Any) -> int:
    """Write upper bounds of at most `most` bins of about the same size; how many bins there are.

    `values` are ascending, `counts` how often each comes. A value that would fill a bin alone has one of its own; the
    others share what is left. A bin has `least_rows` rows at least. The last bound is infinity.
    """
    total = counts.sum()
    is_exact = values.size <= most
    large, left, slots = 0, total, most
    if not is_exact:
        for i in range(values.size):
            if counts[i] * most >= total:
                large += 1
                left -= counts[i]
        slots = max(most - large, 1)
    share = left / slots
    bins, held = 0, 0
    for i in range(values.size - 1):
        held += counts[i]
        ends = held >= least_rows
        if not is_exact:
            alone = counts[i] * most >= total
            next_alone = counts[i + 1] * most >= total
            ends = ends and (alone or held >= share or (next_alone and held >= share / 2))
        if ends:
            if bins == most - 1:
                break
            bounds[bins] = _between(values[i], values[i + 1])
            bins += 1
            held = 0
    bounds[bins] = np.inf
    return bins + 1


@helper(error_model="numpy")
def _bin_of(value: float, kind: int, bounds: Any, places: Any) -> Any:
    """`kind` is 2 for categories, 1 where missing values have the bin after the last, else 0: they count as zero."""
    if kind == 2:
        if not 0 <= value < 2147483648.0:
            return 0
        at = np.searchsorted(bounds, np.floor(value))
        return places[at] if at < bounds.size and bounds[at] == np.floor(value) else 0
    if np.isnan(value):
        if kind == 1:
            return bounds.size
        value = 0.0
    return np.searchsorted(bounds, value)


@njit(cache=True, nogil=True, error_model="numpy")
def bin_dense(values: Any, columns: Any, kinds: Any, bounds: Any, places: Any, starts: Any, out: Any) -> None:
    for first in range(0, values.shape[0], _ROWS):
        last = min(first + _ROWS, values.shape[0])
        for f in range(columns.size):
            own, own_places = bounds[starts[f] : starts[f + 1]], places[starts[f] : starts[f + 1]]
            column, kind, cuts = columns[f], kinds[f], own.size - 1
            if kind == 2:
                for row in range(first, last):
                    out[row, f] = _bin_of(np.float64(values[row, column]), kind, own, own_places)
                continue
            missing = cuts + 1 if kind == 1 else np.searchsorted(own, 0.0)
            for row in range(first, last):
                value = np.float64(values[row, column])
                place, left = uint64(0), uint64(cuts)
                while left > uint64(1):  # without branches, which no processor could foresee
                    half = left >> uint64(1)
                    place = place + half if own[place + half - uint64(1)] < value else place
                    left -= half
                if left == uint64(1) and own[place] < value:
                    place += uint64(1)
                out[row, f] = missing if np.isnan(value) else place


@njit(cache=True, nogil=True, error_model="numpy")
def bin_sparse(rows: Any, slots: Any, kinds: Any, bounds: Any, places: Any, starts: Any, out: Any) -> None:
    """The same for sparse rows, whose absent values are 0; `slots` leads from a column to its place, or to -1."""
    begins, indices, values = rows
    zeros = np.empty(kinds.size, np.uint8)
    for f in range(kinds.size):
        own, own_places = bounds[starts[f] : starts[f + 1]], places[starts[f] : starts[f + 1]]
        zeros[f] = _bin_of(0.0, kinds[f], own, own_places)
    for row in range(out.shape[0]):
        for f in range(kinds.size):
            out[row, f] = zeros[f]
        for j in range(begins[row], begins[row + 1]):
            if indices[j] < slots.size and slots[indices[j]] >= 0:
                f = slots[indices[j]]
                own, own_places = bounds[starts[f] : starts[f + 1]], places[starts[f] : starts[f + 1]]
                out[row, f] = _bin_of(np.float64(values[j]), kinds[f], own, own_places)


@njit(cache=True, nogil=True)
def pack(found: Any, columns: Any, firsts: Any, zeros: Any, begin: int, tiles: Any, clashes: Any) -> None:
    """Write bins of rows to `tiles`, from row `begin` on, as a `ByteLayout` says; tiles are 0 before.

    Where a shared byte is taken already, `clashes` is 1 for the feature that comes later.
    """
    for first in range(0, found.shape[0], _ROWS):
        last = min(first + _ROWS, found.shape[0])
        for f in range(columns.size):
            tile, lane, start, zero = columns[f] // TILE, columns[f] % TILE, firsts[f], zeros[f]
            for row in range(first, last):
                number = np.int64(found[row, f])
                if start == 0:
                    tiles[tile, begin + row, lane] = number
                elif number != zero:
                    if tiles[tile, begin + row, lane] != 0:
                        clashes[f] = 1
                    tiles[tile, begin + row, lane] = start + number - (1 if number > zero else 0)


_ZERO = 1e-35  # what LightGBM's files count as zero, where zero is missing


@njit(cache=True, nogil=True, error_model="numpy")
def add_trees(values: Any, starts: Any, arrays: Any, out: Any) -> None:
    """Add the leaf of each row in each tree; all arrays are those of `DecisionTree`, one tree after the other."""
    node_starts, leaf_starts, set_starts, word_starts = starts
    feature, threshold, decision, left, right, leaf_value, sets, words = arrays
    for tree in range(node_starts.size - 1):
        first, leaf, own_sets = node_starts[tree], leaf_starts[tree], set_starts[tree]
        own_words = words[word_starts[tree] : word_starts[tree + 1]]
        if node_starts[tree + 1] == first:
            for row in range(out.size):
                out[row] += leaf_value[leaf]
            continue
        for row in range(out.size):
            node = 0
            while node >= 0:
                at = first + node
                value, kind = values[row, feature[at]], decision[at]
                if kind & 1:
                    goes_left = False
                    if 0 <= value < 2147483648.0:
                        category, number = np.int64(value), np.int64(threshold[at])
                        begin, end = sets[own_sets + number], sets[own_sets + number + 1]
                        if category // 32 < end - begin:
                            word = own_words[begin + category // 32]
                            goes_left = (word >> np.uint32(category % 32)) & 1 == 1
                else:
                    missing = (kind >> 2) & 3
                    if np.isnan(value) and missing != 2:
                        value = 0.0
                    if (missing == 1 and abs(value) <= _ZERO) or (missing == 2 and np.isnan(value)):
                        goes_left = kind & 2 == 2
                    else:
                        goes_left = value <= threshold[at]
                node = left[at] if goes_left else right[at]
            out[row] += leaf_value[leaf - 1 - node]


def warm() -> None:
    bounds, places = np.full(1, np.inf), np.zeros(1, np.int64)
    cut(np.zeros(1), np.ones(1, np.int64), 1, 1, bounds)
    starts, kinds, out = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.uint8)
    for kind in (np.float32, np.float64):
        bin_dense(np.zeros((0, 0), kind), starts[:0], kinds, bounds, places, starts, out)
    rows = np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
    bin_sparse(rows, np.zeros(0, np.int64), kinds, bounds, places, starts, out)
    numbers = np.zeros(0, np.int64)
    pack(out, numbers, numbers, numbers, 0, np.zeros((0, 0, TILE), np.uint8), numbers)
    starts, whole, real = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0)
    arrays = whole, real, whole, whole, whole, real, starts, np.zeros(0, np.uint32)
    add_trees(np.zeros((0, 1)), (starts,) * 4, arrays, real)
