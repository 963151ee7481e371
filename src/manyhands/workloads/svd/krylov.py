"""Block Krylov iteration for the largest singular values of a matrix A that is only multiplied: pure.

Musco, Musco (2015), with the thick restart of Wu, Simon (2000). A pass over the rows gives AᵀAQ for a block of vectors
Q; all blocks together span the space in which singular vectors are looked for. In it, AᵀA is a small symmetric matrix:
its eigenvalues are squares of singular values, and what AᵀA makes of an eigenvector beyond the space is its residual.
One pass gains what two or more of plain subspace iteration do. Where the space is full, its best directions stay.

What follows a pass is decided here and kept in a `KrylovSpace` of plain arrays, which is all that a run needs to
resume:

    GRAM    few columns: all products of two columns at once, after which everything is known
    POWER   the newest block is multiplied
    POLISH  small values, which a square loses beside a large one, from the rows' projections themselves
    DONE
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from manyhands.workloads.svd.options import SvdOptions, SvdSizes

Array = NDArray[np.float64]

GRAM, POWER, POLISH, DONE = range(4)
_KIND, _USED, _FRESH, _ERROR, _ENERGY, _PASSES, _DRIFT, _DRIFT_BEFORE, _BEFORE, _LACK = range(10)
_NUMBERS: Final = 10
_NOISE: Final = 8 * np.finfo(np.float64).eps  # of a squared value, beside the largest
_LOST: Final = 1e-13  # a direction as short as this, beside the largest square, is rounding
_ALIKE: Final = 1e-2  # directions less alike than this are orthonormal to 14 digits at once
_MOST_DRIFT: Final = 1e-10  # of the space from being orthonormal; values lose the square of it (Simon 1984)
_LEAST_DRIFT: Final = float(np.finfo(np.float64).eps)


def numbers_of(sizes: SvdSizes) -> int:
    columns, most = sizes.shape.columns, sizes.most
    return _NUMBERS + most + columns + most * most + most * columns


@dataclass(slots=True, eq=False)
class KrylovSpace:
    """What is known after some passes; the arrays are views of one block of memory."""

    numbers: Array
    values: Array  # singular values found, the largest first; 0 beyond what is known
    mean: Array  # of each column; before the first pass, a guess that rows are shifted by
    projected: Array  # AᵀA between the vectors of the space
    vectors: Array  # orthonormal, one a row; those of the last block are not multiplied yet

    @classmethod
    def on(cls, memory: Array, sizes: SvdSizes) -> KrylovSpace:
        columns, most = sizes.shape.columns, sizes.most
        ends = np.cumsum([_NUMBERS, most, columns, most * most, most * columns])
        numbers, values, mean, projected, vectors = np.split(memory, ends[:-1])
        return cls(numbers, values, mean, projected.reshape(most, most), vectors.reshape(most, columns))

    @property
    def kind(self) -> int:
        return int(self.numbers[_KIND])

    @property
    def error(self) -> float:  # the largest relative one of a singular value; 1 before the first pass
        return float(self.numbers[_ERROR])

    @property
    def energy(self) -> float:  # the sum of squares of all entries, known after the first pass
        return float(self.numbers[_ENERGY])

    @property
    def passes(self) -> int:
        return int(self.numbers[_PASSES])

    @property
    def block(self) -> Array:
        used, fresh = int(self.numbers[_USED]), int(self.numbers[_FRESH])
        return self.vectors[used - fresh : used]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTotals:
    """Sums over all rows that a pass gave. B is A with the space's mean subtracted where that is wanted."""

    product: Array  # BᵀBQ as rows, one for each vector of the block; BᵀB itself for GRAM
    sums: Array  # of the columns of B; of the first pass only
    energy: float  # the sum of squares of B; likewise
    triangle: Array | None = None  # R of BQ = QR; for POLISH
    noise: float = 0.0  # what `product` was made of was as large as this, where that is more than itself


def begin(space: KrylovSpace, sizes: SvdSizes, options: SvdOptions, guess: Array) -> None:
    """Before the first pass; `guess` is about the mean where that will be subtracted, else 0."""
    for array in (space.numbers, space.values, space.projected):
        array[:] = 0
    space.mean[:] = guess
    space.numbers[_ERROR] = 1.0
    if sizes.is_gram:
        space.numbers[_KIND] = GRAM
        return
    drawn = np.random.default_rng(options.seed).standard_normal((sizes.width, sizes.shape.columns))
    space.vectors[: sizes.width] = _orthonormal(_orthonormal(drawn))
    space.numbers[[_KIND, _USED, _FRESH]] = POWER, sizes.width, sizes.width


