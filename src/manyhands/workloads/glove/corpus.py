"""Text as a stream of blocks that are cut at white space, from plain files, gzip files or memory.

A word is what stands between white space (the six ASCII characters of it), as bytes of UTF-8; nothing is lower-cased or
stripped. A newline ends a context: words of different lines, or of different files, never meet in a window.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from manyhands.data.store.atomic import reason
from manyhands.errors import DataError, UserError

BLOCK_BYTES = 1 << 20
_WHITE = (b" ", b"\n", b"\t", b"\r", b"\v", b"\f")
_LONGEST_WORD = 1 << 24


class Block(NamedTuple):
    """Whole words and the white space between them; `share` of the corpus ends with this block."""

    data: bytes
    share: float


class Corpus:
    """A text to learn from, read as often as needed: files (gzip by the ending .gz) one after the other.

    Reading raises a UserError that names the file and the byte for text that is not UTF-8, for a damaged gzip file, and
    for a corpus without a single word.
    """

    def __init__(self, *paths: Path | str) -> None:
        if not paths:
            raise UserError("a corpus needs at least one file")
        self._sources: tuple[Path | bytes, ...] = tuple(Path(path) for path in paths)

    @classmethod
    def of_text(cls, text: str | bytes) -> Self:
        corpus = cls.__new__(cls)
        corpus._sources = (text.encode() if isinstance(text, str) else bytes(text),)
        return corpus

    def __str__(self) -> str:
        return ", ".join(map(_name, self._sources))

    def check(self) -> None:
        """Raise a DataError now where a file cannot be read, or not twice, before any work is done."""
        for source in self._sources:
            if isinstance(source, Path):
                with _opened(source) as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        why = "is not a regular file, but it is read twice; save it to a file first"
                        raise DataError(f"corpus {source} {why}")

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """The text in blocks of about `block_bytes`, a newline after each file."""
        words, sizes = False, []
        for source in self._sources:
            if isinstance(source, bytes):
                sizes.append(len(source))
            else:
                with _opened(source) as file:
                    sizes.append(os.fstat(file.fileno()).st_size)
        whole, before = max(1, sum(sizes)), 0
        for source, size in zip(self._sources, sizes, strict=True):
            offset = 0
            for data, share in _cut(source, _pieces(source, block_bytes)):
                _check_utf8(source, data, offset)
                offset += len(data)
                words = words or not data.isspace()
                yield Block(data=data, share=min(1.0, (before + share * size) / whole))
            before += size
        if not words:
            raise UserError(f"the corpus is empty: {self} holds no word; give a text with words")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"corpus {path} cannot be read: {reason(error)}") from error


def _pieces(source: Path | bytes, block_bytes: int) -> Iterator[tuple[bytes, float]]:
    """Bytes as they come, each with the share of the source that has been read."""
    if isinstance(source, bytes):
        for start in range(0, len(source), block_bytes):
            yield source[start : start + block_bytes], min(1.0, (start + block_bytes) / len(source))
        return
    with _opened(source) as raw:
        size, offset = max(1, os.fstat(raw.fileno()).st_size), 0
        stream = gzip.GzipFile(fileobj=raw, mode="rb") if source.suffix == ".gz" else raw
        while True:
            try:
                piece = stream.read(block_bytes)
            except EOFError as error:
                raise DataError(f"{source}: the file is truncated: gzip ends early") from error
            except (OSError, zlib.error) as error:
                raise DataError(f"{source}, after byte {offset}: the file is damaged: {error}") from error
            if not piece:
                return
            offset += len(piece)
            yield piece, min(1.0, raw.tell() / size)


def _cut(source: Path | bytes, pieces: Iterator[tuple[bytes, float]]) -> Iterator[tuple[bytes, float]]:
    kept, kept_bytes = list[bytes](), 0
    for piece, share in pieces:
        end = 1 + max(piece.rfind(white) for white in _WHITE)
        if end:
            yield b"".join((*kept, piece[:end])), share
            kept, kept_bytes = [], 0
        kept.append(piece[end:])
        kept_bytes += len(piece) - end
        if kept_bytes > _LONGEST_WORD:
            long = f"a word of more than {_LONGEST_WORD:,} bytes"
            raise DataError(f"{_name(source)} has {long}; is this a text with words between white space?")
    yield b"".join((*kept, b"\n")), 1.0


def _check_utf8(source: Path | bytes, data: bytes, offset: int) -> None:
    """Blocks are cut at ASCII characters, so no character is cut in two."""
    if data.isascii():
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        unit = "uncompressed byte" if isinstance(source, Path) and source.suffix == ".gz" else "byte"
        raise DataError(
            f"{_name(source)} is not UTF-8 text: {error.reason} (0x{data[error.start]:02x}) at {unit} "
            f"{offset + error.start}; convert it, for example with iconv"
        ) from error


def _name(source: Path | bytes) -> str:
    return "the text" if isinstance(source, bytes) else str(source)
