"""Where the rows of a table come from, as record batches of Arrow: CSV, Parquet, DataFrames. Needs pyarrow.

The columns of a CSV file are read as bytes and turned into texts and numbers here, so that a value that is wrong is
found with its row. Whether a column is text or numbers is decided by the first rows: it is text where more than one
value in ten is not a number.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import DataFile
from manyhands.data.matrix_files import AS_SINGLE
from manyhands.data.table_encoding import unnamed
from manyhands.errors import DataError, first_line, format_bytes

NUMBER: Final = "number"
TEXT: Final = "text"
SKIP: Final = "correct it, or leave such rows out with --skip-bad"
_TEXT_SHARE: Final = 0.1  # of values that are not numbers, from which on a column of CSV is text
_HEAD_BYTES: Final = 1 << 20
_CSV_BLOCK: Final = 1 << 20  # no row is longer; pyarrow takes some forty times this memory
_LINES: Final = 16  # that a block holds at least, of the length of the first
SUBSTITUTE: Final = (
    "\x1a"  # ASCII's substitute: in place of a byte that is no UTF-8, of which pyarrow says no row
)
_IN_PLACE: Final = "manyhands-substitute"
codecs.register_error(_IN_PLACE, lambda error: (SUBSTITUTE * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def as_text(column: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Texts, and which of them were not UTF-8: null, then."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_dictionary(column.type):
        texts = column.dictionary.cast(pyarrow.string()).take(column.indices)
    else:
        texts = column.cast(pyarrow.string())
    if not pyarrow.types.is_binary(column.type):  # as those of CSV are
        return texts, np.zeros(len(column), bool)
    bad = compute.match_substring(texts, SUBSTITUTE).fill_null(False)
    if bad.true_count:
        texts = compute.if_else(bad, pyarrow.scalar(None, pyarrow.string()), texts)
    return texts, bad.to_numpy(zero_copy_only=False)


def codes_of(column: Any, texts: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The places of texts among `texts`, NaN for missing and new ones; and which are not UTF-8."""
    import pyarrow
    from pyarrow import compute

    found, bad = as_text(column)
    codes = compute.index_in(found, value_set=pyarrow.array(texts, pyarrow.string()))
    return codes.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), bad


