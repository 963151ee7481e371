"""Compiled products of sparse rows: both halves of AᵀAQ while rows are at hand, and all products of two columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from manyhands.compiled.decorators import njit

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
    the two tables would drive each other out of it.
    """
    wide, rows = uint64(width), starts.size - 1
    most = max(1, _SCRATCH // width)
    found = np.empty(min(most, rows) * width)
    for first in range(0, rows, most):
        last = min(rows, first + most)
        for row in range(first, last):
            at = uint64(row - first) * wide
            mine = found[at : at + wide]
            for place in range(width):
                mine[place] = -less[place]
            for entry in range(uint64(starts[row]), uint64(starts[row + 1])):
                value, begin = np.float64(values[entry]), uint64(indices[entry]) * wide
                line = vectors[begin : begin + wide]
                for place in range(width):
                    mine[place] += value * line[place]
            for place in range(width):
                sums[place] += mine[place]
        for row in range(first, last):
            at = uint64(row - first) * wide
            mine = found[at : at + wide]
            for entry in range(uint64(starts[row]), uint64(starts[row + 1])):
                value, begin = np.float64(values[entry]), uint64(indices[entry]) * wide
                line = product[begin : begin + wide]
                for place in range(width):
                    line[place] += value * mine[place]


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def project_rows(
    starts: Any, indices: Any, values: Any, vectors: Any, width: int, less: Any, found: Any
) -> None:
    """Write AQ - 1·lessᵀ to `found`, row by row."""
    wide = uint64(width)
    for row in range(starts.size - 1):
        out = uint64(row) * wide
        for place in range(wide):
            found[out + place] = -less[place]
        for entry in range(uint64(starts[row]), uint64(starts[row + 1])):
            value = np.float64(values[entry])
            begin = uint64(indices[entry]) * wide
            for place in range(wide):
                found[out + place] += value * vectors[begin + place]


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
