"""Rows to coordinates: what a decomposition answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manyhands.data.matrix_files import open_matrix
from manyhands.errors import UserError
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.predictor import Predictor, ReadAs, table_of
from manyhands.workloads.svd.krylov import Array
from manyhands.workloads.svd.model import SVD_FILE, SvdModel

__all__ = ["SvdPredictor", "export_svd", "open_svd"]


class SvdPredictor(Predictor[Array]):
    """The coordinates of rows along the components. What is computed in one go are rows that are projected already."""

    takes: ClassVar[str] = "an array of numbers, one for each column"

    def __init__(self, model: SvdModel) -> None:
        self.model = model

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[Array]:
        """All rows of a LIBSVM, npy or Parquet file."""
        self.check_read_as(read_as)
        return self.model.project_file(open_matrix(source))

    def inputs(self, values: Sequence[Any]) -> Array:
        table = table_of(values, self.model.components.shape[1], self.takes)
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
        return [1] * self.model.components.shape[1]


def open_svd(path: Path) -> SvdPredictor:
    """That of a run of `train svd`, or of a file of its model."""
    return SvdPredictor(SvdModel.load(path))


def export_svd(asked: ExportAsked) -> Export:
    """A decomposition is one safetensors file already."""
    raise UserError(f"{asked.run} holds a decomposition, which is one file already: {asked.own(SVD_FILE)}")
