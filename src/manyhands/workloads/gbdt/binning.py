"""How the values of a feature become at most 255 bins, found from a sample of rows. Pure.

A number's bins have upper bounds half way between two values, with about as many rows in each; where the feature has
missing values (NaN), these have the last bin. The bins of a categorical feature are its most frequent categories, and
bin 0 is whatever else there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.data.matrix import Rows
from manyhands.errors import DataError
from manyhands.workloads.gbdt import bin_kernels

__all__ = ["MOST_CATEGORY", "BinTable", "FeatureBins", "bins_of_categories", "bins_of_numbers"]

MOST_CATEGORY = (1 << 20) - 1
"""A category is a whole number; a larger one would make the sets of categories in a model file too long."""
_LEAST_ROWS = 3  # of a bin
_PLAIN, _WITH_MISSING, _CATEGORIES = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureBins:
    """The bins of the feature in column `column`: upper `bounds`, or the `categories` of bins 1, 2, …"""

    column: int
    low: float
    high: float
    """The least and the greatest number seen."""
    missing: bool = False
    """Whether there are missing values, which have the last bin."""
    bounds: NDArray[np.float64] | None = None
    categories: NDArray[np.int64] | None = None
    zero_share: float = 0.0
    """Of the rows seen, those in which it is 0."""

    @property
    def is_categorical(self) -> bool:
        """Whether its values are names without order."""
        return self.categories is not None

    @property
    def count(self) -> int:
        """How many bins there are; a feature with one cannot be split."""
        if self.categories is not None:
            return 1 + len(self.categories)
        assert self.bounds is not None, "numbers have bounds"
        return len(self.bounds) + self.missing


def bins_of_numbers(
    column: int, values: NDArray[np.float64], counts: NDArray[np.int64], max_bin: int
) -> FeatureBins:
    """Of a sample: different values, ascending with NaN last, and how often each comes."""
    zero_share = _share_of_zeros(values, counts)
    known = ~np.isnan(values)
    missing = bool((~known).any())
    values, counts = np.ascontiguousarray(values[known]), np.ascontiguousarray(counts[known])
    bounds = np.full(max_bin + 1, np.inf)
    bins = bin_kernels.cut(values, counts, max_bin - missing, _LEAST_ROWS, bounds) if len(values) else 1
    low, high = (float(values[0]), float(values[-1])) if len(values) else (0.0, 0.0)
    return FeatureBins(
        column=column,
        low=low,
        high=high,
        missing=missing,
        bounds=bounds[:bins].copy(),
        zero_share=zero_share,
    )


def _share_of_zeros(values: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    return float(counts[values == 0].sum() / max(1, counts.sum()))


def bins_of_categories(
    column: int, values: NDArray[np.float64], counts: NDArray[np.int64], max_bin: int, where: str
) -> FeatureBins:
    """The most frequent categories; those below 0 and NaN are no categories. DataError for one that is too large."""
    known = values >= 0
    whole = np.floor(values[known]).astype(np.int64) if known.any() else np.zeros(0, np.int64)
    if len(whole) and whole.max() > MOST_CATEGORY:
        raise DataError(
            f"{where}: categorical feature {column} has the category {whole.max()}; categories are whole numbers up to "
            f"{MOST_CATEGORY}, so number them from 0"
        )
    names, inverse = np.unique(whole, return_inverse=True)
    often = np.bincount(inverse, counts[known], len(names))
    order = np.lexsort((names, -often))[: max_bin - 1]
    low, high = (float(names[0]), float(names[-1])) if len(names) else (0.0, 0.0)
    return FeatureBins(
        column=column,
        low=low,
        high=high,
        categories=names[order],
        zero_share=_share_of_zeros(values, counts),
    )


class BinTable:
    """The bins of all features that can be split, as compiled code takes them."""

    def __init__(self, features: Sequence[FeatureBins], columns: int) -> None:
        """`columns` are those of the table, used or not."""
        self.features = list(features)
        self.columns = columns
        bounds: list[NDArray[np.float64]] = []
        places: list[NDArray[np.int64]] = []
        for one in self.features:
            if one.categories is not None:
                order = np.argsort(one.categories)
                bounds.append(one.categories[order].astype(np.float64))
                places.append(order + 1)
            else:
                assert one.bounds is not None, "numbers have bounds"
                bounds.append(one.bounds)
                places.append(np.zeros(len(one.bounds), np.int64))
        self._bounds = np.concatenate([np.zeros(0), *bounds])
        self._places = np.concatenate([np.zeros(0, np.int64), *places])
        self._starts = np.cumsum([0, *map(len, bounds)]).astype(np.int64)
        kinds = [_CATEGORIES if one.is_categorical else int(one.missing) for one in self.features]
        self._kinds = np.array(kinds, np.int64)
        self._columns = np.array([one.column for one in self.features], np.int64)
        self._slots = np.full(columns, -1, np.int64)
        self._slots[self._columns] = np.arange(len(self.features))

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where the bins of each feature begin among those of all, and their number at the end."""
        return np.cumsum([0, *(one.count for one in self.features)]).astype(np.int64)

    def of_dense(self, values: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Bins of rows, a column each."""
        out = np.empty((len(values), len(self.features)), np.uint8)
        kind = values.dtype if values.dtype == np.float32 else np.float64
        bin_kernels.bin_dense(
            np.ascontiguousarray(values, kind),
            self._columns,
            self._kinds,
            self._bounds,
            self._places,
            self._starts,
            out,
        )
        return out

    def of_sparse(self, rows: Rows) -> NDArray[np.uint8]:
        """The same of sparse rows."""
        out = np.empty((len(rows), len(self.features)), np.uint8)
        parts = rows.starts, rows.indices, rows.values
        bin_kernels.bin_sparse(parts, self._slots, self._kinds, self._bounds, self._places, self._starts, out)
        return out
