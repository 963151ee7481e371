"""Tables as examples of a logistic regression: CSV, Parquet and npy files, and DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.data.matrix_files import NpyMatrix
from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.data.table_encoding import TableEncoding
from manyhands.data.table_files import (
    SparseTable,
    TableMatrix,
    TableReading,
    file_kind,
    is_frame,
    open_table,
    refuse_columns,
)
from manyhands.errors import DataError, UserError


class ExampleTable(RowFile):
    """The rows of a table as examples: a feature for each column of numbers, and for each category of the others."""

    def __init__(self, table: SparseTable, reading: Reading | None = None) -> None:
        super().__init__(table.path, reading)
        self.encoding, self._table, self.new_texts = table.encoding, table, 0
        self.label_names = table.encoding.classes or None

    def blocks(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[Rows]:
        for block in self._table.blocks(self.reading.block_bytes, on_bytes):
            assert isinstance(block.rows, Rows), "it is sparse"
            yield block.rows
        self.bad_lines, table = self._table.left_out, self._table.table
        self.new_texts = table.new_texts if isinstance(table, TableMatrix) else 0


def open_examples(
    data: Any,
    reading: Reading | None = None,
    table: TableReading | None = None,
    encoding: TableEncoding | None = None,
) -> RowFile:
    """The examples of a file (LIBSVM, Vowpal Wabbit, CSV, Parquet, npy) or of a DataFrame; `-` is stdin.

    A table is read as `table` says; where a model has an `encoding`, as that has it.
    """
    reading = reading or Reading()
    asked = replace(table or TableReading(), skip_bad=reading.skip_bad, finite=True)
    kind = "frame" if is_frame(data) else file_kind(data) if reading.format == "auto" else "text"
    if kind in ("npy", "text"):
        refuse_columns(asked, data)
    if kind == "text":
        if asked.label is not None:
            raise UserError(
                f"label={asked.label!r}: in text files the label is the first word of a line; leave it out"
            )
        return RowFile(data, reading)
    if reading.bits is not None:
        raise UserError(f"bits={reading.bits}: the columns of a table are not hashed; leave it out")
    if kind == "npy":
        return ExampleTable(SparseTable(_npy(Path(data), asked, encoding)), reading)
    if encoding is None:
        return ExampleTable(SparseTable(open_table(data, asked)), reading)
    found = open_table(data, asked, scanned=False)
    if asked.labelled:
        encoding = replace(encoding, label=found.encoding.label)
    rows = found.encoded(encoding, labelled=asked.labelled, labels=asked.labels)
    return ExampleTable(SparseTable(rows), reading)


def _npy(path: Path, asked: TableReading, encoding: TableEncoding | None) -> NpyMatrix:
    at = str(encoding.label_index if encoding is not None else 0)
    file = NpyMatrix(path, (asked.label or at) if asked.labelled else None)
    if encoding is None or file.columns == len(encoding.names):
        return file
    if not asked.labelled and file.columns == len(encoding.names) + 1:
        return NpyMatrix(path, at)
    raise DataError(f"{path} has {file.columns} columns; the model was trained on {len(encoding.names)}")
