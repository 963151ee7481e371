"""How the values of a feature become at most 255 bins, found from a sample of rows. Pure.

A number's bins have upper bounds half way between two values, with about as many rows in each; where the feature has
missing values (NaN), these have the last bin. The bins of a categorical feature are its most frequent categories, and
bin 0 is whatever else there is.

Features of which no row has two that are not 0 share a column of bytes: exclusive feature bundling (Ke et al.,
"LightGBM: a highly efficient gradient boosting decision tree", 2017), with no exception allowed. Byte 0 of a shared
column says that all its features have their bin of zero, and every other bin of each has a byte of its own. So the
histogram of each feature follows from the column's to the last bit: the rows in none of its other bins are in zero's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from manyhands.data.row_files import Rows
from manyhands.errors import DataError
from manyhands.workloads.gbdt import bin_kernels
from manyhands.workloads.gbdt.row_sources import RowBlock

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]
_MOST_CATEGORY = (1 << 20) - 1  # a larger one would make the sets of categories in a model file too long
_CATEGORIES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureBins:
    """The bins of the feature in column `column`: upper `bounds`, or the `categories` of bins 1, 2, …"""

    column: int
    low: float
    high: float
    missing: bool = False  # whether there are missing values, which have the last bin
    bounds: NDArray[np.float64] | None = None
    categories: NDArray[np.int64] | None = None
    zero_share: float = 0.0  # of the rows seen, those in which it is 0

    @property
    def kind(self) -> int:
        """As compiled code takes it: 2 for categories, 1 where there are missing values, else 0."""
        return _CATEGORIES if self.categories is not None else int(self.missing)

    @property
    def count(self) -> int:  # of bins; a feature with one cannot be split
        if self.categories is not None:
            return 1 + len(self.categories)
        assert self.bounds is not None, "numbers have bounds"
        return len(self.bounds) + self.missing


def bins_of_numbers(
    column: int, values: Numbers, counts: Counts, max_bin: int, least_rows: int = 3
) -> FeatureBins:
    """Of a sample: different values, ascending with NaN last, and how often each comes."""
    zero_share, known = _share_of_zeros(values, counts), ~np.isnan(values)
    missing = bool((~known).any())
    values, counts = np.ascontiguousarray(values[known]), np.ascontiguousarray(counts[known])
    bounds = np.full(max_bin + 1, np.inf)
    bins = bin_kernels.cut(values, counts, max_bin - missing, least_rows, bounds) if len(values) else 1
    low, high = (float(values[0]), float(values[-1])) if len(values) else (0.0, 0.0)
    bounds = bounds[:bins].copy()
    found = FeatureBins(column=column, low=low, high=high, missing=missing, bounds=bounds)
    return replace(found, zero_share=zero_share)


def _share_of_zeros(values: NDArray[np.float64], counts: NDArray[np.int64]) -> float:
    return float(counts[values == 0].sum() / max(1, counts.sum()))


def bins_of_categories(column: int, values: Numbers, counts: Counts, max_bin: int, where: str) -> FeatureBins:
    """The most frequent categories; those below 0 and NaN are no categories. DataError for one that is too large."""
    known = values >= 0
    whole = np.floor(values[known]).astype(np.int64) if known.any() else np.zeros(0, np.int64)
    if len(whole) and whole.max() > _MOST_CATEGORY:
        raise DataError(
            f"{where}: categorical feature {column} has the category {whole.max()}; categories are integers up to "
            f"{_MOST_CATEGORY}, so number them from 0"
        )
    names, inverse = np.unique(whole, return_inverse=True)
    often = np.bincount(inverse, counts[known], len(names))
    chosen = names[np.lexsort((names, -often))[: max_bin - 1]]
    zero_share = _share_of_zeros(values, counts)
    low, high = (float(names[0]), float(names[-1])) if len(names) else (0.0, 0.0)
    return FeatureBins(column=column, low=low, high=high, categories=chosen, zero_share=zero_share)


class BinTable:
    """The bins of all features that can be split, as compiled code takes them."""

    def __init__(self, features: Sequence[FeatureBins], columns: int) -> None:
        """`columns` are those of the table, used or not."""
        self.features, self.columns = list(features), columns
        bounds, places = list[NDArray[np.float64]](), list[NDArray[np.int64]]()
        for one in self.features:
            if one.categories is not None:
                order = np.argsort(one.categories)
                bounds.append(one.categories[order].astype(np.float64))
                places.append(order + 1)
            else:
                assert one.bounds is not None, "numbers have bounds"
                bounds.append(one.bounds)
                places.append(np.zeros(len(one.bounds), np.int64))
        self._cuts = (
            np.concatenate([np.zeros(0), *bounds]),
            np.concatenate([np.zeros(0, np.int64), *places]),
            np.cumsum([0, *map(len, bounds)]).astype(np.int64),
        )
        self.kinds = np.array([one.kind for one in self.features], np.int64)
        self._columns = np.array([one.column for one in self.features], np.int64)
        self._slots = np.full(columns, -1, np.int64)
        self._slots[self._columns] = np.arange(len(self.features))

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where the bins of each feature begin among those of all, and their number at the end."""
        return np.cumsum([0, *(one.count for one in self.features)]).astype(np.int64)

    def of_dense(self, values: NDArray[np.float64]) -> NDArray[np.uint8]:
        out = np.empty((len(values), len(self.features)), np.uint8)
        given = np.ascontiguousarray(values, np.float32 if values.dtype == np.float32 else np.float64)
        bin_kernels.bin_dense(given, self._columns, self.kinds, *self._cuts, out)
        return out

    def of_sparse(self, rows: Rows) -> NDArray[np.uint8]:
        out = np.empty((len(rows), len(self.features)), np.uint8)
        parts = rows.starts, rows.indices, rows.values
        bin_kernels.bin_sparse(parts, self._slots, self.kinds, *self._cuts, out)
        return out


