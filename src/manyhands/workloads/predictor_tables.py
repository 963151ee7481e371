"""Rows of numbers from JSON, for the models whose input is a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import UserError

__all__ = ["table_of"]


def table_of(
    values: Sequence[Any], columns: int, takes: str, *, missing: bool = False
) -> NDArray[np.float64]:
    """Each value as one row of `columns` numbers; a UserError says which of them, from 0, is none.

    With `missing`, null and what is not finite may stand for a number; null becomes NaN. `takes` says what a row is.
    """
    rows = [_row(number, value, columns, takes, missing) for number, value in enumerate(values)]
    return np.stack(rows) if rows else np.empty((0, columns))


def _row(number: int, value: Any, columns: int, takes: str, missing: bool) -> NDArray[np.float64]:
    wanted = f"it must be {takes}, {columns} in all"
    if not isinstance(value, list):
        raise UserError(f"input {number} is no array; {wanted}")
    if len(value) != columns:
        raise UserError(f"input {number} has {len(value)} numbers; {wanted}")
    for place, one in enumerate(value):
        # bool is an int to Python, and text that looks like a number is one to numpy
        if type(one) not in (int, float) and not (missing and one is None):
            raise UserError(f"input {number} has {str(one)[:40]!r} at place {place}; {wanted}")
    try:
        row = np.array(value, np.float64)
    except OverflowError:
        raise UserError(f"input {number} has a number beyond double precision; {wanted}") from None
    if not missing and not np.isfinite(row).all():
        raise UserError(f"input {number} has a number that is not finite; {wanted}")
    return row
