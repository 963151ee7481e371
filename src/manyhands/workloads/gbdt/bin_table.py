"""A table of bins, made from a source of rows and mapped by all workers; and how it is made.

Bounds come from at most 200,000 rows, chosen by a hash of their number, so that they depend on the rows and the seed
and on nothing else. Bins lie in tiles of eight columns, one byte each; features that exclude each other share a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.row_files import Rows
from manyhands.errors import DataError, UserError, format_bytes
from manyhands.native.segment import available_bytes
from manyhands.workloads.array_files import disk_errors, mapped_arrays
from manyhands.workloads.gbdt import bin_kernels
from manyhands.workloads.gbdt.bin_kernels import TILE
from manyhands.workloads.gbdt.binning import (
    BinTable,
    ByteLayout,
    FeatureBins,
    bins_of_categories,
    bins_of_numbers,
)
from manyhands.workloads.gbdt.row_sources import RowBlock, RowSource

_SAMPLE_ROWS = 200_000
_MOST_ROWS = (1 << 31) - 1  # leaves hold the numbers of their rows in 32 bits
_MOST_COLUMNS = 1 << 25  # the names of more do not fit into a model file that is read again
_COLUMN_BYTES = 256  # its name, what is known of it, its place among features, and copies of these
_COLUMNS_AT_ONCE = 1024
_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]
OnRows = Callable[[int], None] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class BinnedRows:
    """Rows as bins with their targets and weights: in files of `folder`, or in this process."""

    rows: int
    layout: ByteLayout
    folder: str = ""
    arrays: tuple[NDArray[Any], ...] = ()

    def opened(self) -> tuple[NDArray[np.uint8], Numbers, Numbers, Numbers]:
        """Tiles, targets, weights, and the scores that training begins with, a row for each class."""
        arrays = self.arrays or mapped_arrays(self.folder, _KINDS).values()
        tiles, targets, weights, scores = map(np.asarray, arrays)
        return tiles.reshape(-1, self.rows, TILE), targets, weights, scores.reshape(-1, self.rows)


_KINDS: dict[str, Any] = {"tiles": np.uint8, **dict.fromkeys(("targets", "weights", "scores"), np.float64)}


def hashed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """A number of 64 bits for each number of a row: splitmix64's."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(seed) * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Which rows of a source are held out to measure on: a share of them, by the hash of their numbers."""

    fraction: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise UserError(f"valid_fraction={self.fraction!r} must be a number of at least 0 and below 1")

    def chosen(self, first: int, count: int) -> NDArray[np.bool_]:
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return hashed(numbers, 2 * self.seed + 1) < np.uint64(int(self.fraction * 2.0**63)) << np.uint64(1)

    def only(self, blocks: Iterator[RowBlock], *, held: bool) -> Iterator[RowBlock]:
        """The rows that are held out, or the others."""
        first = 0
        for block in blocks:
            out = self.chosen(first, len(block))
            first += len(block)
            if out.any() if held else not out.all():
                yield block if not out.any() and not held else block.take(out if held else ~out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSample:
    """What one pass over a source found: rows for the bounds of bins, and all labels."""

    blocks: list[RowBlock]
    rows: int
    columns: int
    labels: Numbers
    weights: Numbers
    held_labels: Numbers
    held_weights: Numbers

    def bins(
        self, max_bin: int, categorical: frozenset[int], where: str, threads: int = 1, least_rows: int = 3
    ) -> BinTable:
        most = min(_MOST_COLUMNS, available_bytes() // _COLUMN_BYTES)
        if self.columns > most:  # as one absurd index makes it
            raise UserError(
                f"{where} has feature {self.columns - 1}, but a model has at most {most:,} columns; number the "
                "features from 0 without gaps, or hash them into fewer"
            )
        columns, values_of = _column_values(self, categorical)
        sampled = sum(map(len, self.blocks))

        def bins_of(column: int) -> FeatureBins:
            values, counts = np.unique(values_of(column), return_counts=True)
            zeros = sampled - int(counts.sum())  # which are left out; a row may name a column twice
            if zeros > 0:
                at = int(np.searchsorted(values, 0.0))
                if at == len(values) or values[at] != 0:
                    values, counts = np.insert(values, at, 0.0), np.insert(counts, at, 0)
                counts[at] += zeros
            counts = counts.astype(np.int64)
            if column in categorical:
                return bins_of_categories(column, values, counts, max_bin, where)
            return bins_of_numbers(column, values, counts, max_bin, least_rows)

        size = max(1, min(_COLUMNS_AT_ONCE, -(-len(columns) // (4 * threads))))
        parts = [columns[begin : begin + size].tolist() for begin in range(0, len(columns), size)]
        with ThreadPoolExecutor(threads) as pool:
            every = pool.map(lambda some: [bins_of(column) for column in some], parts)
            found = [one for some in every for one in some if one.count > 1]
        if not found:
            raise DataError(f"{where}: no feature has two different values, so no split is possible")
        return BinTable(found, self.columns)


def _column_values(
    sample: RowSample, categorical: frozenset[int]
) -> tuple[Indices, Callable[[int], Numbers]]:
    """The columns that may have two bins, which those without a value have not unless they are categories.

    And the values of each, without the zeros that are left out.
    """
    if sample.blocks[0].sparse is None:
        every, parts = np.arange(sample.columns), [block.values for block in sample.blocks]
        return every, lambda column: np.concatenate([one[:, column] for one in parts], dtype=np.float64)
    rows = Rows.join([block.sparse for block in sample.blocks if block.sparse is not None])
    order = np.argsort(rows.indices, kind="stable")
    named, begins = np.unique(rows.indices[order], return_index=True)
    ends = np.append(begins[1:], len(order))[: len(begins)]
    spans = dict(zip(named.tolist(), zip(begins.tolist(), ends.tolist(), strict=True), strict=True))

    def values_of(column: int) -> Numbers:
        begin, end = spans.get(column, (0, 0))
        return rows.values[order[begin:end]].astype(np.float64)

    columns = np.union1d(named, np.array(sorted(categorical), np.int64)).astype(np.int64)
    return columns[columns < sample.columns], values_of


def sample_rows(source: RowSource, holdout: Holdout, seed: int, on_rows: OnRows = None) -> RowSample:
    """Go through a source once; DataError where rows have no labels, or labels that are no numbers."""
    kept: list[tuple[RowBlock, NDArray[np.uint64]]] = []
    held, limit, first, columns = 0, _WORD, 0, 0
    parts: dict[str, list[Numbers]] = {"train": [], "train_w": [], "held": [], "held_w": []}
    for block in source.blocks(on_rows):
        if first + len(block) > _MOST_ROWS:
            raise DataError(f"{source.name} has more than {_MOST_ROWS:,} rows; use fewer rows")
        if block.labels is None or not np.isfinite(block.labels).all():
            at = first + (0 if block.labels is None else int(np.argmin(np.isfinite(block.labels))))
            raise DataError(f"{source.name}: row {at + 1} has no label; every row needs a number")
        out = holdout.chosen(first, len(block))
        weights = block.weights if block.weights is not None else np.ones(len(block))
        good = (weights >= 0) & (weights < np.inf)
        if not good.all():
            at = first + int(np.argmin(good))
            raise DataError(f"{source.name}: the weight of row {at + 1} must be a number of at least 0")
        for name, mask in (("train", ~out), ("held", out)):
            parts[name].append(block.labels[mask])
            parts[f"{name}_w"].append(weights[mask])
        keys = hashed(np.arange(first, first + len(block), dtype=np.uint64), 2 * seed)
        picked = ~out & (keys <= limit)
        kept.append((block if picked.all() else block.take(picked), keys[picked]))
        held += int(picked.sum())
        while held > _SAMPLE_ROWS:
            limit >>= np.uint64(1)
            kept = [(one.take(own <= limit), own[own <= limit]) for one, own in kept]
            held = sum(len(own) for _, own in kept)
        first += len(block)
        columns = max(columns, block.columns)
    joined = {name: np.concatenate([np.zeros(0), *found]) for name, found in parts.items()}
    if not len(joined["train"]):
        raise DataError(f"{source.name} has {first} rows, all of them held out; use a smaller valid_fraction")
    if not joined["train_w"].any():
        raise DataError(f"{source.name}: all rows have weight 0; give some rows a positive weight")
    return RowSample(
        blocks=[one for one, _ in kept if len(one)],
        rows=len(joined["train"]),
        columns=columns,
        labels=joined["train"],
        weights=joined["train_w"],
        held_labels=joined["held"],
        held_weights=joined["held_w"],
    )


def bin_rows(
    read: Callable[[], Iterator[RowBlock]],
    bins: BinTable,
    layout: ByteLayout,
    labels: tuple[Numbers, Numbers],
    folder: str,
    score: Callable[[RowBlock], Numbers | float],
    threads: int = 1,
) -> BinnedRows:
    """The bins of all rows: in memory, or in files of `folder`; ManyhandsError says when the disk is full.

    `labels` are targets and weights, `score` gives the scores that training begins with, a row for each class. Where
    features of `layout` that share a column do not exclude each other after all, the rows are gone through once more
    with a column for each.
    """
    targets, weights = labels
    fill = partial(_filled, bins=bins, rows=len(targets), folder=folder, score=score, threads=threads)
    with disk_errors("bins", folder):
        clashes, tiles, scores = fill(read(), layout)
        if len(clashes):
            del tiles  # before there are others
            layout = layout.without(clashes)
            clashes, tiles, scores = fill(read(), layout)
            if len(clashes):
                raise DataError("the rows of the file have changed; do not change it during training")
        if not folder:
            return BinnedRows(rows=len(targets), layout=layout, arrays=(tiles, targets, weights, scores))
        for name, array in (("targets", targets), ("weights", weights), ("scores", scores)):
            array.tofile(Path(folder, name))
    return BinnedRows(rows=len(targets), layout=layout, folder=folder)


def _filled(
    blocks: Iterator[RowBlock],
    layout: ByteLayout,
    *,
    bins: BinTable,
    rows: int,
    folder: str,
    score: Callable[[RowBlock], Numbers | float],
    threads: int,
) -> tuple[NDArray[np.int64], NDArray[np.uint8], Numbers]:
    """Features that share a column and should not, all tiles, and the scores of rows."""
    shape = (-(-(len(layout.offsets) - 1) // TILE), rows, TILE)
    needed, room = int(np.prod(shape)), available_bytes()
    if needed > room:
        raise UserError(
            f"{rows:,} rows of {len(bins.features):,} features need {format_bytes(needed)} for bins, but only "
            f"{format_bytes(room)} is available; use fewer features"
        )
    tiles: NDArray[np.uint8] = (
        np.memmap(Path(folder, "tiles"), np.uint8, "w+", shape=shape) if folder else np.zeros(shape, np.uint8)
    )
    first, scores, clashes = 0, np.zeros((1, rows)), np.zeros(len(layout.columns), np.int64)
    parts, whole = (layout.columns, layout.firsts, layout.zeros), np.asarray(tiles)
    with ThreadPoolExecutor(threads) as pool:
        for block in blocks:
            end = first + len(block)
            if end > rows:
                first = end
                break
            begins = np.atleast_2d(score(block))
            scores = scores if len(scores) == len(begins) else np.zeros((len(begins), rows))
            scores[:, first:end] = begins
            if block.sparse is not None:  # which take little time
                found = iter([bins.of_sparse(block.sparse)])
            else:
                found = pool.map(bins.of_dense, np.array_split(block.values, threads))
            for part in found:
                bin_kernels.pack(part, *parts, first, whole, clashes)
                first += len(part)
    if first != rows:
        raise DataError(f"the file had {rows} rows, and now has {first}; do not change it during training")
    return np.flatnonzero(clashes), tiles, scores
