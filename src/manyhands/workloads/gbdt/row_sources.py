"""Where rows come from: text of sparse rows, npy, tables (CSV, Parquet, DataFrames), two sets inside scikit-learn.

A source is gone through block by block, and twice: first for the bounds of bins, then for the bins themselves. So only
text, and never the values of a whole table, has to be parsed again, and a file may be larger than memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import bundled_file
from manyhands.data.matrix_files import NpyMatrix
from manyhands.data.row_files import Reading, RowFile, Rows
from manyhands.data.table_encoding import TableEncoding, unnamed
from manyhands.data.table_files import (
    LABEL_NAMES,
    TableMatrix,
    TableReading,
    file_kind,
    is_frame,
    open_table,
    refuse_columns,
)
from manyhands.errors import DataError, UserError, nearest
from manyhands.workloads.logreg.labels import NO_LABELS, Labels

_BLOCK_ROWS = 1 << 16
_OF_CELLS = (
    *("radius", "texture", "perimeter", "area", "smoothness"),
    *("compactness", "concavity", "concave_points", "symmetry", "fractal_dimension"),
)
_OF_PATIENTS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBlock:
    """Some rows: `dense` values, or sparse ones; `labels` are None where the source has none."""

    labels: NDArray[np.float64] | None
    weights: NDArray[np.float64] | None = None
    dense: NDArray[Any] | None = None
    sparse: Rows | None = None

    def __len__(self) -> int:
        return len(self.sparse) if self.sparse is not None else len(self.values)

    @property
    def values(self) -> NDArray[Any]:
        assert self.dense is not None, "a block is dense or sparse"
        return self.dense

    @property
    def columns(self) -> int:
        return self.sparse.size if self.sparse is not None else int(self.values.shape[1])

    def for_columns(self, columns: int, label: int) -> RowBlock:
        """As a model of so many columns takes it: a dense table with one more has its labels in column `label`."""
        if self.sparse is not None or self.labels is not None or self.values.shape[1] != columns + 1:
            return self
        return RowBlock(labels=None, weights=self.weights, dense=np.delete(self.values, label, axis=1))

    def take(self, chosen: NDArray[np.bool_]) -> RowBlock:
        labels, weights = (None if one is None else one[chosen] for one in (self.labels, self.weights))
        if self.sparse is None:
            return RowBlock(labels=labels, weights=weights, dense=self.values[chosen])
        rows, lengths = self.sparse, np.diff(self.sparse.starts)
        entries, span = np.repeat(chosen, lengths), slice(rows.starts[0], rows.starts[-1])
        picked = Rows(
            starts=np.cumsum([0, *lengths[chosen]]).astype(np.int64),
            indices=rows.indices[span][entries],
            values=rows.values[span][entries],
            labels=rows.labels[chosen],
            weights=rows.weights[chosen],
            size=rows.size,
        )
        return RowBlock(labels=labels, weights=weights, sparse=picked)


class RowSource(ABC):
    """Rows that can be gone through again and again, but for stdin; `name` is what messages call it."""

    name: str
    names: Sequence[str] | None = None  # what the columns of features are called, where the source says
    is_read_once: bool = False  # whether rows that were gone through are gone, as those of stdin
    label_index: int = 0  # which column of the file has the labels, where one has
    label_names: Sequence[str] | None = None
    """What label 0, 1, … of blocks means, where labels are names; more may come while blocks are gone through."""
    encoding: TableEncoding | None = None
    """Of a table with columns of text: a model keeps it for rows to predict."""
    left_out: int = 0  # rows of the last reading that were wrong and skipped
    new_texts: int = 0  # values of the last reading that are no category of the encoding: as if missing

    @abstractmethod
    def blocks(self, on_rows: Callable[[int], None] | None = None) -> Iterator[RowBlock]:
        """All rows, in order; DataError says what is wrong with the file."""

    def for_names(
        self,
        names: Sequence[str] | None,  # noqa: ARG002 - text has none
        encoding: TableEncoding | None = None,  # noqa: ARG002
        labels: Labels = NO_LABELS,  # noqa: ARG002 - `Labels.targets` finds others
    ) -> RowSource:
        """The same rows with the columns of these names, in this order; itself where one of both has no names.

        Where a model has an `encoding`, that says the columns; where it has `labels`, a row of a table with another is
        wrong. DataError names a column that is missing.
        """
        return self


def model_names(names: Sequence[str], where: str) -> list[str]:
    """Names as a model file has them: without blanks, which it has between them. DataError where two are the same."""
    found: dict[str, str] = {}
    for at, name in enumerate(names):
        short = "_".join(name.split()) or f"Column_{at}"
        if short in found:
            both = f"columns {found[short]!r} and {name!r}"
            raise DataError(f"{where}: {both} are both written as {short!r} in a model file; rename one")
        found[short] = name
    return list(found)


def _places(wanted: Sequence[str], found: Sequence[str], where: str) -> list[int] | None:
    """Where the columns that are wanted are among those found; None where those wanted have no names of their own."""
    known = {name: at for at, name in enumerate(model_names(found, where))}
    names = model_names(wanted, "the model")
    missing = next((name for name in names if name not in known), None)
    if missing is None:
        return [known[name] for name in names]
    if tuple(names) == unnamed(len(names)):
        return None
    raise DataError(f"{where} lacks the model's column {missing!r}; {nearest(missing, list(known))}")


class ArraySource(RowSource):
    """A table in memory or mapped: features, and labels beside them."""

    def __init__(
        self,
        values: NDArray[Any],
        labels: NDArray[Any] | None = None,
        *,
        name: str = "the table",
        names: Sequence[str] | None = None,
        weights: NDArray[Any] | None = None,
    ) -> None:
        if values.ndim != 2 or not len(values):
            raise DataError(f"{name} has shape {values.shape}; a table needs columns and at least one row")
        if values.dtype.kind not in "fiub":
            raise DataError(f"{name} holds {values.dtype}; a table must hold numbers")
        for what, given in (("labels", labels), ("weights", weights)):
            if given is not None and given.shape != (len(values),):
                raise DataError(f"{name} has {len(values)} rows, but its {what} have shape {given.shape}")
        if weights is not None and not (((weights >= 0) & (weights < np.inf)).all() and weights.any()):
            raise DataError(f"the weights of {name} must be numbers of at least 0, not all 0")
        self.name, self.names = name, names
        self._values, self._labels, self._weights = values, labels, weights

    def blocks(self, on_rows: Callable[[int], None] | None = None) -> Iterator[RowBlock]:
        for begin in range(0, len(self._values), _BLOCK_ROWS):
            span = slice(begin, begin + _BLOCK_ROWS)
            values, besides = self._values[span], (self._labels, self._weights)
            labels, weights = (None if one is None else one[span] for one in besides)
            if values.dtype not in (np.float32, np.float64):
                values = values.astype(np.float64)
            yield _block(values, labels, weights, on_rows)

    def for_names(
        self,
        names: Sequence[str] | None,
        encoding: TableEncoding | None = None,  # noqa: ARG002 - these are numbers
        labels: Labels = NO_LABELS,  # noqa: ARG002
    ) -> RowSource:
        places = _places(names, self.names, self.name) if names and self.names else None
        if places is None or places == list(range(self._values.shape[1])):
            return self
        kept: Any = {"names": names, "weights": self._weights}
        return ArraySource(self._values[:, places], self._labels, name=self.name, **kept)


def _block(
    values: NDArray[Any],
    labels: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    on_rows: Callable[[int], None] | None,
) -> RowBlock:
    if on_rows is not None:
        on_rows(len(values))
    if not values.flags.writeable:  # compiled code is made for arrays that are
        values = values.copy()
    labels, weights = (None if one is None else np.asarray(one, np.float64) for one in (labels, weights))
    return RowBlock(labels=labels, dense=values, weights=weights)


class _TextSource(RowSource):
    def __init__(self, path: str, reading: Reading) -> None:
        self.name, self._path, self._reading = path, path, reading
        self.is_read_once = path == "-"

    def blocks(self, on_rows: Callable[[int], None] | None = None) -> Iterator[RowBlock]:
        file = RowFile(self._path, self._reading)
        for rows in file.blocks():
            if on_rows is not None:
                on_rows(len(rows))
            labels = None if np.isnan(rows.labels).all() else rows.labels.astype(np.float64)
            weights = None if (rows.weights == 1).all() else rows.weights.astype(np.float64)
            yield RowBlock(labels=labels, weights=weights, sparse=rows)
        self.left_out = file.bad_lines


class _NpySource(RowSource):
    def __init__(self, matrix: NpyMatrix) -> None:
        self.name, self._matrix, self.label_index = str(matrix.path), matrix, matrix.label or 0

    def blocks(self, on_rows: Callable[[int], None] | None = None) -> Iterator[RowBlock]:
        for block in self._matrix.blocks():
            yield _block(np.asarray(block.rows), block.labels, None, on_rows)


class _TableSource(RowSource):
    def __init__(self, table: TableMatrix) -> None:
        found = table.encoding
        self.name, self.names, self._table = str(table.path), found.names if found.is_named else None, table
        self.encoding = found if found.categories else None
        self.label_names, self.label_index = found.classes or None, found.label_index

    def blocks(self, on_rows: Callable[[int], None] | None = None) -> Iterator[RowBlock]:
        for block in self._table.blocks():
            yield _block(np.asarray(block.rows), block.labels, None, on_rows)
        self.left_out, self.new_texts = self._table.left_out, self._table.new_texts

    def for_names(
        self,
        names: Sequence[str] | None,
        encoding: TableEncoding | None = None,
        labels: Labels = NO_LABELS,
    ) -> RowSource:
        """Columns that are not named are not read; all are numbers where no encoding says that they are texts."""
        table, own = self._table, self._table.encoding
        is_labelled = own.label is not None
        if encoding is not None:
            encoding = replace(encoding, label=own.label, classes=own.classes)
            return _TableSource(table.encoded(encoding, labelled=is_labelled, labels=labels))
        if names is None or not own.is_named:
            return _TableSource(table.encoded(own, labelled=is_labelled, labels=labels)) if labels else self
        found = [name for name in table.all_names if name != own.label]
        places = _places(names, found, self.name)
        if places is None:  # a model without names takes columns by their places
            rest = [name for name in found if name not in LABEL_NAMES]
            found = rest if own.label is None and len(rest) == len(names) else found
            places = list(range(len(found)))
        asked = replace(own, names=tuple(found[at] for at in places), categories={})
        return _TableSource(table.encoded(asked, labelled=is_labelled, labels=labels))


def _breast_cancer() -> RowSource:
    file = bundled_file("breast_cancer.csv", "the rows of breast-cancer")
    if file is None:
        from sklearn.datasets import load_breast_cancer

        values, labels = load_breast_cancer(return_X_y=True)
    else:
        table = np.loadtxt(file, delimiter=",", skiprows=1)  # the first line says how many there are
        values, labels = table[:, :-1], table[:, -1].astype(np.int64)
    names = [way.format(one) for way in ("mean_{}", "{}_error", "worst_{}") for one in _OF_CELLS]
    return ArraySource(values, labels, name="breast-cancer", names=names)


def _diabetes() -> RowSource:
    named = ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
    files = [bundled_file(name, "the rows of diabetes") for name in named]
    if None in files:
        from sklearn.datasets import load_diabetes

        values, labels = load_diabetes(return_X_y=True, scaled=False)
    else:
        values, labels = (np.loadtxt(file) for file in files if file is not None)
    return ArraySource(values, labels, name="diabetes", names=list(_OF_PATIENTS))


EMBEDDED: dict[str, Callable[[], RowSource]] = {"breast-cancer": _breast_cancer, "diabetes": _diabetes}
"""Tables that come inside scikit-learn: 569 rows of two labels, and 442 rows of a number."""


def open_source(
    data: Any,
    reading: Reading | None = None,
    label: str | None = None,
    *,
    labelled: bool = True,
    scanned: bool = True,
    table: TableReading | None = None,
) -> RowSource:
    """The rows of a file, by its ending or its first bytes, of a DataFrame, or of one of `EMBEDDED` by its name.

    `label` is the column of the labels in npy files and tables: a number from 0, or a name; usually column 0 of npy,
    and one called label, target or y. Where rows are to be predicted, `labelled` may be False: without a `label`, no
    column is one then. `table` says what else of a table is read. A table that is not `scanned` is read as a model has
    it, by `for_names`: what texts it has is not looked at.
    """
    asked = replace(table or TableReading(), label=label, labelled=labelled or label is not None)
    scanned = scanned and asked.labelled
    if is_frame(data):
        return _TableSource(open_table(data, asked, scanned=scanned))
    text = str(data)
    if text in EMBEDDED and not Path(text).exists():
        refuse_columns(asked, text, categorical=False)
        return EMBEDDED[text]()
    if text != "-" and not Path(text).is_file():
        hint = "" if Path(text).suffix or "/" in text else f"; embedded: {', '.join(EMBEDDED)}"
        raise UserError(f"{text} cannot be read: no such file{hint}")
    kind = file_kind(text)
    if kind not in ("npy", "text"):
        return _TableSource(open_table(text, asked, scanned=scanned))
    refuse_columns(asked, text, categorical=False)
    if kind == "npy":
        return _NpySource(NpyMatrix(Path(text), "0" if label is None and labelled else label))
    if label is not None:
        raise UserError(f"label={label!r}: in text files the label is the first word of a line; leave it out")
    return _TextSource(text, reading or Reading())