_MOST_BYTES = 255  # of a shared column, that for zero not counted
_LEAST_ZEROS = 0.1  # the share of rows in which a feature that may share is 0
_MOST_FEATURES = 4096
_MOST_BUNDLES = 64  # that are looked through for a place
_LOOKED_AT = 1 << 16  # rows
_ROWS_AT_ONCE = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteLayout:
    """Where the bins of each feature are: arrays by feature, and the offsets of columns."""

    columns: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """The byte of its first bin that is not that of zero, at least 1; 0 where it has a column of its own."""
    zeros: NDArray[np.int64]  # the bin of zero
    counts: NDArray[np.int64]  # how many bins it has
    offsets: NDArray[np.int64]
    """Where the bytes of each column begin among those of all, and their number at the end."""

    def directions(self, feature: int, to_left: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """For every byte of the feature's column, whether it goes to the left; `to_left` says it for its bins."""
        first = int(self.firsts[feature])
        if not first:
            return to_left
        zero, count = int(self.zeros[feature]), int(self.counts[feature])
        out = np.full(256, to_left[zero], np.uint8)
        out[first : first + zero] = to_left[:zero]
        out[first + zero : first + count - 1] = to_left[zero + 1 : count]
        return out

    def without(self, features: NDArray[np.int64]) -> ByteLayout:
        shared = self.firsts > 0
        shared[features] = False
        bundles = [
            np.flatnonzero((self.columns == column) & shared).tolist()
            for column in np.unique(self.columns[self.firsts > 0])
        ]
        return _laid_out(self.counts, self.zeros, bundles)


def own_columns(bins: BinTable) -> ByteLayout:
    return _laid_out(*_counts_and_zeros(bins), [])


def bundled_layout(bins: BinTable, blocks: Sequence[RowBlock]) -> ByteLayout:
    """Features that exclude each other in some rows of `blocks` share columns; whether they do in all is to be seen."""
    counts, zeros = _counts_and_zeros(bins)
    shares = np.array([one.zero_share for one in bins.features])
    chosen = np.flatnonzero((shares >= _LEAST_ZEROS) & (counts <= _MOST_BYTES))
    chosen = chosen[np.argsort(-shares[chosen], kind="stable")][:_MOST_FEATURES]
    if len(chosen) < 2:
        return _laid_out(counts, zeros, [])
    chosen = chosen[::-1]  # those that are there most often are placed first
    columns = np.array([bins.features[one].column for one in chosen])
    packed, left = [], _LOOKED_AT  # for each column a bit a row: whether its value is anything but 0
    for block in blocks:
        for begin in range(0, min(len(block), left), _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, len(block), left)
            bits = np.packbits(_not_zero(block, begin, end, columns).T, axis=1)
            filled = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))
            packed.append(np.ascontiguousarray(filled).view(np.uint64))
        left -= min(len(block), left)
    sets = _exclusive(np.concatenate(packed, axis=1), counts[chosen])
    return _laid_out(counts, zeros, [[int(chosen[at]) for at in one] for one in sets])


