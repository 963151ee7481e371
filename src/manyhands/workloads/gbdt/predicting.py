"""Rows to predictions: what boosted trees answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manyhands.data.row_files import FORMATS, Reading
from manyhands.errors import UserError
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.row_sources import RowBlock, open_source
from manyhands.workloads.gbdt.text_format import MODEL_TEXT, read_model
from manyhands.workloads.predictor import Predictor, ReadAs, table_of

__all__ = ["GbdtPredictor", "export_gbdt", "open_gbdt"]


class GbdtPredictor(Predictor[RowBlock]):
    """A number for each row: the prediction, or the probability of the larger label."""

    takes: ClassVar[str] = "an array of numbers, one for each column; null where one is missing"
    formats: ClassVar[tuple[str, ...]] = FORMATS

    def __init__(self, model: GbdtModel) -> None:
        self.model = model

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[RowBlock]:
        """All rows of a LIBSVM, npy or Parquet file, or of a data set inside scikit-learn, without labels."""
        self.check_read_as(read_as)
        reading = Reading(format=read_as.format, threads=read_as.threads)
        model = self.model
        for block in open_source(source, reading, labelled=False).for_names(model.names).blocks():
            yield block.for_columns(model.columns, model.label_index)

    def inputs(self, values: Sequence[Any]) -> RowBlock:
        return RowBlock(labels=None, dense=table_of(values, self.model.columns, self.takes, missing=True))

    def together(self, parts: Sequence[RowBlock]) -> RowBlock:
        return RowBlock(labels=None, dense=np.concatenate([part.values for part in parts]))

    def answers(self, inputs: RowBlock) -> list[Any]:
        return list(self.model.predict(inputs).tolist())

    def lines(self, inputs: RowBlock) -> Iterator[str]:
        return (f"{value:.17g}" for value in self.answers(inputs))

    @property
    def example(self) -> Any:
        return [0] * self.model.columns


def open_gbdt(path: Path) -> GbdtPredictor:
    return GbdtPredictor(read_model(path))


def export_gbdt(asked: ExportAsked) -> Export:
    raise UserError(
        f"{asked.run} holds boosted trees, which are a file already: {asked.own(MODEL_TEXT)}, as LightGBM writes them"
    )
