"""What one worker makes of its rows in a pass: sums, to be added to those of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manyhands.data.matrix_files import MatrixBlock
from manyhands.data.row_files import Rows
from manyhands.errors import DataError
from manyhands.workloads.svd.krylov import GRAM, POLISH, Array, KrylovSpace, PassTotals, numbers_of
from manyhands.workloads.svd.options import SvdSizes
from manyhands.workloads.svd.product_kernels import TILE, gram_rows, multiply_rows, project_rows


class PassSums:
    """Sums of a pass on one flat memory, so that all workers' are added up at once: see `PassTotals`.

    `product` has a column's numbers together where rows are sparse, else a vector's.
    """

    def __init__(self, memory: Array, sizes: SvdSizes) -> None:
        columns, most = sizes.shape.columns, _padded(sizes.width)
        self.memory = memory
        room = self.count(sizes) - columns - most - 2
        self.product, self.sums, self.along, self.energy = np.split(memory, np.cumsum([room, columns, most]))
        self._sizes = sizes

    @staticmethod
    def count(sizes: SvdSizes) -> int:
        columns = sizes.shape.columns
        room = columns * max(_padded(sizes.width), columns if sizes.is_gram else 0)
        return room + columns + _padded(sizes.width) + 2

    def clear(self) -> None:
        self.memory[:] = 0

    def totals(self, space: KrylovSpace, *, center: bool, triangle: Array | None) -> PassTotals:
        sizes, columns, rows = self._sizes, self._sizes.shape.columns, self._sizes.shape.rows
        energy, noise, sums = float(self.energy[0]), 0.0, self.sums.copy()
        # Where zeros are left out nothing can be subtracted from them.
        is_shifted = sizes.shape.is_sparse and center
        if space.kind == GRAM:
            product = self.product[: columns * columns].reshape(columns, columns)
            if is_shifted:
                noise = energy
                cross = np.outer(space.mean, sums)
                product = product - cross - cross.T + rows * np.outer(space.mean, space.mean)
        elif sizes.shape.is_sparse:
            width = _padded(len(space.block))
            product = self.product[: columns * width].reshape(columns, width).T[: len(space.block)]
            if is_shifted:
                product = product - np.outer(self.along[: len(space.block)], space.mean)
        else:
            product = self.product[: columns * len(space.block)].reshape(-1, columns)
        if is_shifted:
            energy += float(rows * (space.mean @ space.mean) - 2 * (space.mean @ sums))
            sums = sums - rows * space.mean
        return PassTotals(product=product, sums=sums, energy=energy, triangle=triangle, noise=noise)


class RowPass:
    """One pass over a worker's rows: `add` block after block to `sums`, or to `triangle` where values are polished."""

    def __init__(
        self, space: KrylovSpace, sizes: SvdSizes, sums: PassSums, triangle: Array, center: bool
    ) -> None:
        self._space, self._sizes, self._sums, self._center = space, sizes, sums, center
        self.triangle = triangle  # R of this worker's rows so far, for POLISH
        self._is_first = not space.passes
        if space.kind != GRAM:
            self._vectors, self._less = _padded_vectors(space.block, space.mean if center else None)

    def add(self, block: MatrixBlock) -> None:
        """Some rows; DataError names the first number that is not one."""
        if isinstance(block.rows, Rows):
            self._add_sparse(block.rows, block.begin)
            return
        space, sums, given = self._space, self._sums, block.rows
        table: Array = given.astype(np.float64, copy=False)
        if self._center:
            table = table - space.mean
        if self._is_first:
            energy = float(np.vdot(table, table))
            wrong = [] if np.isfinite(energy) else np.argwhere(~np.isfinite(given)).tolist()
            if wrong:
                row, column = wrong[0]
                raise DataError(
                    f"row {block.begin + row}, column {column} is {given[row, column]}, not a number; fill it in, or "
                    "leave that row out"
                )
            self._add_energy(energy, block.begin)
            if self._center:
                sums.sums += table.sum(axis=0)
        if space.kind == GRAM:
            columns = table.shape[1]
            sums.product[: columns * columns].reshape(columns, columns)[:] += table.T @ table
            return
        vectors = space.block
        found = table @ vectors.T
        if space.kind == POLISH:
            self.triangle[:] = combined_triangle([self.triangle, found])
        else:
            sums.product[: vectors.size].reshape(vectors.shape)[:] += found.T @ table

    def _add_sparse(self, rows: Rows, begin: int) -> None:
        space, sums, columns = self._space, self._sums, self._sizes.shape.columns
        csr = rows.starts, rows.indices, rows.values
        if self._is_first:
            values = rows.values.astype(np.float64)
            self._add_energy(float(np.vdot(values, values)), begin)
            if self._center:
                sums.sums += np.bincount(rows.indices, values, columns)
        if space.kind == GRAM:
            gram_rows(*csr, columns, sums.product)
            return
        width = _padded(len(space.block))
        if space.kind == POLISH:
            found = np.empty((len(rows), width))
            project_rows(*csr, self._vectors, width, self._less, found.reshape(-1))
            self.triangle[:] = combined_triangle([self.triangle, found[:, : len(space.block)]])
        else:
            along = sums.along[:width] if self._center else sums.along[:0]
            multiply_rows(*csr, self._vectors, width, self._less, sums.product, along)

    def _add_energy(self, energy: float, begin: int) -> None:
        if not np.isfinite(energy):
            raise DataError(f"row {begin} or later: a value is too large to be squared; scale the rows down")
        self._sums.energy[0] += energy


def combined_triangle(parts: list[Array]) -> Array:
    """R of all rows of the parts, square; the sign of its rows is anyone's."""
    found: Array = np.linalg.qr(np.concatenate(parts), mode="r")  # type: ignore[assignment]
    square = np.zeros((found.shape[1],) * 2)
    square[: len(found)] = found
    return square


def projections(block: MatrixBlock, components: Array, mean: Array | None) -> Array:
    """Rows times components, less the mean where there is one: one line for each row."""
    if not isinstance(block.rows, Rows):
        table = block.rows.astype(np.float64, copy=False)
        return (table if mean is None else table - mean) @ components.T
    vectors, less = _padded_vectors(components, mean)
    found, rows = np.empty((len(block), less.size)), block.rows
    project_rows(rows.starts, rows.indices, rows.values, vectors, less.size, less, found.reshape(-1))
    return found[:, : len(components)]


def _padded_vectors(block: Array, mean: Array | None) -> tuple[Array, Array]:
    """Vectors as sparse rows need them, a column's numbers together and filled up; and the mean's product with each."""
    vectors = np.zeros((block.shape[1], _padded(len(block))))
    vectors[:, : len(block)] = block.T
    less = np.zeros(vectors.shape[1]) if mean is None else mean @ vectors
    return vectors.reshape(-1), less


def _padded(width: int) -> int:
    return -(-width // TILE) * TILE


class SvdMemory(nn.Module):
    """The space, and of a pass that is under way the sums so far, where a run is kept in the middle of one."""

    def __init__(self, memory: NDArray[Any], sizes: SvdSizes) -> None:
        super().__init__()
        count = numbers_of(sizes)
        self.space = KrylovSpace.on(memory[:count], sizes)
        self.krylov = nn.Parameter(torch.from_numpy(memory[:count]), requires_grad=False)
        self.sums = nn.Parameter(torch.from_numpy(memory[count:]), requires_grad=False)
        self.under_way: Array = memory[count:]  # sums of all workers, and then the triangle

    @staticmethod
    def count(sizes: SvdSizes) -> int:
        return numbers_of(sizes) + PassSums.count(sizes) + sizes.width**2
