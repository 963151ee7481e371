"""Compiled products of sparse rows: both halves of AᵀAQ while rows are at hand, and all products of two columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from manyhands.native.decorators import njit
from manyhands.workloads.svd.vector_kernels import (
    add_line_4,
    add_line_8,
    add_line_12,
    sum_lines_4,
    sum_lines_8,
    sum_lines_12,
)

__all__ = ["TILE", "gram_rows", "multiply_rows", "project_rows", "warm"]

TILE = 4
"""Blocks are padded to a multiple, so that their lines lie alike."""

_SCRATCH = 1 << 16  # numbers

_MATH = {"reassoc", "contract", "nsz"}


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def multiply_rows(
    starts: Any, indices: Any, values: Any, vectors: Any, width: int, less: Any, product: Any, sums: Any
) -> None:
    """Add Aᵀ(AQ - 1·lessᵀ) to `product` and the columns of AQ - 1·lessᵀ to `sums`; Q has rows of `width`.

    Some rows go through Q and then, while their entries and products are in the cache, through `product`: row by row,
    the two tables would drive each other out of it. `width` is a multiple of `TILE`. Where `sums` is empty, `less`
    is 0.
    """
    rows, wide = starts.size - 1, np.int64(width)
    most: Any = max(1, _SCRATCH // wide)
    found = np.empty(min(most, rows) * wide)
    for first in range(0, rows, most):
        last = min(rows, first + most)
        for row in range(first, last):
            at, begin, end = (row - first) * wide, starts[row], starts[row + 1]
            if begin == end and not sums.size:
                continue
            for place in range(wide):
                found[at + place] = -less[place]
            done = np.int64(0)
            while wide - done >= 12:
                sum_lines_12(indices, values, begin, end, vectors, done, wide, found, at + done)
                done += 12
            if wide - done == 8:
                sum_lines_8(indices, values, begin, end, vectors, done, wide, found, at + done)
            elif wide - done == 4:
                sum_lines_4(indices, values, begin, end, vectors, done, wide, found, at + done)
            for place in range(sums.size):
                sums[place] += found[at + place]
        for row in range(first, last):
            at, begin, end, done = (row - first) * wide, starts[row], starts[row + 1], np.int64(0)
            if begin == end:
                continue
            while wide - done >= 12:
                add_line_12(indices, values, begin, end, product, done, wide, found, at + done)
                done += 12
            if wide - done == 8:
                add_line_8(indices, values, begin, end, product, done, wide, found, at + done)
            elif wide - done == 4:
                add_line_4(indices, values, begin, end, product, done, wide, found, at + done)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def project_rows(
    starts: Any, indices: Any, values: Any, vectors: Any, width: int, less: Any, found: Any
) -> None:
    """Write AQ - 1·lessᵀ to `found`, row by row."""
    wide = np.int64(width)
    for row in range(starts.size - 1):
        at, begin, end = row * wide, starts[row], starts[row + 1]
        for place in range(wide):
            found[at + place] = -less[place]
        done = np.int64(0)
        while wide - done >= 12:
            sum_lines_12(indices, values, begin, end, vectors, done, wide, found, at + done)
            done += 12
        if wide - done == 8:
            sum_lines_8(indices, values, begin, end, vectors, done, wide, found, at + done)
        elif wide - done == 4:
            sum_lines_4(indices, values, begin, end, vectors, done, wide, found, at + done)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def gram_rows(starts: Any, indices: Any, values: Any, columns: int, gram: Any) -> None:
    """Add AᵀA to `gram`: of two columns, into both places or one, so that (G + Gᵀ)/2 is right off the diagonal.

    Each pair of entries of a row is added once, twofold; indices may come in any order.
    """
    wide = uint64(columns)
    for row in range(starts.size - 1):
        begin, end = uint64(starts[row]), uint64(starts[row + 1])
        for first in range(begin, end):
            value = np.float64(values[first])
            line = uint64(indices[first]) * wide
            gram[line + uint64(indices[first])] += value * value
            twice = 2.0 * value
            for second in range(first + uint64(1), end):
                gram[line + uint64(indices[second])] += twice * np.float64(values[second])


def warm() -> None:
    """Compile for rows as readers give them, by working on none."""
    rows = np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)
    for values in (rows[2], np.empty(0, np.float64)):
        some, few = np.zeros(TILE), np.zeros(TILE)
        multiply_rows(rows[0], rows[1], values, some, TILE, few, some.copy(), few.copy())
        project_rows(rows[0], rows[1], values, some, TILE, few, some.copy())
        gram_rows(rows[0], rows[1], values, 1, few)
