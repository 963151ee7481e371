"""Compiled binning: where the values of a feature are cut, and which bin each value of a table is in."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.compiled.decorators import inlined, njit

__all__ = ["bin_dense", "bin_sparse", "cut", "warm"]


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


@inlined()
def _number_in(value: float, bounds: Any, begin: int, end: int) -> Any:
    """The bin whose bound is the first not below `value`; NaN has none."""
    low, high = begin, end - 1
    while low < high:
        middle = (low + high) >> 1
        if value <= bounds[middle]:
            high = middle
        else:
            low = middle + 1
    return low - begin


@inlined()
def _category_in(value: float, bounds: Any, places: Any, begin: int, end: int) -> Any:
    """The bin of a category, which `bounds` holds in ascending order and `places` gives; 0 for others."""
    if not 0 <= value < 2147483648.0:
        return 0
    wanted = np.floor(value)
    low, high = begin, end
    while low < high:
        middle = (low + high) >> 1
        if bounds[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    if low < end and bounds[low] == wanted:
        return places[low]
    return 0


@inlined()
def _bin_of(value: float, kind: int, bounds: Any, places: Any, begin: int, end: int) -> Any:
    """`kind` is 2 for categories, 1 where missing values have the bin after the last, else 0: they count as zero."""
    if kind == 2:
        return _category_in(value, bounds, places, begin, end)
    if np.isnan(value):
        return end - begin if kind == 1 else _number_in(0.0, bounds, begin, end)
    return _number_in(value, bounds, begin, end)


@njit(cache=True, nogil=True, error_model="numpy")
def bin_dense(values: Any, columns: Any, kinds: Any, bounds: Any, places: Any, starts: Any, out: Any) -> None:
    """The bin of every row's value in each of `columns`."""
    for row in range(values.shape[0]):
        for f in range(columns.size):
            out[row, f] = _bin_of(
                np.float64(values[row, columns[f]]), kinds[f], bounds, places, starts[f], starts[f + 1]
            )


@njit(cache=True, nogil=True, error_model="numpy")
def bin_sparse(rows: Any, slots: Any, kinds: Any, bounds: Any, places: Any, starts: Any, out: Any) -> None:
    """The same for sparse rows, whose absent values are 0; `slots` leads from a column to its place, or to -1."""
    begins, indices, values = rows
    zeros = np.empty(kinds.size, np.uint8)
    for f in range(kinds.size):
        zeros[f] = _bin_of(0.0, kinds[f], bounds, places, starts[f], starts[f + 1])
    for row in range(out.shape[0]):
        for f in range(kinds.size):
            out[row, f] = zeros[f]
        for j in range(begins[row], begins[row + 1]):
            if indices[j] < slots.size and slots[indices[j]] >= 0:
                f = slots[indices[j]]
                out[row, f] = _bin_of(
                    np.float64(values[j]), kinds[f], bounds, places, starts[f], starts[f + 1]
                )


def warm() -> None:
    """Compile by binning nothing."""
    bounds, places = np.full(1, np.inf), np.zeros(1, np.int64)
    cut(np.zeros(1), np.ones(1, np.int64), 1, 1, bounds)
    starts, kinds, out = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.uint8)
    for kind in (np.float32, np.float64):
        bin_dense(np.zeros((0, 0), kind), starts[:0], kinds, bounds, places, starts, out)
    rows = np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
    bin_sparse(rows, np.zeros(0, np.int64), kinds, bounds, places, starts, out)
