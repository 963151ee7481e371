"""Units in which gradients are whole numbers, so that their sums are exact. Pure.

A word has 63 bits and a sign. Of the gradients' word all are for the sum over all rows; the hessians' has the number of
rows in its low bits. Units are powers of two, so that only rounding to them loses anything: with a million rows a
gradient keeps 41 bits after its largest, a hessian 21.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WordUnits", "units_for"]

_WORD_BITS = 62


@dataclass(frozen=True, slots=True)
class WordUnits:
    """How many units make 1, for gradients and hessians, and the bits in which rows are counted."""

    gradient: float
    hessian: float
    count_bits: int


def units_for(rows: int, largest_gradient: float, largest_hessian: float) -> WordUnits:
    """Units in which no sum over `rows` rows overflows; numbers that are not finite or all 0 get any."""
    count_bits = rows.bit_length()
    return WordUnits(
        gradient=_unit(rows, largest_gradient, _WORD_BITS),
        hessian=_unit(rows, largest_hessian, _WORD_BITS - count_bits),
        count_bits=count_bits,
    )


def _unit(rows: int, largest: float, bits: int) -> float:
    if not 0 < largest < math.inf:
        return 1.0
    _, size = math.frexp(largest)  # largest < 2^size
    return math.ldexp(1.0, min(bits - size - rows.bit_length(), 900))