def numbers_of(column: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers, NaN where one is missing; and which are something else."""
    import pyarrow

    types, bad = pyarrow.types, np.zeros(len(column), bool)
    if not (types.is_binary(column.type) or _is_text(column.type)):
        return column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False), bad
    texts, bad = as_text(column)
    try:
        return texts.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), bad
    except pyarrow.ArrowInvalid:
        found = np.full(len(texts), np.nan)
        for at, one in enumerate(texts.to_pylist()):
            try:
                found[at] = np.nan if one is None else float(one.replace("_", "?"))  # which Python would read
            except ValueError:
                bad[at] = True
        return found, bad


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    whether = (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary)
    return any(one(kind) for one in whether)


class _Utf8(io.BufferedIOBase):
    """The bytes of a file, as many as it has, with `SUBSTITUTE` for each that is no UTF-8."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file, self._kept = file, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        found = ""
        while not found:
            more = self._file.read(size if size is None or size < 0 else max(1, size - len(self._kept)))
            given = self._kept + more
            found, used = codecs.utf_8_decode(given, _IN_PLACE, not more)
            self._kept = given[used:]  # the beginning of a character, of which the rest comes
            if not more:
                break
        return found.encode()


class TableBatches(ABC):
    """Where the rows of a table come from, as record batches of Arrow."""

    path: Path
    rows: int | None = None
    names: tuple[str, ...]
    is_named: bool = True
    kinds: Mapping[str, str]  # by column: number, text, or the name of another type
    is_single: Mapping[str, bool]  # whether single precision holds the values of a column
    doubts: Mapping[str, str]
    """Of columns of text that may be meant to be numbers: a value that is none, or has a comma."""
    ragged: list[int]  # the numbers, from 1, of rows with too many or too few fields that were left out

    @abstractmethod
    def read(self, names: Sequence[str], count: int, *, skip_bad: bool) -> Iterator[Any]:
        """All rows of these columns, in this order, at most `count` rows at a time; DataError says what is wrong."""

    def _describe(self, schema: Any) -> None:
        from pyarrow import types

        self.names, self.doubts, self.ragged = tuple(schema.names), {}, []
        numbers = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
        kinds, single = {}, {}
        for field in schema:
            is_number = any(one(field.type) for one in numbers)
            kinds[field.name] = NUMBER if is_number else TEXT if _is_text(field.type) else str(field.type)
            single[field.name] = _is_text(field.type) or (
                is_number and np.dtype(field.type.to_pandas_dtype()).char in AS_SINGLE
            )
        self.kinds, self.is_single = kinds, single


class ParquetBatches(TableBatches):
    """Those of a Parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.rows = int(file.metadata.num_rows)
            self._describe(file.schema_arrow)

    def _open(self) -> Any:
        from pyarrow import parquet

        with _arrow_errors(f"{self.path} is not a Parquet file that can be read"):
            return parquet.ParquetFile(self.path)

    def read(self, names: Sequence[str], count: int, *, skip_bad: bool) -> Iterator[Any]:  # noqa: ARG002
        with self._open() as file:
            batches = file.iter_batches(count, columns=list(names))
            while True:
                with _arrow_errors(f"{self.path} is not a Parquet file that can be read"):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch.select(names)


class FrameBatches(TableBatches):
    """Those of a table in memory: a DataFrame of pandas or polars, or an Arrow table."""

    def __init__(self, frame: Any) -> None:
        import pyarrow

        self.path = Path("the table")
        if hasattr(frame, "iloc"):
            _check_objects(frame)
            with _arrow_errors("the DataFrame cannot be read"):
                self._table = pyarrow.Table.from_pandas(frame, preserve_index=False)
        else:
            with _arrow_errors("the table cannot be read"):
                self._table = pyarrow.table(frame)
        self.rows = len(self._table)
        self._describe(self._table.schema)

    def read(self, names: Sequence[str], count: int, *, skip_bad: bool) -> Iterator[Any]:  # noqa: ARG002
        yield from self._table.select(names).unify_dictionaries().to_batches(count)


def _check_objects(frame: Any) -> None:
    """Columns of Python objects may be texts or numbers, with None or NaN between them, not both and nothing else."""
    words = {str: "a text", float: "a number", bool: "a truth value"}
    for name, column in zip(frame.columns, (frame.iloc[:, at] for at in range(frame.shape[1])), strict=True):
        if column.dtype != object:
            continue
        kinds = [_kind_of_object(one) for one in column]
        is_missing = column.isna()
        first = next((kind for kind, gone in zip(kinds, is_missing, strict=True) if not gone), str)
        for row, (kind, gone) in enumerate(zip(kinds, is_missing, strict=True), 1):
            if not gone and (kind not in words or kind is not first):
                before = f" after {words[first]}" if kind in words and first in words else ""
                what = words.get(kind, f"an object of type {kind.__name__}")
                raise DataError(
                    f"the table, row {row}, column {str(name)!r} holds {what}{before}; a column must hold texts or "
                    "numbers"
                )


def _kind_of_object(value: Any) -> type:
    if isinstance(value, str | bool | np.bool_):
        return str if isinstance(value, str) else bool
    return float if hasattr(value, "__float__") and not hasattr(value, "__len__") else type(value)


class CsvBatches(TableBatches):
    """Those of a CSV file, plain or gzip; with a header unless its first line has numbers only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with DataFile(path) as file:
            head = bytes(file.up_to(_HEAD_BYTES))
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError(f"{path} is UTF-16 text; save it as UTF-8")
        line = head.replace(b"\r", b"\n").partition(b"\n")[0]
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, row 0 (the header), byte {error.start}: not UTF-8 text; save the file as UTF-8"
            ) from None
        self._block = max(_CSV_BLOCK, _LINES * len(line))
        bare = "".join(text.split('"')[::2])  # without what is quoted
        self._delimiter = max(",;\t", key=bare.count) if ".tsv" not in path.name.lower() else "\t"
        try:
            fields = next(csv.reader([text], delimiter=self._delimiter, strict=True), [])
        except csv.Error as error:  # a quote that is not closed, as of a name of two lines
            raise DataError(f"{path}, row 0 (the header): {error}; write each name in one line") from error
        if not fields:
            raise DataError(
                f"{path} has no header and no rows; the first line of CSV has the names of columns"
            )
        self.is_named = _is_header(fields)
        made = unnamed(len(fields))
        self.names = tuple(one or made[at] for at, one in enumerate(fields)) if self.is_named else made
        self.ragged = []
        self.is_single = dict.fromkeys(self.names, False)
        first = next(self.read(self.names, self._block, skip_bad=True), None)
        if first is None:
            # Where all rows are wrong, this says what is.
            next(self.read(self.names, self._block, skip_bad=False), None)
            raise DataError(f"{path} has a header and no rows; give at least one")
        found = {name: _kind_of(first.column(at)) for at, name in enumerate(self.names)}
        self.kinds = {name: kind for name, (kind, _) in found.items()}
        self.doubts = {name: doubt for name, (_, doubt) in found.items() if doubt is not None}

    def read(self, names: Sequence[str], count: int, *, skip_bad: bool) -> Iterator[Any]:
        import pyarrow
        from pyarrow import csv as arrow_csv

        self.ragged, wrong = [], list[Any]()

        def on_ragged(row: Any) -> str:
            self.ragged.append(row.number - self.is_named)
            wrong.append(row)
            return "skip" if skip_bad and not _is_open(row.text) else "error"

        kinds = dict.fromkeys(self.names, pyarrow.binary())
        with ExitStack() as stack:
            stack.callback(pyarrow.default_memory_pool().release_unused)
            try:
                reader = arrow_csv.open_csv(
                    _opened(self.path, stack),
                    # one thread: others do not know the number of a row
                    arrow_csv.ReadOptions(
                        use_threads=False,
                        block_size=self._block,
                        column_names=list(self.names),
                        skip_rows=int(self.is_named),
                    ),
                    arrow_csv.ParseOptions(
                        delimiter=self._delimiter, newlines_in_values=True, invalid_row_handler=on_ragged
                    ),
                    arrow_csv.ConvertOptions(
                        column_types=kinds, include_columns=list(names), strings_can_be_null=True
                    ),
                )
                for batch in reader:
                    for begin in range(0, len(batch), count):
                        yield batch.slice(begin, count)
            except (OSError, EOFError, ValueError, zlib.error, pyarrow.ArrowException) as error:
                row = wrong[-1] if wrong else None
                if row is not None and _is_open(row.text):
                    raise DataError(
                        f"{self.path}, row {self.ragged[-1]}: a quote is not closed, so the row goes on to the end; "
                        "close it, or double it"
                    ) from None
                if "straddl" in str(error):
                    size = format_bytes(self._block)
                    raise DataError(
                        f"{self.path} has a row of more than {size}, as one whose quote is not closed"
                    ) from None
                if row is None or skip_bad:
                    raise DataError(f"{self.path} cannot be read: {first_line(error)}") from error
                raise DataError(
                    f"{self.path}, row {self.ragged[0]} has {row.actual_columns} fields, but there are "
                    f"{row.expected_columns} columns; {SKIP}"
                ) from None


