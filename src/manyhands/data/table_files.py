"""Tables of any size, read forward as blocks of rows: CSV (plain or gzip), Parquet, Arrow tables and DataFrames.

    table = open_table("flights.csv.gz", TableReading(label="delayed"))
    for block in table.blocks(1 << 24):
        learn(block.rows, block.labels)                                # numbers, and NaN where a value is missing
    table.encoded(encoding_of_a_model, labelled=False)                 # the same rows, as that model takes them

Columns are numbers or texts; a value that is neither, or not what its column holds, is wrong. Needs pyarrow.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import DataFile
from manyhands.data.matrix_files import (
    BLOCK_BYTES,
    LibsvmMatrix,
    MatrixBlock,
    MatrixFile,
    NpyMatrix,
    OnBytes,
)
from manyhands.data.table_batches import (
    NUMBER,
    SKIP,
    SUBSTITUTE,
    TEXT,
    CsvBatches,
    FrameBatches,
    ParquetBatches,
    TableBatches,
    as_text,
    codes_of,
    is_written_number,
    numbers_of,
)
from manyhands.data.table_encoding import TableEncoding, unnamed
from manyhands.errors import DataError, UserError, nearest

_log = logging.getLogger("manyhands")
LABEL_NAMES: Final = ("label", "target", "y")
_MOST_TEXTS: Final = (1 << 20) - 1  # of a column
_MAGIC: Final = {b"\x93NUMPY": "npy", b"PAR1": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReading:
    """What of a table is read, and as what."""

    label: str | None = None  # the column of labels: a name, or a number from 0; -1 is the last
    labelled: bool = (
        True  # whether rows must have labels: in the column called label, target or y if in no other
    )
    categorical: tuple[str, ...] = ()
    """Columns that are text, even where they look like numbers: names, or numbers of features from 0."""
    drop: tuple[str, ...] = ()  # columns that are not read
    skip_bad: bool = False  # leave out rows that are wrong and count them, instead of refusing the table
    finite: bool = False  # whether a row with an infinite number is wrong
    complete: bool = False  # whether a row with a missing value is wrong
    labels: tuple[float | str, ...] = ()  # those of a model: another is wrong; none, where any is right


def is_frame(data: Any) -> bool:
    """Whether it is a table in memory: a DataFrame of pandas or polars, or an Arrow table."""
    return hasattr(data, "__arrow_c_stream__") or (hasattr(data, "iloc") and hasattr(data, "columns"))


def file_kind(path: Path | str) -> str:
    """`npy`, `parquet`, `csv` or `text` (LIBSVM or Vowpal Wabbit), by the file's ending or else its first bytes."""
    path, text = Path(path), str(path).lower()
    if text.removesuffix(".gz").endswith((".csv", ".tsv")):
        return "csv"
    if text == "-" or path.suffix.lower() in (".npy", ".parquet"):
        return path.suffix[1:].lower() or "text"
    with DataFile(path) as file:
        head, is_gzip = bytes(file.up_to(1 << 12)), file.is_gzip
    if not head and not is_gzip:
        raise DataError(f"{path} is empty; give a table as CSV, LIBSVM text, npy or Parquet")
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    if kind is not None and is_gzip:
        raise DataError(f"{path} is compressed by gzip and cannot be mapped; gunzip it first")
    line = head.strip().partition(b"\n")[0]
    is_csv = any(sign in line for sign in (b",", b";", b"\t")) and b":" not in line and b"|" not in line
    return kind or ("csv" if is_csv else "text")


def open_matrix(data: Any, label: str | None = None, reading: TableReading | None = None) -> MatrixFile:
    """A file or a table in memory; nothing but its head is read yet, and the columns of text.

    `label` is the column that holds labels: a name, or a number (-1 is the last). LIBSVM has its own.
    """
    reading = replace(reading or TableReading(labelled=label is not None), label=label)
    if is_frame(data):
        return open_table(data, reading)
    path = Path(data)
    kind = file_kind(path)
    if kind not in ("npy", "text"):
        return open_table(path, reading)
    refuse_columns(reading, path)
    if kind == "npy":
        return NpyMatrix(path, label)
    if label is not None:
        raise UserError(
            f"label={label!r}: {path} is LIBSVM text, whose labels come first in each line; leave it out"
        )
    return LibsvmMatrix(path, skip_bad=reading.skip_bad)