def _counts_and_zeros(bins: BinTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    counts = np.array([one.count for one in bins.features], np.int64)
    zeros = bins.of_dense(np.zeros((1, bins.columns)))[0].astype(np.int64)
    return counts, zeros


def _laid_out(counts: Counts, zeros: Counts, bundles: Sequence[Sequence[int]]) -> ByteLayout:
    """Features that share nothing first, in their order; a bundle of one shares nothing."""
    columns, firsts = np.full(len(counts), -1, np.int64), np.zeros(len(counts), np.int64)
    shared = [bundle for bundle in bundles if len(bundle) > 1]
    bundled = {feature for bundle in shared for feature in bundle}
    alone = [feature for feature in range(len(counts)) if feature not in bundled]
    columns[alone] = np.arange(len(alone))
    sizes = counts[alone].tolist()
    for number, bundle in enumerate(shared, len(alone)):
        free = 1
        for feature in bundle:
            columns[feature], firsts[feature] = number, free
            free += int(counts[feature]) - 1
        sizes.append(free)
    offsets = np.cumsum([0, *sizes]).astype(np.int64)
    return ByteLayout(columns=columns, firsts=firsts, zeros=zeros, counts=counts, offsets=offsets)


def _exclusive(bits: NDArray[np.uint64], counts: NDArray[np.int64]) -> list[list[int]]:
    """Sets of features, each in the first set where no row has it beside another; `bits` say which rows have which."""
    sets: list[list[int]] = []
    used = np.zeros((_MOST_BUNDLES, bits.shape[1]), np.uint64)
    room = np.full(_MOST_BUNDLES, _MOST_BYTES, np.int64)
    for feature, own in enumerate(bits):
        fits = np.flatnonzero(room[: len(sets)] >= counts[feature] - 1)
        at = next((int(one) for one in fits if not (used[one] & own).any()), len(sets))
        if at == _MOST_BUNDLES:
            continue
        if at == len(sets):
            sets.append([])
        sets[at].append(feature)
        used[at] |= own
        room[at] -= counts[feature] - 1
    return sets


def _not_zero(block: RowBlock, begin: int, end: int, columns: NDArray[np.int64]) -> NDArray[np.bool_]:
    out = np.zeros((end - begin, len(columns)), np.bool_)
    if block.sparse is None:
        known = columns < block.values.shape[1]
        out[:, known] = block.values[begin:end, columns[known]] != 0
        return out
    rows, span = block.sparse, slice(*block.sparse.starts[[begin, end]])
    places = np.full(max(rows.size, int(columns.max()) + 1), -1, np.int64)
    places[columns] = np.arange(len(columns))
    which = np.repeat(np.arange(end - begin), np.diff(rows.starts[begin : end + 1]))
    at = places[rows.indices[span]]
    known = (at >= 0) & (rows.values[span] != 0)
    out[which[known], at[known]] = True
    return out