def _is_open(row: str) -> bool:
    """Whether a row of several lines has a quote without an end: all that follows would be left out with it."""
    return "\n" in row and row.count('"') % 2 == 1


def _opened(path: Path, stack: ExitStack) -> Any:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    opened: io.BufferedIOBase = stack.enter_context(path.open("rb"))
    return _Utf8(stack.enter_context(gzip.GzipFile(fileobj=opened)) if is_gzip else opened)


def _is_header(fields: Sequence[str]) -> bool:
    """Numbers, of which some may be missing, are a row; but 0, 1, 2, … count columns, as pandas writes them."""
    given = [one for one in fields if one]
    if not given or not all(is_written_number(one) for one in given):
        return True
    return len(given) > 2 and given == [str(at) for at in range(len(given))]


def is_written_number(text: str) -> bool:
    with suppress(ValueError):
        float(text.replace("_", "?"))  # which Python would read
        return True
    return False


def _kind_of(column: Any) -> tuple[str, str | None]:
    """What a column holds; of texts a doubt, where most of them are numbers, or are without their commas."""
    from pyarrow import compute

    _, bad = numbers_of(column)
    given = max(1, len(column) - column.null_count)
    if bad.sum() <= _TEXT_SHARE * given:
        return NUMBER, None
    texts, _ = as_text(column)
    if bad.sum() <= given / 2:
        return TEXT, texts[int(np.argmax(bad))].as_py()
    _, still = numbers_of(compute.replace_substring(texts, ",", ""))
    is_comma = still.sum() <= _TEXT_SHARE * given
    return TEXT, texts[int(np.argmax(bad & ~still))].as_py() if is_comma else None


@contextmanager
def _arrow_errors(problem: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, ValueError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(f"{problem}: {first_line(error)}") from error