def advance(space: KrylovSpace, sizes: SvdSizes, options: SvdOptions, totals: PassTotals) -> None:
    """Take what a pass gave, and decide what the next does."""
    product, noise, rows = totals.product, totals.noise, sizes.shape.rows
    if not space.passes:
        space.numbers[_ENERGY] = totals.energy
        if options.center:
            # What BᵀBQ would have been with the mean itself in the place of a guess that was `off`.
            off = totals.sums / rows
            product = product - rows * np.outer(space.block @ off if space.kind == POWER else off, off)
            space.numbers[_ENERGY] = max(0.0, totals.energy - rows * float(off @ off))
            space.mean += off
    space.numbers[_PASSES] += 1
    if space.kind == GRAM:
        squares, vectors = _eigenvectors(product)
        space.vectors[: sizes.width] = vectors[:, : sizes.width].T
        space.numbers[_ERROR] = 0.0
        _end(space, sizes, squares[: sizes.width], _NOISE * max(noise, float(squares[0])), options)
    elif space.kind == POWER:
        _take_block(space, sizes, options, product)
    else:
        assert totals.triangle is not None, "a pass that polishes makes one"
        # The singular values of BQ, as of its triangle, are as exact as those of B in the space of Q. What rounding has
        # turned the vectors by costs values the square of that; what they lacked before, they lack still.
        used = int(space.numbers[_USED])
        _, values, right = np.linalg.svd(totals.triangle)
        space.vectors[:used] = right @ space.vectors[:used]
        space.values[:used] = values
        smallest = float(values[sizes.rank - 1])
        rounding = _NOISE * float(values[0]) / smallest if smallest else 1.0
        space.numbers[_ERROR] = min(1.0, rounding + space.error**2 + float(space.numbers[_LACK]))
        space.numbers[_KIND] = DONE


def _take_block(space: KrylovSpace, sizes: SvdSizes, options: SvdOptions, product: Array) -> None:
    """A step of block Lanczos, with the whole space taken out; then the eigenvalues of what the space sees of AᵀA.

    AᵀA leads from a block to itself, the one before and the next; what is found of others is rounding.
    """
    used, fresh = int(space.numbers[_USED]), int(space.numbers[_FRESH])
    basis, new = space.vectors[:used], slice(used - fresh, used)
    within = product @ basis.T
    beyond = product - within @ basis
    near = slice(used - fresh - int(space.numbers[_BEFORE]), used)
    space.projected[new, near] = within[:, near]
    space.projected[near, new] = within[:, near].T
    squares, weights = _eigenvectors(space.projected[:used, :used])
    floor = _NOISE * float(squares[0])
    residuals = np.linalg.norm(weights[new, : sizes.rank + 1].T @ beyond, axis=1)
    directions = _directions(space, beyond, basis, _LOST * float(squares[0]), within)
    errors = _errors(squares, residuals, sizes.rank)
    space.numbers[_ERROR] = float((errors / np.maximum(2 * squares[: sizes.rank], floor or 1.0)).max())
    space.numbers[_LACK] = space.numbers[_ERROR]
    rounding = _errors(squares, np.full(len(residuals), floor), sizes.rank)
    small_enough = np.maximum(2 * options.tolerance * squares[: sizes.rank], rounding)
    if not len(directions) or bool((errors <= small_enough).all()):
        kept = min(used, sizes.width)
        space.vectors[:kept] = weights[:, :kept].T @ basis
        _end(space, sizes, squares[:kept], floor, options)
        return
    if used + len(directions) > sizes.most:
        kept = min(sizes.width, sizes.most - len(directions))
        space.vectors[:kept] = _orthonormal(weights[:, :kept].T @ basis)
        space.projected[:] = 0
        space.projected[range(kept), range(kept)] = squares[:kept]
        used = fresh = kept
    space.vectors[used : used + len(directions)] = directions
    space.numbers[[_USED, _FRESH, _BEFORE]] = used + len(directions), len(directions), fresh


