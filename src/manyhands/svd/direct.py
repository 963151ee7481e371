"""`truncated_svd`: of a matrix that is in memory, in this thread, without a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from manyhands.data.matrix import MatrixBlock
from manyhands.data.rows import Rows
from manyhands.errors import UserError
from manyhands.svd.krylov import DONE, KrylovSpace, advance, begin, numbers_of
from manyhands.svd.model import SvdModel
from manyhands.svd.options import Shape, SvdOptions, sizes_of
from manyhands.svd.products import PassSums, RowPass

__all__ = ["truncated_svd"]

_SAMPLE_ROWS = 1024


def truncated_svd(matrix: Any, options: SvdOptions | None = None) -> SvdModel:
    """The largest singular values and their right singular vectors of a table or of a sparse matrix of scipy.

    As exact as `options.tolerance` says; a UserError where that took more passes than allowed.
    """
    options = options or SvdOptions()
    blocks = _Blocks(matrix)
    sizes = sizes_of(blocks.shape, options, 1)
    space = KrylovSpace.on(np.zeros(numbers_of(sizes)), sizes)
    begin(space, sizes, options, blocks.guess() if options.center else np.zeros(sizes.shape.columns))
    sums = PassSums(np.zeros(PassSums.count(sizes)), sizes)
    while space.kind != DONE:
        if space.passes >= options.passes:
            raise UserError(
                f"passes={options.passes}: the error is still {space.error:.2g}, more than tolerance="
                f"{options.tolerance:g}; allow more of either"
            )
        sums.clear()
        width = len(space.block)
        one = RowPass(space, sizes, sums, np.zeros((width, width)), center=options.center)
        for block in blocks.of(sizes.block_bytes):
            one.add(block)
        advance(space, sizes, options, sums.totals(space, center=options.center, triangle=one.triangle))
    return SvdModel.of(space, sizes, options)


class _Blocks:
    """The matrix in blocks that stay in the cache."""

    def __init__(self, matrix: Any) -> None:
        self._csr: Any = matrix.tocsr() if hasattr(matrix, "tocsr") else None
        if self._csr is None:
            self._table = np.ascontiguousarray(matrix)
            if self._table.ndim != 2 or self._table.dtype.kind not in "biuf":
                raise UserError(
                    f"a {self._table.dtype} array of shape {self._table.shape} is no matrix; give numbers in two "
                    "dimensions"
                )
            rows, columns = self._table.shape
            self.shape = Shape(rows=rows, columns=columns, entries=rows * columns, is_sparse=False)
        else:
            rows, columns = self._csr.shape
            if not np.isfinite(self._csr.data).all():
                raise UserError("the matrix has entries that are no numbers; fill them in, or leave them out")
            self.shape = Shape(rows=rows, columns=columns, entries=self._csr.nnz, is_sparse=True)

    def of(self, block_bytes: int) -> Iterator[MatrixBlock]:
        if self._csr is not None:
            yield self._rows()
            return
        count = max(1, block_bytes // (8 * self.shape.columns))
        for first in range(0, self.shape.rows, count):
            yield MatrixBlock(begin=first, rows=self._table[first : first + count])

    def guess(self) -> Any:
        if self._csr is not None:
            return np.asarray(self._csr.mean(axis=0), np.float64).reshape(-1)
        return self._table[:: max(1, self.shape.rows // _SAMPLE_ROWS)].mean(axis=0, dtype=np.float64)

    def _rows(self) -> MatrixBlock:
        csr = self._csr
        values = csr.data if csr.dtype in (np.float32, np.float64) else csr.data.astype(np.float64)
        nothing = np.zeros(self.shape.rows, np.float32)
        rows = Rows(
            starts=csr.indptr.astype(np.int64, copy=False),
            indices=csr.indices.astype(np.int32, copy=False),
            values=values,
            labels=nothing,
            weights=nothing,
            size=self.shape.columns,
        )
        return MatrixBlock(begin=0, rows=rows)
