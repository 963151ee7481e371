"""A truncated SVD that was found: singular values, components, what they explain, and its file.

The file is safetensors: `singular_values`, `components` (one a row), `mean` where the columns were centred, and
`explained_variance` and its ratio. It holds no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.data.matrix_files import MatrixBlock, MatrixFile
from manyhands.data.store.atomic import write_atomically
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.data.table_encoding import TableEncoding
from manyhands.data.table_files import (
    SparseTable,
    TableMatrix,
    TableReading,
    file_kind,
    is_frame,
    open_matrix,
    open_table,
)
from manyhands.errors import DataError, UserError
from manyhands.workloads.exporting import Export, ExportAsked, read_model_file
from manyhands.workloads.predictor import Predictor, ReadAs, encoded_inputs, table_of
from manyhands.workloads.svd.krylov import DONE, Array, KrylovSpace, components_of
from manyhands.workloads.svd.options import SvdOptions, SvdSizes
from manyhands.workloads.svd.pass_sums import projections

SVD_FILE = "svd.safetensors"
_FORMAT = "manyhands.svd.1"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SvdModel:
    """A ≈ U · diag(singular_values) · components, less the mean of each column where there is one."""

    singular_values: Array  # the largest first
    components: Array  # one a row, of length 1; the largest entry of each is positive
    mean: Array | None  # of each column; None where none was subtracted
    rows: int  # of the matrix that was decomposed
    energy: float  # the sum of squares of all its entries, the mean subtracted where that was wanted
    error: float = 0.0  # an estimate of the largest relative error of a singular value
    passes: int = 0  # over the matrix, that it took
    converged: bool = True  # whether the tolerance was reached
    encoding: TableEncoding | None = None  # of a table: how its columns become those of the matrix

    @classmethod
    def of(cls, space: KrylovSpace, sizes: SvdSizes, options: SvdOptions) -> SvdModel:
        values, components = components_of(space, sizes.rank)
        return cls(
            singular_values=values,
            components=components,
            mean=space.mean.copy() if options.center else None,
            rows=sizes.shape.rows,
            energy=space.energy,
            error=space.error,
            passes=space.passes,
            converged=space.kind == DONE and space.error <= options.tolerance,
        )

    @property
    def explained_variance(self) -> Array:
        """Of each component: the square of its value over one less than the rows, as for a sample."""
        return self.singular_values**2 / max(1, self.rows - 1)

    @property
    def explained_ratio(self) -> Array:
        return self.singular_values**2 / self.energy if self.energy else np.zeros_like(self.singular_values)

    def project(self, block: MatrixBlock) -> Array:
        """The coordinates of rows along the components: U · diag(singular_values) for those it was made of."""
        return projections(block, self.components, self.mean)

    def project_file(self, file: MatrixFile, block_bytes: int = 1 << 22) -> Iterator[Array]:
        """Block after block; DataError for a file with other columns, or numbers that are none."""
        columns = self.components.shape[1]
        for block in file.blocks(block_bytes):
            has = block.rows.shape[1] if isinstance(block.rows, np.ndarray) else block.rows.size
            if has > columns or (has < columns and isinstance(block.rows, np.ndarray)):
                raise DataError(f"{file.path} has {has} columns, but the components have {columns}")
            found = self.project(block)
            if not np.isfinite(found).all():
                row = block.begin + int(np.argmin(np.isfinite(found).all(axis=1)))
                raise DataError(f"{file.path}, row {row} has a value that is not a number; fill it in")
            yield found

    def save(self, path: Path) -> None:
        names = ("rows", "energy", "error", "passes", "converged")
        header = {"format": _FORMAT, **{name: str(getattr(self, name)) for name in names}}
        if self.encoding is not None:
            header["columns"] = self.encoding.to_json()
        parts = {"singular_values": self.singular_values, "components": self.components}
        if self.mean is not None:
            parts |= {
                "mean": self.mean,
                "explained_variance": self.explained_variance,
                "explained_variance_ratio": self.explained_ratio,
            }
        tensors = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
        write_atomically(path, encode_tensors(tensors, header))

    @staticmethod
    def load(path: Path | str) -> SvdModel:
        """Read what `save` wrote, from the file or the directory that holds it; UserError says what is wrong."""
        kind = _FORMAT, "decomposition of `manyhands train svd`"
        return read_model_file(path, SVD_FILE, kind, _from_parts)


def _from_parts(header: dict[str, str], written: dict[str, Tensor]) -> SvdModel:
    parts: dict[str, Array] = {name: one.numpy() for name, one in written.items()}
    values, components, mean = parts["singular_values"], parts["components"], parts.get("mean")
    if values.ndim != 1 or components.ndim != 2 or len(values) != len(components) or not components.size:
        raise ValueError("its components must have one row per singular value")
    if mean is not None and mean.shape != components.shape[1:]:
        raise ValueError("its mean and its components differ in length")
    encoding = TableEncoding.from_json(header["columns"]) if "columns" in header else None
    if encoding is not None and encoding.firsts[-1] != components.shape[1]:
        raise ValueError("its columns and its components differ in number")
    for part in (values, components, *([] if mean is None else [mean])):
        if part.dtype != np.float64 or not np.isfinite(part).all():
            raise ValueError("its numbers must be finite and in double precision")
    return SvdModel(
        singular_values=values,
        components=components,
        mean=mean,
        rows=int(header["rows"]),
        energy=float(header["energy"]),
        error=float(header["error"]),
        passes=int(header["passes"]),
        converged=header["converged"] == "True",
        encoding=encoding,
    )


def opened_rows(
    data: Any, table: TableReading | None = None, encoding: TableEncoding | None = None
) -> MatrixFile:
    """The rows of a file or a DataFrame; of a table, every category is a column, and no value may be missing.

    Where a model has an `encoding`, a table is read as that has it.
    """
    reading = replace(table or TableReading(), labelled=False, complete=True)
    if encoding is None or not (is_frame(data) or file_kind(data) in ("csv", "parquet")):
        file = open_matrix(data, reading=reading)
    else:
        file = open_table(data, reading, scanned=False).encoded(encoding, labelled=False)
    return SparseTable(file) if isinstance(file, TableMatrix) and file.encoding.categories else file


class SvdPredictor(Predictor[Array]):
    """The coordinates of rows along the components. What is computed in one go are rows that are projected already."""

    takes: ClassVar[str] = "an array of numbers, one for each column"

    model: SvdModel

    def blocks(self, source: Any, read_as: ReadAs) -> Iterator[Array]:
        self.check_format(read_as)
        file = opened_rows(source, TableReading(skip_bad=read_as.skip_bad), self.model.encoding)
        yield from self.model.project_file(file)
        self.left_out = file.left_out

    def inputs(self, values: Sequence[Any]) -> Array:
        encoding = self.model.encoding
        columns = self.model.components.shape[1] if encoding is None else len(encoding.names)
        table = table_of(encoded_inputs(encoding, values), columns, self.takes)
        if encoding is not None and encoding.categories:
            rows = MatrixBlock(begin=0, rows=encoding.sparse(table, None))
            return self.model.project(rows)
        centred = table if self.model.mean is None else table - self.model.mean
        return centred @ self.model.components.T

    def together(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def answers(self, inputs: Array) -> list[Any]:
        return list(inputs.tolist())

    def lines(self, inputs: Array) -> Iterator[str]:
        return (" ".join(f"{value:.9g}" for value in row) for row in inputs.tolist())

    @property
    def example(self) -> Any:
        encoding = self.model.encoding
        if encoding is None:
            return [1] * self.model.components.shape[1]
        return encoding.example


def open_svd(path: Path) -> SvdPredictor:
    return SvdPredictor(SvdModel.load(path))


def export_svd(asked: ExportAsked) -> Export:
    raise UserError(f"{asked.run} holds a decomposition, which is already one file: {asked.own(SVD_FILE)}")
