"""Features that share a column of bytes: by hand, their histograms bit by bit, and the trees that they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from manyhands.data.row_files import Rows
from manyhands.workloads.gbdt import binning, histogram_kernels, training
from manyhands.workloads.gbdt.bin_kernels import TILE
from manyhands.workloads.gbdt.bin_table import bin_rows
from manyhands.workloads.gbdt.binning import (
    BinTable,
    ByteLayout,
    bins_of_numbers,
    bundled_layout,
    own_columns,
)
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock
from manyhands.workloads.gbdt.searching import LocalRows
from manyhands.workloads.gbdt.text_format import render_model
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt


def bins_for(table: np.ndarray) -> BinTable:
    found = []
    for column in range(table.shape[1]):
        values, counts = np.unique(table[:, column], return_counts=True)
        found.append(bins_of_numbers(column, values, counts.astype(np.int64), 255))
    return BinTable(found, table.shape[1])


def one_of_each(rows: int, seed: int = 0) -> np.ndarray:
    """Two questions with 5 and 4 answers as zeros and ones, one with negative numbers too, and two plain numbers."""
    drawn = np.random.default_rng(seed)
    first, second = np.eye(5)[drawn.integers(0, 5, rows)], np.eye(4)[drawn.integers(0, 4, rows)]
    second[:, 1] *= drawn.choice([-2.0, 1.0, 3.0], rows)
    return np.column_stack([drawn.normal(size=rows).round(1), first, drawn.normal(size=rows), second])


def blocks_of(table: np.ndarray) -> list[RowBlock]:
    half = len(table) // 2
    return [RowBlock(labels=None, dense=part) for part in (table[:half], table[half:])]


def sparse_block(table: np.ndarray) -> RowBlock:
    csr = sp.csr_matrix(table)
    nothing = np.zeros(len(table), np.float32)
    rows = Rows(
        starts=csr.indptr.astype(np.int64),
        indices=csr.indices.astype(np.int32),
        values=csr.data.astype(np.float32),
        labels=nothing,
        weights=nothing + 1,
        size=table.shape[1],
    )
    return RowBlock(labels=None, sparse=rows)


def test_answers_to_one_question_share_a_column_and_numbers_do_not() -> None:
    table = one_of_each(500)
    bins = bins_for(table)
    layout = bundled_layout(bins, blocks_of(table))
    columns = layout.columns.tolist()
    assert len(set(columns[1:6])) == 1
    assert len(set(columns[7:])) == 1
    assert len({columns[0], columns[1], columns[6], columns[7]}) == 4
    assert layout.firsts[[0, 6]].tolist() == [0, 0]
    assert sorted(layout.firsts[1:6].tolist()) == [1, 2, 3, 4, 5], "a byte for each answer, and 0 for none"
    sizes = np.diff(layout.offsets)
    assert sizes[columns[1]] == 6
    assert sizes[columns[7]] == 1 + 3 + 1 + 1 + 1
    again = bundled_layout(bins, [sparse_block(table.astype(np.float32))])
    assert again.columns.tolist() == columns


def test_dense_features_have_columns_of_their_own() -> None:
    table = np.random.default_rng(0).normal(size=(200, 5))
    layout = bundled_layout(bins_for(table), blocks_of(table))
    assert not layout.firsts.any()
    assert layout.columns.tolist() == [0, 1, 2, 3, 4]
    to_left = np.arange(256, dtype=np.uint8) % 2
    assert np.array_equal(layout.directions(3, to_left), to_left)


def test_a_column_has_no_more_than_256_bytes() -> None:
    drawn = np.random.default_rng(1)
    which, table = drawn.integers(0, 6, 20_000), np.zeros((20_000, 6))
    table[np.arange(20_000), which] = drawn.integers(1, 90, 20_000)  # 6 times 89 bins beside that of zero
    layout = bundled_layout(bins_for(table), blocks_of(table))
    assert np.diff(layout.offsets).max() <= 256
    assert len(layout.offsets) - 1 == 3


def packed(table: np.ndarray, layout: ByteLayout, bins: BinTable) -> tuple[np.ndarray, ByteLayout]:
    labels = np.zeros(len(table)), np.ones(len(table))
    rows = bin_rows(lambda: iter(blocks_of(table)), bins, layout, labels, "", lambda _block: 0.0)
    return rows.opened()[0], rows.layout


@pytest.mark.parametrize("threads", [2, 5])
def test_bins_are_the_same_by_any_number_of_threads(threads: int) -> None:
    table = one_of_each(103)
    bins = bins_for(table)
    layout = bundled_layout(bins, blocks_of(table))
    alone, _ = packed(table, layout, bins)
    labels = np.zeros(len(table)), np.ones(len(table))
    rows = bin_rows(lambda: iter(blocks_of(table)), bins, layout, labels, "", lambda _block: 0.0, threads)
    assert np.array_equal(rows.opened()[0], alone)
    assert alone.any()


def test_histograms_and_divisions_are_those_of_separate_columns() -> None:
    table = one_of_each(700)
    bins = bins_for(table)
    drawn = np.random.default_rng(2)
    words, chosen = drawn.integers(-1000, 1000, 1400), np.arange(0, 700, 3, dtype=np.int32)
    layouts = own_columns(bins), bundled_layout(bins, blocks_of(table))
    found = []
    for layout in layouts:
        tiles, _ = packed(table, layout, bins)
        assert tiles.shape[0] == -(-(len(layout.offsets) - 1) // TILE)
        local = LocalRows(
            tiles=tiles,
            layout=layout,
            words=words,
            first=0,
            rule=np.zeros(12),
            ordered=np.zeros(1400, np.int64),
        )
        out = np.full(2 * (bins.offsets[-1] + 1), 7, np.int64)
        local.histogram(chosen, bins.offsets, out)
        found.append(out)
        for feature in range(len(bins.features)):
            to_left = drawn.integers(0, 2, 256).astype(np.uint8)
            rows, spare = chosen.copy(), np.empty_like(chosen)
            goes, column = layout.directions(feature, to_left), int(layout.columns[feature])
            left = histogram_kernels.divide(tiles, rows, column, goes, spare)
            expected = to_left[bins.of_dense(table[chosen])[:, feature]]
            assert rows[:left].tolist() == chosen[expected == 1].tolist()
    assert np.array_equal(found[0], found[1])
    assert layouts[1].firsts.any()


def trained(table: np.ndarray, labels: np.ndarray, **more: Any) -> str:
    choice = TableChoice(train=ArraySource(table, labels), valid_fraction=0.2)
    return render_model(train_gbdt(choice, GbdtOptions(trees=6, num_leaves=8, **more)).model)


@pytest.mark.parametrize("parallel", ["data", "voting"])
def test_trees_are_those_of_separate_columns(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = one_of_each(1200)
    labels = table[:, 1:6] @ np.arange(5.0) + table[:, 7:] @ np.arange(4.0) * table[:, 0]
    together = trained(table, labels, parallel=parallel, top_k=20)
    monkeypatch.setattr(training, "bundled_layout", lambda bins, _blocks: own_columns(bins))
    assert trained(table, labels, parallel=parallel, top_k=20) == together


def test_features_that_exclude_each_other_in_the_sample_alone_are_separated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = one_of_each(900)
    labels = table[:, 1] * 2 + table[:, 8] + table[:, 0]
    table[880, 1:6] = 1.0  # five answers at once, in a row that is not looked at
    monkeypatch.setattr(binning, "_LOOKED_AT", 100)
    bins = bins_for(table)
    layout = bundled_layout(bins, blocks_of(table))
    tiles, found = packed(table, layout, bins)
    assert len(set(layout.columns[1:6].tolist())) == 1
    assert (found.firsts[1:6] > 0).sum() == 0, "one alone shares nothing"
    assert (found.firsts[7:] > 0).all()
    flat = {
        feature: tiles[found.columns[feature] // TILE, :, found.columns[feature] % TILE]
        for feature in range(6)
    }
    for feature, column in flat.items():
        assert np.array_equal(column, bins.of_dense(table)[:, feature])
    together = trained(table, labels)
    monkeypatch.setattr(training, "bundled_layout", lambda bins, _blocks: own_columns(bins))
    assert trained(table, labels) == together
