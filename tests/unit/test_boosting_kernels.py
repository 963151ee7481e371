"""Gradient boosting's pure core: bins, fixed-point sums, histograms and splits, against sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from manyhands.data.row_files import Rows
from manyhands.errors import DataError, UserError
from manyhands.workloads.gbdt import histogram_kernels, split_kernels
from manyhands.workloads.gbdt.binning import BinTable, bins_of_categories, bins_of_numbers
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.split_kernels import FEATURE, GAIN, LEFT, RECORD_WORDS, THRESHOLD
from manyhands.workloads.gbdt.task import units_for


def counted(values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    found, counts = np.unique(np.array(values, float), return_counts=True)
    return found, counts.astype(np.int64)


def test_few_values_have_a_bin_each_with_bounds_half_way() -> None:
    bins = bins_of_numbers(0, *counted([1.0] * 3 + [2.0] * 3 + [5.0] * 3), 255)
    assert bins.bounds is not None
    assert bins.bounds.tolist() == [1.5, 3.5, math.inf]
    assert (bins.low, bins.high, bins.missing) == (1.0, 5.0, False)


def test_many_values_share_bins_of_about_the_same_size() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    bins = bins_of_numbers(0, *counted(values.tolist()), 16)
    assert bins.count == 16
    sizes = np.bincount(BinTable([bins], 1).of_dense(values[:, None])[:, 0])
    assert sizes.sum() == 10_000
    assert sizes.min() > 500
    assert sizes.max() < 800


def test_a_value_that_would_fill_a_bin_has_one_of_its_own() -> None:
    values = [0.0] * 5_000 + list(np.linspace(0.001, 1, 5_000))
    bins = bins_of_numbers(0, *counted(values), 10)
    assert bins.bounds is not None
    assert bins.bounds[0] == pytest.approx(0.0005)
    assert bins.count == 10


def test_bounds_lie_between_neighbours_that_are_the_nearest_there_are() -> None:
    one, two = 1.0, math.nextafter(1.0, 2.0)
    bins = bins_of_numbers(0, *counted([one] * 3 + [two] * 3), 255)
    assert BinTable([bins], 1).of_dense(np.array([[one], [two]]))[:, 0].tolist() == [0, 1]


def test_missing_values_have_the_last_bin_and_count_as_zero_where_there_were_none() -> None:
    with_missing = bins_of_numbers(0, *counted([-1.0] * 3 + [1.0] * 3 + [math.nan] * 2), 255)
    without = bins_of_numbers(1, *counted([-1.0] * 3 + [1.0] * 3), 255)
    assert (with_missing.count, without.count) == (3, 2)
    table = BinTable([with_missing, without], 2)
    assert table.of_dense(np.array([[math.nan, math.nan], [-5.0, -5.0]])).tolist() == [[2, 0], [0, 0]]
    assert table.offsets.tolist() == [0, 3, 5]


def test_categories_are_binned_by_how_often_they_come() -> None:
    bins = bins_of_categories(0, *counted([7.0] * 5 + [3.0] * 9 + [4.0] * 5 + [-1.0, math.nan]), 3, "t")
    assert bins.categories is not None
    assert bins.categories.tolist() == [3, 4], "of equal ones the first; there is room for two"
    table = BinTable([bins], 1)
    assert table.of_dense(np.array([[3.0], [4.0], [7.0], [-1.0], [math.nan]]))[:, 0].tolist() == [
        1,
        2,
        0,
        0,
        0,
    ]
    with pytest.raises(DataError, match="category 1048576"):
        bins_of_categories(2, *counted([float(1 << 20)]), 255, "t")


def test_sparse_rows_have_the_bins_of_the_same_dense_ones() -> None:
    drawn = np.random.default_rng(1)
    dense = drawn.integers(0, 4, (50, 6)) * (drawn.random((50, 6)) < 0.4).astype(float)
    table = BinTable([bins_of_numbers(at, *counted(dense[:, at].tolist()), 255) for at in (0, 2, 5)], 6)
    where = [np.flatnonzero(row) for row in dense]
    rows = Rows(
        starts=np.cumsum([0, *map(len, where)]).astype(np.int64),
        indices=np.concatenate(where).astype(np.int32),
        values=dense[dense != 0].astype(np.float32),
        labels=np.zeros(50, np.float32),
        weights=np.ones(50, np.float32),
        size=6,
    )
    assert np.array_equal(table.of_sparse(rows), table.of_dense(dense))


@pytest.mark.parametrize("rows", [1, 1000, 1 << 24, (1 << 31) - 1])
@pytest.mark.parametrize("largest", [1e-12, 0.25, 1.0, 3.0, 1e12])
def test_no_sum_over_all_rows_overflows_a_word(rows: int, largest: float) -> None:
    units = units_for(rows, largest, largest)
    assert rows * round(largest * units.gradient) < 1 << 63
    assert (rows * round(largest * units.hessian) << units.count_bits) + rows < 1 << 63
    assert rows < 1 << units.count_bits
    assert math.log2(units.gradient) % 1 == 0


def tiled(bins: np.ndarray) -> np.ndarray:
    rows, features = bins.shape
    out = np.zeros((-(-features // 8), rows, 8), np.uint8)
    for feature in range(features):
        out[feature // 8, :, feature % 8] = bins[:, feature]
    return out


@pytest.mark.parametrize("features", [1, 7, 8, 9, 20])
def test_a_histogram_is_the_sum_by_bin(features: int) -> None:
    drawn = np.random.default_rng(features)
    bins = drawn.integers(0, 5, (300, features)).astype(np.uint8)
    words = drawn.integers(-1000, 1000, 600)
    rows = np.sort(drawn.choice(np.arange(100, 300), 90, replace=False)).astype(np.int32)
    offsets = np.arange(features + 1) * 5
    out = np.full(2 * (offsets[-1] + 1), 9, np.int64)
    histogram_kernels.histogram(tiled(bins), rows, words[200:], 100, offsets, np.zeros(600, np.int64), out)
    for feature in range(features):
        for number in range(5):
            mine = rows[bins[rows, feature] == number]
            at = 2 * (5 * feature + number)
            assert out[at : at + 2].tolist() == [words[2 * mine].sum(), words[2 * mine + 1].sum()]
    assert out[-2:].tolist() == [words[2 * rows].sum(), words[2 * rows + 1].sum()]


def test_rows_are_divided_in_their_order() -> None:
    bins = np.array([[0, 2], [1, 1], [0, 0], [1, 2]], np.uint8)
    rows, to_left = np.arange(4, dtype=np.int32), np.zeros(256, np.uint8)
    to_left[[0, 1]] = 1
    left = histogram_kernels.divide(tiled(bins), rows, 1, to_left, np.empty_like(rows))
    assert (left, rows.tolist()) == (2, [1, 2, 0, 3])


def rule(**changed: float) -> np.ndarray:
    names = [
        "bits",
        "least",
        "hessian",
        "l2",
        "unit_g",
        "unit_h",
        "cat_l2",
        "smooth",
        "most",
        "group",
        "onehot",
        "gain",
    ]
    usual = dict(zip(names, (8, 1, 0.0, 0.0, 4.0, 4.0, 10.0, 10.0, 32, 1, 4, 0.0), strict=True)) | changed
    return np.array([usual[name] for name in names])


def searched(
    gradients: list[float], hessians: list[float], counts: list[int], kind: int, **changed: float
) -> np.ndarray:
    """The best split of one feature whose bins have these sums, in quarters."""
    words = [
        (round(4 * g), (round(4 * h) << 8) + n) for g, h, n in zip(gradients, hessians, counts, strict=True)
    ]
    hist = np.array(words, np.int64)
    record = np.zeros(RECORD_WORDS, np.int64)
    split_kernels.best_split(
        hist.reshape(-1),
        np.array([0]),
        np.array([0, len(words)]),
        np.array([kind]),
        hist.sum(axis=0),
        rule(**changed),
        record,
        record.view(np.float64),
    )
    return record


def test_the_best_split_is_the_one_found_by_hand() -> None:
    record = searched([-3, -1, 4], [2, 2, 4], [2, 2, 4], 0)
    # After bin 1: 16/4 + 16/4 - 0 = 8; after bin 0: 9/2 + 9/6 = 6.
    assert record.view(np.float64)[GAIN] == 8.0
    assert (record[FEATURE], record[THRESHOLD]) == (0, 1)
    assert record[LEFT : LEFT + 2].tolist() == [-16, (16 << 8) + 4]
    penalised = searched([-3, -1, 4], [2, 2, 4], [2, 2, 4], 0, l2=4.0)
    assert penalised.view(np.float64)[GAIN] == 4.0


@pytest.mark.parametrize("changed", [{"least": 5}, {"hessian": 5.0}, {"gain": 8.0}])
def test_a_split_that_is_not_allowed_is_not_made(changed: dict[str, float]) -> None:
    assert searched([-3, -1, 4], [2, 2, 4], [2, 2, 4], 0, **changed).view(np.float64)[GAIN] == -1.0


def test_missing_values_go_where_they_gain_more() -> None:
    left = searched([-2, 3, -2], [1, 1, 1], [1, 1, 1], 1)
    assert left[3] & split_kernels.DEFAULT_LEFT
    assert left[LEFT] == -16
    right = searched([-2, 3, 2], [1, 1, 1], [1, 1, 1], 1)
    assert not right[3] & split_kernels.DEFAULT_LEFT
    assert right[LEFT] == -8
    alone = searched([2, 2, -4], [1, 1, 1], [1, 1, 1], 1)
    assert (alone[THRESHOLD], alone[LEFT]) == (1, 16), "all that is known against what is missing"


def test_few_categories_are_tried_one_against_the_rest() -> None:
    record = searched([0, 1, -6, 2], [1, 1, 1, 1], [1, 1, 1, 1], 2)
    assert record[3] == split_kernels.CATEGORICAL
    assert record[split_kernels.BITS] == 1 << 2


def test_many_categories_are_sorted_by_gradient() -> None:
    gradients = [0, 5, -4, 5, -4, 5, -4]
    record = searched(gradients, [1] * 7, [20] * 7, 2, smooth=1.0, cat_l2=0.0)
    assert record[3] == split_kernels.CATEGORICAL | split_kernels.SORTED
    assert record[split_kernels.BITS] in (0b1010100, 0b0101010), "the three that are alike are on one side"
    none = searched(gradients, [1] * 7, [20] * 7, 2, smooth=21.0)
    assert none.view(np.float64)[GAIN] == -1.0, "categories with fewer rows than cat_smooth are left out"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trees": 0}, "trees is 0; it must be an integer of at least 1"),
        ({"num_leaves": 1}, "num_leaves is 1;"),
        ({"max_bin": 256}, "max_bin is 256; it must be an integer of at least 2 and at most 255"),
        ({"rate": 0.0}, "rate is 0.0; it must be a number above 0"),
        ({"lambda_l2": -1.0}, "lambda_l2 is -1.0;"),
        ({"objective": "binery"}, "did you mean 'binary'"),
        ({"parallel": "feature"}, "parallel is 'feature'; allowed: data, voting"),
        ({"min_data_in_leaf": 2.5}, "min_data_in_leaf is 2.5;"),
    ],
)
def test_options_that_make_no_sense_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GbdtOptions(**changed)  # type: ignore[arg-type]
