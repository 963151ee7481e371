"""Compiled products of sparse rows: both halves of AᵀAQ while a row is at hand, and all products of two columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from manyhands.compiled.decorators import njit

__all__ = ["TILE", "gram_rows", "multiply_rows", "project_rows", "warm"]

TILE = 4
"""Vectors that are worked on at once; blocks are padded to a multiple."""

_MATH = {"reassoc", "contract", "nsz"}


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_MATH)
def multiply_rows(
    starts: Any, indices: Any, values: Any, vectors: Any, width: int, less: Any, product: Any, sums: Any
) -> None:
    """Add Aᵀ(AQ - 1·lessᵀ) to `product` and the columns of AQ - 1·lessᵀ to `sums`; Q has rows of `width`, a tile's.

    A row's part of AQ stays in registers between the two, so that every entry is read once from memory.
    """
    wide = uint64(width)
    for tile in range(0, width, 4):
        at = uint64(tile)
        l0, l1, l2, l3 = less[at], less[at + uint64(1)], less[at + uint64(2)], less[at + uint64(3)]
        s0 = s1 = s2 = s3 = 0.0
        for row in range(starts.size - 1):
            begin, end = uint64(starts[row]), uint64(starts[row + 1])
            y0, y1, y2, y3 = -l0, -l1, -l2, -l3
            for entry in range(begin, end):
                value = np.float64(values[entry])
                place = uint64(indices[entry]) * wide + at
                y0 += value * vectors[place]
                y1 += value * vectors[place + uint64(1)]
                y2 += value * vectors[place + uint64(2)]
                y3 += value * vectors[place + uint64(3)]
            for entry in range(begin, end):
                value = np.float64(values[entry])
                place = uint64(indices[entry]) * wide + at
                product[place] += value * y0
                product[place + uint64(1)] += value * y1
                product[place + uint64(2)] += value * y2
                product[place + uint64(3)] += value * y3
            s0, s1, s2, s3 = s0 + y0, s1 + y1, s2 + y2, s3 + y3
        sums[at] += s0
        sums[at + uint64(1)] += s1
        sums[at + uint64(2)] += s2
        sums[at + uint64(3)] += s3


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
