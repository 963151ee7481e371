"""Texts with a label each, from a table (CSV, TSV) or JSON lines, also as gzip; split by a hash of the text.

Which rows are held out for evaluation follows from each text alone: rows that are added, removed or moved leave the
others where they are, and a text that comes twice is never on both sides.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.data.file_reader import read_text
from manyhands.errors import DataError, UserError, nearest, printable
from manyhands.workloads.text.json_text import is_json_lines, json_lines, utf8


class LabeledRow(NamedTuple):
    """A text, its label, and the line of the file where the row ends."""

    text: str
    label: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LabeledTexts:
    """A file, and which of its columns are read."""

    path: Path
    text: str = "text"
    label: str = "label"

    def rows(self) -> list[LabeledRow]:
        """All of them, in order; a DataError names the line, the column and what is wrong."""
        name = self.path.name.removesuffix(".gz")
        content = read_text(self.path)
        is_json = is_json_lines(self.path)
        found = self._of_json(content) if is_json else self._of_csv(content, tabs=name.endswith(".tsv"))
        rows = [self._row(fields, line) for line, fields in found]
        if not rows:
            raise DataError(f"{self.path} has no rows; give texts with a label each")
        return rows

    def split(self, share: float) -> tuple[list[LabeledRow], list[LabeledRow]]:
        """Those to learn from, and the `share` of them that is held out; DataError where either is none."""
        rows = self.rows()
        held_out = [_position(row.text) < share for row in rows]
        parts = [
            [row for row, out in zip(rows, held_out, strict=True) if out == which] for which in (False, True)
        ]
        if not all(parts):
            raise DataError(
                f"{self.path}: of {len(rows)} rows {len(parts[1])} are held out for evaluation "
                f"(evaluation_share={share:g}); give more rows or another share"
            )
        return parts[0], parts[1]

    def _of_csv(self, content: str, *, tabs: bool) -> Iterator[tuple[int, Mapping[Any, Any]]]:
        reader = csv.DictReader(
            io.StringIO(content, newline=""), delimiter="\t" if tabs else ",", strict=True
        )
        try:
            for name in (self.text, self.label):
                self._require(name, reader.fieldnames or (), 1)
            for fields in reader:
                yield reader.line_num, fields
        except csv.Error as error:
            raise DataError(f"{self.path}, after line {reader.line_num}: {printable(str(error))}") from error

    def _of_json(self, content: str) -> Iterator[tuple[int, Mapping[Any, Any]]]:
        for number, fields in json_lines(content.split("\n"), self.path):
            for name in (self.text, self.label):
                self._require(name, fields, number)
            yield number, fields

    def _require(self, name: str, columns: Any, line: int) -> None:
        if name not in columns:
            raise UserError(
                f"{self.path}, line {line} has no column {name!r}; {nearest(name, [str(one) for one in columns])}"
            )

    def _row(self, fields: Mapping[Any, Any], line: int) -> LabeledRow:
        text, label = fields[self.text], fields[self.label]
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{self.path}, line {line}: {self.text!r} has no text; fill it in or remove the row"
            )
        if type(label) in (int, bool):
            label = str(label)
        if not isinstance(label, str) or not label:
            raise DataError(
                f"{self.path}, line {line}: {self.label!r} has no label; fill it in or remove the row"
            )
        for name, value in ((self.text, text), (self.label, label)):
            utf8(value, f"{self.path}, line {line}: {name!r}")
        return LabeledRow(text, label, line)


def labels_of(rows: list[LabeledRow], known: tuple[str, ...], path: Path) -> list[int]:
    """The number of each row's label; DataError names one that is not among the `known`, and its line."""
    numbers = {label: number for number, label in enumerate(known)}
    for row in rows:
        if row.label not in numbers:
            raise DataError(
                f"{path}, line {row.line}: training never saw the label {printable(repr(row.label))}; "
                f"{nearest(row.label, known)}"
            )
    return [numbers[row.label] for row in rows]


def _position(text: str) -> float:
    """Where a text lies between 0 and 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
