"""Documents of text files, in pieces of a bounded size: plain text and JSON lines, both also as gzip.

A plain file is one document, or has one in each line, or in each paragraph (lines between empty ones). A line of a file
whose name ends with .jsonl, plain or .gz, is a JSON object; one of its fields holds the text, or a list of texts that
are a document each. Documents without a character that is not white space are left out.

A document longer than a piece is cut before a space between two words, where tokens begin anyhow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from manyhands.data.file_reader import DataFile
from manyhands.errors import DataError, UserError, format_bytes, nearest
from manyhands.workloads.text.json_text import is_json_lines, json_lines, utf8

SPLITS = ("file", "line", "paragraph")
PIECE_BYTES = 1 << 16
_MOST_PIECE_BYTES = 1 << 20  # without a space to cut at
_MOST_LINE_BYTES = 1 << 26  # of JSON
_READ_BYTES = 1 << 20
_WHITE = b" \t\n\v\f\r"
_CUT = re.compile(rb"(?<=[^ \t\n\v\f\r]) (?=[^ \t\n\v\f\r])")
_DELIMITERS = {"line": re.compile(rb"\r?\n"), "paragraph": re.compile(rb"\r?\n[ \t\r]*\n")}


class TextPiece(NamedTuple):
    """A document or a part of one, as UTF-8."""

    text: bytes
    begins: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of some files, in order; read as often as needed, and in the same pieces each time."""

    paths: Sequence[Path]
    split: str = "file"
    field: str = "text"

    def __post_init__(self) -> None:
        if not self.paths:
            raise UserError("there is no file to read; name at least one")
        if self.split not in SPLITS:
            raise UserError(f"split is {self.split!r}; {nearest(self.split, SPLITS)}")

    def __iter__(self) -> Iterator[TextPiece]:
        for path in self.paths:
            with DataFile(path) as file:
                is_json = is_json_lines(path)
                yield from self._of_json(file) if is_json else _pieces(_parts(file, self.split), str(path))

    def _of_json(self, file: DataFile) -> Iterator[TextPiece]:
        for number, value in json_lines(_lines(file), file.path):
            where = f"{file.path}, line {number}"
            found = value.get(self.field)
            if found is None:
                raise DataError(f"{where} has no field {self.field!r}; name the field of the text by --field")
            for text in found if isinstance(found, list) else [found]:
                if not isinstance(text, str):
                    raise DataError(f"{where}: {self.field!r} is neither a text nor a list of texts")
                content = utf8(text, f"{where}: {self.field!r}")
                yield from _pieces([(content, True)], where)


def _blocks(file: DataFile) -> Iterator[bytes]:
    """The content, as UTF-8 that is cut between characters."""
    rest = b""
    while True:
        found = file.up_to(_READ_BYTES)
        block = rest + bytes(found)
        begin = file.offset - len(block)
        keep = 0 if not found or block.isascii() else _unfinished(block)
        rest, block = block[len(block) - keep :], block[: len(block) - keep]
        try:
            if not block.isascii():
                block.decode()
        except UnicodeDecodeError as error:
            said = f"not UTF-8 text: {error.reason} (0x{block[error.start]:02x}); convert it, for example with iconv"
            raise file.error(begin + error.start, said) from error
        if block:
            yield block.removeprefix(b"\xef\xbb\xbf") if not begin else block
        if not found:
            return


def _unfinished(block: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for back in range(1, min(4, len(block) + 1)):
        byte = block[-back]
        if byte >= 0xC0:
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return back if needed > back else 0
        if byte < 0x80:
            return 0
    return 0


def _lines(file: DataFile) -> Iterator[bytes]:
    kept = b""
    for block in _blocks(file):
        *whole, kept = (kept + block).split(b"\n")
        yield from whole
        if len(kept) > _MOST_LINE_BYTES:
            raise file.error(file.offset, f"a line is longer than {format_bytes(_MOST_LINE_BYTES)}")
    if kept:
        yield kept


def _parts(file: DataFile, split: str) -> Iterator[tuple[bytes, bool]]:
    """Plain text in parts, each with whether a document ends with it."""
    delimiter, held = _DELIMITERS.get(split), b""
    for block in _blocks(file):
        if delimiter is None:
            yield block, False
            continue
        text = held + block
        size = len(text.rstrip(_WHITE))  # what separates two documents may end in the next block
        text, held = text[:size], text[size:]
        *ended, last = delimiter.split(text)
        yield from ((one, True) for one in ended)
        yield last, False
    yield b"", True


def _pieces(parts: Iterable[tuple[bytes, bool]], where: str) -> Iterator[TextPiece]:
    """The documents of which `parts` come."""
    rest, begins = b"", True
    for part, ends in parts:
        rest += part
        at = 0
        while len(rest) - at > 2 * PIECE_BYTES:
            found = _CUT.search(rest, at + PIECE_BYTES)
            if found is None:
                if len(rest) - at > _MOST_PIECE_BYTES:
                    most = format_bytes(_MOST_PIECE_BYTES)
                    raise DataError(
                        f"{where}: there are {most} of text without a space; try --split line, if this is a text"
                    )
                break
            yield TextPiece(rest[at : found.start()], begins, False)
            at, begins = found.start(), False
        rest = rest[at:]
        if ends:
            if not begins or rest.strip():
                yield TextPiece(rest, begins, True)
            rest, begins = b"", True
