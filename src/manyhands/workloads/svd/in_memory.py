"""`truncated_svd`: of a matrix that is in memory, in this thread, without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from manyhands.data.matrix_files import MatrixBlock
from manyhands.data.row_files import Rows
from manyhands.errors import DataError, UserError
from manyhands.workloads.svd.krylov import DONE, KrylovSpace, advance, begin, numbers_of
from manyhands.workloads.svd.model import SvdModel
from manyhands.workloads.svd.options import Shape, SvdOptions, sizes_of
from manyhands.workloads.svd.pass_sums import PassSums, RowPass

_SAMPLE_ROWS = 1024
_WIDE = 2  # times as many columns as rows: then what follows a pass is that much less across
_WIDE_BLOCK = 1 << 22


def truncated_svd(matrix: Any, options: SvdOptions | None = None) -> SvdModel:
    """The largest singular values and their right singular vectors of a table or of a sparse matrix of scipy.

    As exact as `options.tolerance` says; a UserError where that took more passes than allowed.
    """
    options = options or SvdOptions()
    given = _checked(matrix)
    rows, columns = given.shape
    if columns >= _WIDE * rows >= _WIDE * options.rank and not options.center:
        with suppress(DataError):  # it names rows for columns; the usual way says it right
            return _decomposed_across(given, options)
    return _decomposed(_Blocks(given), options)


def _decomposed(blocks: _Blocks, options: SvdOptions) -> SvdModel:
    sizes = sizes_of(blocks.shape, options, 1)
    space = KrylovSpace.on(np.zeros(numbers_of(sizes)), sizes)
    begin(space, sizes, options, blocks.guess() if options.center else np.zeros(sizes.shape.columns))
    sums = PassSums(np.zeros(PassSums.count(sizes)), sizes)
    while space.kind != DONE:
        if space.passes >= options.passes:
            raise UserError(
                f"passes={options.passes}: the error is still {space.error:.2g}, more than tolerance="
                f"{options.tolerance:g}; raise one of them"
            )
        sums.clear()
        width = len(space.block)
        one = RowPass(space, sizes, sums, np.zeros((width, width)), center=options.center)
        for block in blocks.of(sizes.block_bytes):
            one.add(block)
        advance(space, sizes, options, sums.totals(space, center=options.center, triangle=one.triangle))
    return SvdModel.of(space, sizes, options)


def _decomposed_across(matrix: Any, options: SvdOptions) -> SvdModel:
    """Of a matrix with far more columns than rows: the space is that of the rows, which is smaller.

    What is found are left singular vectors U; a last pass turns them into AᵀU, which are right ones times their values.
    """
    across = _Blocks(matrix.T)
    found = _decomposed(across, options)
    table = np.concatenate([found.project(block) for block in across.of(_WIDE_BLOCK)])
    lengths = np.linalg.norm(table, axis=0)
    if lengths.min() <= 1e-8 * lengths.max():
        components = np.linalg.qr(table)[0].T
    else:  # the orthonormal columns next to these, which are orthogonal up to rounding
        table = table / lengths
        squares, vectors = np.linalg.eigh(table.T @ table)
        components = (table @ (vectors / np.sqrt(squares) @ vectors.T)).T
    largest = components[np.arange(len(components)), np.abs(components).argmax(axis=1)]
    return replace(
        found,
        components=np.ascontiguousarray(components * np.where(largest < 0, -1.0, 1.0)[:, None]),
        rows=matrix.shape[0],
        passes=found.passes + 1,
    )


def _checked(matrix: Any) -> Any:
    """A table or a sparse matrix of numbers, in which each entry is there once; a UserError says what is none."""
    is_sparse = hasattr(matrix, "tocsr")
    given: Any = matrix if is_sparse else np.asarray(matrix)
    if len(given.shape) != 2 or given.dtype.kind not in "biuf":
        kind = f"a {given.dtype} {'sparse matrix' if is_sparse else 'array'} of shape {given.shape}"
        raise UserError(f"{kind} is not a matrix; give numbers in two dimensions")
    if not is_sparse:
        return given
    csr = given.tocsr()
    if not csr.has_canonical_format:
        csr = csr.copy()
        csr.sum_duplicates()
    if max(csr.shape) >= 1 << 31:
        raise UserError(f"a sparse matrix of shape {csr.shape} is too large; each side must be below 2^31")
    if not np.isfinite(csr.data).all():
        raise UserError("the matrix has entries that are not numbers; fill them in, or leave them out")
    return csr


class _Blocks:
    def __init__(self, matrix: Any) -> None:
        """`matrix` is what `_checked` gave, or that transposed."""
        self._csr: Any = matrix.tocsr() if hasattr(matrix, "tocsr") else None
        self._table: Any = matrix
        rows, columns = matrix.shape
        entries = rows * columns if self._csr is None else self._csr.nnz
        self.shape = Shape(rows=rows, columns=columns, entries=entries, is_sparse=self._csr is not None)

    def of(self, block_bytes: int) -> Iterator[MatrixBlock]:
        if self._csr is not None:
            csr, nothing = self._csr, np.zeros(self.shape.rows, np.float32)
            rows = Rows(
                starts=csr.indptr.astype(np.int64, copy=False),
                indices=csr.indices.astype(np.int32, copy=False),
                values=csr.data if csr.dtype in (np.float32, np.float64) else csr.data.astype(np.float64),
                labels=nothing,
                weights=nothing,
                size=self.shape.columns,
            )
            yield MatrixBlock(begin=0, rows=rows)
            return
        count = max(1, block_bytes // (8 * self.shape.columns))
        for first in range(0, self.shape.rows, count):
            yield MatrixBlock(begin=first, rows=self._table[first : first + count])

    def guess(self) -> Any:
        if self._csr is not None:
            return np.asarray(self._csr.mean(axis=0), np.float64).reshape(-1)
        return self._table[:: max(1, self.shape.rows // _SAMPLE_ROWS)].mean(axis=0, dtype=np.float64)