def _errors(squares: Array, residuals: Array, rank: int) -> Array:
    """Estimates of how far the largest `rank` squares are from eigenvalues.

    There is one within the residual; where the others are a gap away, within its square over the gap (Kato, Temple).
    """
    wanted, whole = residuals[:rank], float(np.sum(residuals[:rank] ** 2))
    if len(squares) == rank:
        return wanted
    gaps = squares[:rank] - (squares[rank] + residuals[rank])
    return np.where(gaps > 0, np.minimum(wanted, whole / np.where(gaps > 0, gaps, 1.0)), wanted)


def _eigenvectors(matrix: Array) -> tuple[Array, Array]:
    """The largest first; vectors are columns."""
    squares, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.maximum(squares[::-1], 0.0), vectors[:, ::-1]


def _directions(space: KrylovSpace, beyond: Array, basis: Array, lost: float, within: Array) -> Array:
    """Orthonormal directions of the rows of `beyond`, without those that are shorter than `lost`.

    By eigenvectors of the rows' products, which is many times as fast as by reflections, where the rows are so little
    alike that it is as exact. `beyond` is a difference, with `within` the coordinates of what was subtracted: where it
    is short beside that, what the basis lacks of being orthonormal grows from pass to pass. What was subtracted lies in
    the last two blocks, as always with a symmetric matrix (Lanczos), so it is these that count. Before it is much, the
    basis is taken out once more.
    """
    products = beyond @ beyond.T
    lengths = np.sqrt(np.diag(products))
    if not (lengths > lost).any():
        return beyond[:0]
    likeness = 0.0
    if (lengths > lost).all():
        squares, vectors = np.linalg.eigh(products / np.outer(lengths, lengths))
        likeness = max(0.0, float(squares[0]))  # the smaller the more alike
    if likeness > 1e-8:
        found: Array = (vectors / lengths[:, None] / np.sqrt(squares)).T @ beyond
    else:
        q, triangle = np.linalg.qr(beyond.T)
        left, along, _ = np.linalg.svd(triangle)
        found = (q @ left[:, along > lost]).T
    shortest = float(np.sqrt(likeness) * lengths.min())
    scale = float(np.linalg.norm(within, axis=1).max() + lengths.max())
    before = max(float(space.numbers[[_DRIFT, _DRIFT_BEFORE]].max()), _LEAST_DRIFT)
    is_clean = before * scale < _MOST_DRIFT * shortest
    space.numbers[_DRIFT_BEFORE] = space.numbers[_DRIFT]
    space.numbers[_DRIFT] = before * scale / shortest if is_clean else _LEAST_DRIFT
    if is_clean and likeness > _ALIKE:
        return found
    return _orthonormal(found if is_clean else found - (found @ basis.T) @ basis)


def _orthonormal(rows: Array) -> Array:
    """The orthonormal rows next to these, which are not much alike."""
    squares, vectors = np.linalg.eigh(rows @ rows.T)
    found: Array = (vectors / np.sqrt(squares)) @ vectors.T @ rows
    return found


def _end(space: KrylovSpace, sizes: SvdSizes, squares: Array, floor: float, options: SvdOptions) -> None:
    """Everything is known, but for what squares lost in the `floor` of rounding: that takes another pass."""
    count, smallest = len(squares), float(squares[sizes.rank - 1])
    space.values[:] = 0
    space.values[:count] = np.sqrt(squares)
    space.numbers[[_USED, _FRESH]] = count, count
    noise = min(1.0, floor / smallest) if smallest else 1.0
    space.numbers[_ERROR] = max(noise, space.error)
    space.numbers[_KIND] = POLISH if noise > options.tolerance / 10 else DONE


def components_of(space: KrylovSpace, rank: int) -> tuple[Array, Array]:
    """Singular values and, one a row, right singular vectors, of which the largest entry is positive.

    Where the iteration is not done, they are the best so far, after at least one pass.
    """
    assert space.passes, "nothing is known before the first pass"
    if space.kind == POWER:
        known = int(space.numbers[_USED] - space.numbers[_FRESH])
        squares, weights = _eigenvectors(space.projected[:known, :known])
        values, vectors = np.sqrt(squares[:rank]), weights[:, :rank].T @ space.vectors[:known]
    else:
        values, vectors = space.values[:rank].copy(), space.vectors[:rank].copy()
    largest = vectors[np.arange(rank), np.abs(vectors).argmax(axis=1)]
    return values, vectors * np.where(largest < 0, -1.0, 1.0)[:, None]