def open_table(data: Any, reading: TableReading | None = None, *, scanned: bool = True) -> TableMatrix:
    """A CSV or Parquet file, or a table in memory.

    Where it has columns of text these are read once, unless it is not `scanned`: then all columns are numbers, until
    it is `encoded` as a model has it, with the labels of the model.
    """
    reading = reading or TableReading()
    try:
        import pyarrow  # noqa: F401 - whether there is one
    except ImportError:
        what = "a table in memory" if is_frame(data) else f"{data} is a table, which"
        raise UserError(f"{what} needs pyarrow: pip install 'manyhands[tables]'") from None
    batches: TableBatches
    if is_frame(data):
        batches = FrameBatches(data)
    elif file_kind(data) == "parquet":
        batches = ParquetBatches(Path(data))
    else:
        batches = CsvBatches(Path(data))
    twice = next((name for name in batches.names if batches.names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{batches.path} has two columns called {twice!r}; give each a name of its own")
    return TableMatrix(batches, _found_encoding(batches, reading, scanned=scanned), reading)


def refuse_columns(reading: TableReading, where: Any, *, categorical: bool = True) -> None:
    """UserError for columns that are named of what is no table; `categorical` ones may have a meaning elsewhere."""
    asked = {"drop": reading.drop, "categorical": reading.categorical if categorical else ()}
    for option, columns in asked.items():
        if columns:
            raise UserError(
                f"{option}={','.join(columns)!r}: {where} is no table (CSV, Parquet, a DataFrame); leave it out"
            )


class TableMatrix(MatrixFile):
    """Rows as an `encoding` has them: texts are the numbers of their categories, what is missing is NaN."""

    columns: int
    encoding: TableEncoding

    def __init__(self, batches: TableBatches, encoding: TableEncoding, reading: TableReading) -> None:
        names = tuple(one for one in reading.labels if isinstance(one, str))
        if reading.labels:
            encoding = replace(encoding, classes=names)
        self._known = np.array([] if names else reading.labels, np.float64)  # labels that are numbers
        self.encoding, self.reading, self._batches = encoding, reading, batches
        self.path, self.rows, self.names = batches.path, batches.rows, encoding.names
        self.columns, self.label = len(encoding.names), encoding.label
        self.new_texts = 0  # values of the last reading that are no category of the encoding
        self._places = _places(batches, encoding)
        features, kind = self._places[: self.columns], np.dtype(np.float64)
        self._dtype = np.dtype(np.float32) if all(batches.is_single[name] for name in features) else kind
        # The texts of each column that has some, the label's last
        self._texts = [*map(encoding.categories.get, encoding.names), encoding.classes or None]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Of the columns of the table, whether they are read or not."""
        return self._batches.names

    @property
    def is_named(self) -> bool:
        return self._batches.is_named

    def encoded(
        self, encoding: TableEncoding, *, labelled: bool, labels: Sequence[float | str] = ()
    ) -> TableMatrix:
        """The same table as another encoding has it, such as that of a model, and with its `labels`.

        DataError names a missing column.
        """
        if not labelled:
            encoding = replace(encoding, label=None)
        reading = replace(self.reading, labelled=labelled, labels=tuple(labels))
        return TableMatrix(self._batches, encoding, reading)

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        for name in self._places:
            kind = self._batches.kinds[name]
            if kind not in (NUMBER, TEXT):
                raise DataError(
                    f"{self.path}: column {name!r} is {kind}, neither numbers nor text; leave it out with --drop {name}"
                )
        self.left_out = self.new_texts = seen = begin = 0
        count = max(1, block_bytes // (self.columns * self._dtype.itemsize))
        for batch in self._batches.read(self._places, count, skip_bad=self.reading.skip_bad):
            block = self._block(batch, seen, begin)
            seen += len(batch)
            begin += len(block)
            self.left_out = seen - begin + len(self._batches.ragged)
            if len(block):
                yield block
            if on_bytes is not None:
                on_bytes(len(batch) * self.columns * self._dtype.itemsize)
        if self.rows not in (None, seen):
            raise DataError(
                f"{self.path} is damaged: its header announces {self.rows} rows, but it has {seen}"
            )
        if not begin:
            raise DataError(f"{self.path} has no rows that can be used; give at least one")

    def _block(self, batch: Any, seen: int, begin: int) -> MatrixBlock:
        values = np.empty((len(batch), self.columns), self._dtype)
        labels: NDArray[np.float64] | None = None
        is_bad, is_new = np.zeros(len(batch), bool), np.zeros(len(batch), np.int64)
        first: tuple[int, int | None] = len(batch), None  # the first row that is wrong, and the column
        for place in range(len(self._places)):
            column, texts = batch.column(place), self._texts[place]
            found, wrong = numbers_of(column) if texts is None else codes_of(column, texts)
            if place == self.columns:
                labels, wrong = found, wrong | ~np.isfinite(found)
                if len(self._known):
                    wrong = wrong | ~np.isin(found, self._known)
            else:
                values[:, place] = found
                if self.reading.finite or self.reading.complete:
                    wrong = wrong | np.isinf(found) | (np.isnan(found) & self.reading.complete)
                if texts is not None:
                    is_new += np.isnan(found) & column.is_valid().to_numpy(zero_copy_only=False)
            if wrong.any() and int(np.argmax(wrong)) < first[0]:
                first = int(np.argmax(wrong)), place
            is_bad |= wrong
        self.new_texts += int(is_new[~is_bad].sum())
        if first[1] is None:
            return MatrixBlock(begin=begin, rows=values, labels=labels)
        if not self.reading.skip_bad:
            raise self._error(batch, first[0], first[1], seen)
        kept = ~is_bad
        return MatrixBlock(begin=begin, rows=values[kept], labels=None if labels is None else labels[kept])

    def _error(self, batch: Any, at: int, place: int, seen: int) -> DataError:
        row, value = seen + at + 1, batch.column(place)[at].as_py()
        for ragged in sorted(self._batches.ragged):
            row += ragged <= row
        known: Sequence[str] = self._texts[place] or ()
        if place == self.columns and len(self._known):
            known = [f"{one:g}" for one in self._known]
        problem = _problem(value, "label" if place == self.columns else "value", known)
        return DataError(f"{self.path}, row {row}, column {self._places[place]!r}: {problem}")


class SparseTable(MatrixFile):
    """A table as linear models take it: every category is a feature of its own, and what is missing is left out."""

    encoding: TableEncoding

    def __init__(self, table: TableMatrix | NpyMatrix) -> None:
        self.table, self.path, self.rows = table, table.path, table.rows
        if isinstance(table, TableMatrix):
            self.encoding = table.encoding
        else:
            at = table.label or 0
            self.encoding = TableEncoding(names=unnamed(table.columns), label_index=at, is_named=False)
        self.columns = int(self.encoding.firsts[-1])

    def blocks(
        self, block_bytes: int = BLOCK_BYTES, on_bytes: OnBytes | None = None
    ) -> Iterator[MatrixBlock]:
        for block in self.table.blocks(block_bytes, on_bytes):
            rows = self.encoding.sparse(np.asarray(block.rows), block.labels, str(self.path), block.begin)
            yield MatrixBlock(begin=block.begin, rows=rows, labels=block.labels)
        self.left_out = self.table.left_out


def _problem(value: Any, what: str, known: Sequence[str]) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return f"the {what} is missing; {SKIP}"
    if isinstance(value, bytes):
        value = value.decode()
        if SUBSTITUTE in value:
            shown = value.replace(SUBSTITUTE, "\ufffd")[:40]
            return (
                f"{shown!r} is not UTF-8 text; save the file as UTF-8, or leave such rows out with --skip-bad"
            )
    if known:
        shown = ", ".join(known[:5]) + ", …" * (len(known) > 5)
        return f"the {what} {str(value)[:40]!r} is new; those of training are {shown}; {SKIP}"
    return f"{str(value)[:40]!r} is not a {'finite ' * is_written_number(str(value))}number; {SKIP}"


def _found_encoding(batches: TableBatches, reading: TableReading, *, scanned: bool) -> TableEncoding:
    """That of a table of which nothing is known yet; what its texts are is found where it is `scanned`."""
    where, known = batches.path, batches.names
    for name in reading.drop:
        if name not in known or not batches.is_named:
            names_allowed = nearest(name, known) if batches.is_named else "it has no header"
            raise DataError(f"drop: {where} has no column {name!r}; {names_allowed}")
    label = _label_name(batches, reading)
    names = [name for name in known if name != label and name not in reading.drop]
    if batches.rows == 0 or not names:
        raise DataError(
            f"{where} has {batches.rows} rows and {len(names)} columns; give at least one of each"
        )
    read = [name for name in known if name in (*names, label)]
    texts = _texts(batches, read, _categorical(batches, names, reading), reading) if scanned else {}
    return TableEncoding(
        names=tuple(names) if batches.is_named else unnamed(len(names)),
        categories={
            short: texts[name]
            for name, short in zip(names, names if batches.is_named else unnamed(len(names)), strict=True)
            if name in texts
        },
        label=label,
        classes=texts.get(label, ()) if label is not None else (),
        label_index=0 if label is None else read.index(label),
        is_named=batches.is_named,
    )


def _label_name(batches: TableBatches, reading: TableReading) -> str | None:
    """The column that is named, numbered or usually called so; of a table without names, the first."""
    known, label = batches.names, reading.label
    if label is not None:
        if label in known:
            return label
        with suppress(ValueError, IndexError):
            return known[int(label)]
        raise DataError(f"{batches.path} has no column {label!r}; {nearest(label, known)}")
    if not reading.labelled:
        return None
    found = next((name for name in LABEL_NAMES if name in known), None if batches.is_named else known[0])
    if found is None:
        some = ", ".join(map(repr, known[:8])) + ", …" * (len(known) > 8)
        raise DataError(
            f"{batches.path} has no column called label, target or y; name the column of labels with --target: {some}"
        )
    return found


def _categorical(batches: TableBatches, names: Sequence[str], reading: TableReading) -> set[str]:
    """The columns that are asked to be text: by name, or by number among those of features."""
    found = set()
    for one in reading.categorical:
        if one in names and batches.is_named:
            found.add(one)
        elif one.isdecimal() and len(one) < 19 and int(one) < len(names):
            found.add(names[int(one)])
        else:
            called = f"names {', '.join(names[:5])}, … or " if batches.is_named else ""
            raise UserError(f"categorical={one!r}: no such column; use {called}numbers 0 to {len(names) - 1}")
    return found


def _texts(
    batches: TableBatches, names: Sequence[str], asked: set[str], reading: TableReading
) -> dict[str, tuple[str, ...]]:
    """The texts of every column of text, sorted; a pass over these columns, where there are any."""
    for name in [one for one in names if one in batches.doubts and one not in asked]:
        doubt, where = batches.doubts[name], f"{batches.path}: column {name!r}"
        if "," in doubt:
            raise DataError(
                f"{where} has numbers with commas, such as {doubt[:40]!r}; write a point before decimals and nothing "
                f"between thousands, or make it text with --categorical {name}"
            )
        _log.warning(
            "manyhands: %s is text: more than one value in ten is not a number, such as %r", where, doubt[:40]
        )
    found: dict[str, set[str]] = {
        name: set() for name in names if batches.kinds[name] == TEXT or name in asked
    }
    if found:
        for batch in batches.read(list(found), 1 << 16, skip_bad=reading.skip_bad):
            for place, (name, texts) in enumerate(found.items()):
                texts.update(as_text(batch.column(place))[0].drop_null().unique().to_pylist())
                if len(texts) > _MOST_TEXTS:
                    raise DataError(
                        f"{batches.path}: column {name!r} has more than {_MOST_TEXTS:,} different texts; leave it out "
                        f"with --drop {name}"
                    )
    return {name: tuple(sorted(texts)) for name, texts in found.items()}


def _places(batches: TableBatches, encoding: TableEncoding) -> list[str]:
    """The columns that an encoding asks for, in its order, the label last; DataError where one is missing."""
    known, where, wanted = batches.names, batches.path, encoding.names
    labels = [] if encoding.label is None else [encoding.label]
    if encoding.is_named:
        missing = next((name for name in (*wanted, *labels) if name not in known), None)
        if missing is not None:
            raise DataError(f"{where} lacks the model's column {missing!r}; {nearest(missing, list(known))}")
        return [*wanted, *labels]
    at = encoding.label_index
    if len(known) == len(wanted) + 1:
        return [*known[:at], *known[at + 1 :], *([known[at]] if labels else [])]
    if len(known) != len(wanted) or labels:
        raise DataError(
            f"{where} has {len(known)} columns; the model was trained on {len(wanted)} and a label"
        )
    return list(known)
