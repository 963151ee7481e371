"""Word vectors and the files people keep them in: Stanford's text, word2vec's text and binary; and who is near to whom.

Stanford's text has one line `word x1 x2 ...` per word; word2vec's begins with a line `words dimensions` and goes on in
the same way, or with `word`, a space and the float32 themselves. `Vectors.load` finds out which of them a file is.
"""

from __future__ import annotations

import difflib
import mmap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.typing import NDArray

from manyhands.data.store.atomic import reason, write_atomically
from manyhands.errors import DataError, UserError, check_count
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.predictor import Predictor, ReadAs

_LINES_AT_ONCE = 4096
_LONGEST_LINE = 1 << 22
_MOST_DIGITS = 15  # of a count in a header: Python itself refuses numbers of thousands of digits
_SUGGESTED_FROM = 50_000  # comparing with all words of a large file would take seconds


class Vectors:
    """One vector per word, most frequent word first: `words` and the rows of `matrix` (float32)."""

    def __init__(self, words: Sequence[str], matrix: NDArray[np.float32]) -> None:
        self.words: list[str] = list(words)
        self.matrix: NDArray[np.float32] = np.ascontiguousarray(matrix, np.float32)
        if self.matrix.ndim != 2 or len(self.matrix) != len(self.words):
            raise UserError(f"{len(self.words)} words need as many rows, not shape {self.matrix.shape}")

    def __len__(self) -> int:
        return len(self.words)

    @property
    def dim(self) -> int:
        return int(self.matrix.shape[1])

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of each word; the first where a file has it twice."""
        return {word: row for row, word in reversed(list(enumerate(self.words)))}

    @cached_property
    def unit(self) -> NDArray[np.float32]:
        """The matrix with rows of length 1, so that products are cosines; a row of zeros stays."""
        with np.errstate(over="ignore"):
            lengths = np.linalg.norm(self.matrix, axis=1, keepdims=True)
        unit: NDArray[np.float32] = (self.matrix / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        vast = ~np.isfinite(lengths[:, 0])  # squares beyond single precision
        wide = self.matrix[vast].astype(np.float64)
        unit[vast] = wide / np.linalg.norm(wide, axis=1, keepdims=True)
        return unit

    def find(self, word: str) -> int | None:
        """The row of a word as it is written or, where there is none, of its lower case."""
        row = self.index.get(word)
        return self.index.get(word.lower()) if row is None else row

    def row(self, word: str) -> int:
        row = self.find(word)
        if row is None:
            close = difflib.get_close_matches(word.lower(), self.words[:_SUGGESTED_FROM], n=3)
            hint = f"; similar: {', '.join(close)}" if close else "; try another, in lower case"
            raise UserError(f"{word!r} is not among the {len(self):,} words{hint}")
        return row

    def neighbours(self, word: str, top: int = 10) -> list[tuple[str, float]]:
        """The `top` words with the largest cosine to `word`, itself left out."""
        row = self.row(word)
        return self._nearest(self.unit[row], {row}, top)

    def signed_rows(self, expression: str) -> list[tuple[int, int]]:
        return [(sign, self.row(word)) for sign, word in _terms(expression)]

    def combine(self, expression: str, top: int = 10) -> list[tuple[str, float]]:
        """The words nearest to a sum such as `king - man + woman`, of unit vectors; the given words are left out."""
        signs, rows = map(list, zip(*self.signed_rows(expression), strict=True))
        total: NDArray[np.float32] = (np.array(signs, np.float32)[:, None] * self.unit[rows]).sum(axis=0)
        length = float(np.linalg.norm(total))
        return self._nearest(total / length if length > 0 else total, set(rows), top)

    def _nearest(self, direction: NDArray[np.float32], given: set[int], top: int) -> list[tuple[str, float]]:
        check_count("top", top)
        cosines = self.unit @ direction
        cosines[list(given)] = -np.inf
        best = np.argsort(-cosines, kind="stable")[: min(top, len(self) - len(given))]
        return [(self.words[row], float(cosines[row])) for row in best.tolist()]

    def save_text(self, path: Path | str) -> None:
        """Write Stanford's text; enough digits to read back the same float32."""
        write_atomically(Path(path), self._lines())

    def save_word2vec(self, path: Path | str, *, binary: bool = False) -> None:
        items = zip(self.words, self.matrix.astype("<f4", copy=False), strict=True)
        rows = (word.encode() + b" " + row.tobytes() + b"\n" for word, row in items)
        header = [f"{len(self)} {self.dim}\n".encode()]
        write_atomically(Path(path), chain(header, rows if binary else self._lines()))

    def _lines(self) -> Iterator[bytes]:
        form = "%s" + " %.9g" * self.dim + "\n"
        for start in range(0, len(self), _LINES_AT_ONCE):
            words = self.words[start : start + _LINES_AT_ONCE]
            rows = self.matrix[start : start + _LINES_AT_ONCE].tolist()
            yield "".join([form % (word, *row) for word, row in zip(words, rows, strict=True)]).encode()

    @classmethod
    def load(cls, path: Path | str, *, is_text: bool = False) -> Vectors:
        """Read a file of any of the three forms; a DataError names the file and the line that is wrong.

        `is_text` says that it is Stanford's, whatever its first line looks like.
        """
        try:
            with Path(path).open("rb") as file:
                return (cls._read_text if is_text else cls._read)(Path(path), file)
        except OSError as error:
            raise DataError(f"vectors {path} cannot be read: {reason(error)}") from error

    @classmethod
    def _read_text(cls, path: Path, file: BinaryIO) -> Vectors:
        first = file.readline(_LONGEST_LINE)
        file.seek(0)
        if not first.strip():
            raise DataError(f"{path} holds no vectors: its first line is empty")
        return cls(*_read_lines(path, file, first.rstrip().count(b" "), 1))

    @classmethod
    def _read(cls, path: Path, file: BinaryIO) -> Vectors:
        header = file.readline(_LONGEST_LINE).split()
        is_counted = len(header) == 2 and all(field.isdigit() for field in header)
        long = [field[:20].decode() for field in header if is_counted and len(field) > _MOST_DIGITS]
        if long:
            raise DataError(f"{path}, line 1: {long[0]}… is not a number of vectors, nor of dimensions")
        words, dim = map(int, header) if is_counted else (0, 0)
        if not words or not dim:  # not word2vec's first line
            file.seek(0)
            return cls._read_text(path, file)
        start = file.tell()
        second = file.readline(_LONGEST_LINE)
        file.seek(start)
        if not _numbers(second.split()[1:]):
            return cls(*_read_binary(path, file, words, dim))
        found = cls(*_read_lines(path, file, dim, 2))
        if len(found) != words:
            raise DataError(f"{path} announces {words} vectors but has {len(found)}: truncated or damaged")
        return found


def _terms(expression: str) -> list[tuple[int, str]]:
    """`king - man + woman` as signed words; signs stand alone, so that words may have hyphens."""
    sign, signed = 1, False
    terms: list[tuple[int, str]] = []
    for token in expression.split():
        if token in ("+", "-", "−"):
            sign, signed = (1 if token == "+" else -1), True
            continue
        if terms and not signed:
            raise UserError(f"{expression!r}: no sign before {token!r}; write it as in 'king - man + woman'")
        terms.append((sign, token))
        sign, signed = 1, False
    if not terms or signed:
        raise UserError(f"{expression!r} does not end with a word; write it as in 'king - man + woman'")
    return terms


def _numbers(fields: Sequence[bytes]) -> list[float] | None:
    try:
        return [float(field) for field in fields]
    except ValueError:
        return None


def _read_lines(path: Path, file: BinaryIO, dim: int, number: int) -> tuple[list[str], NDArray[np.float32]]:
    """Lines of a word and `dim` numbers, the first of them line `number` of the file."""
    if dim < 1:
        raise DataError(f"{path}, line {number}: expected a word and its vector, separated by spaces")
    words, parts = list[str](), list[NDArray[np.float32]]()
    while lines := list(islice(file, _LINES_AT_ONCE)):
        texts: list[bytes] = []
        for offset, line in enumerate(lines):
            # From the right: some published files have words with spaces in them.
            fields = line.rstrip(b" \r\n").rsplit(b" ", dim)
            if len(fields) != dim + 1:
                raise DataError(
                    f"{path}, line {number + offset}: {len(fields) - 1} numbers where the first line has {dim}; "
                    "the file is truncated or damaged"
                )
            words.append(_text(path, number + offset, fields[0]))
            texts += fields[1:]
        parts.append(_parsed(path, number, texts, dim))
        number += len(lines)
    return words, np.concatenate([np.empty((0, dim), np.float32), *parts])


def _text(path: Path, number: int, word: bytes) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}, line {number}: the word {word[:40]!r} is not UTF-8 text") from None


def _parsed(path: Path, number: int, texts: list[bytes], dim: int) -> NDArray[np.float32]:
    """Many numbers at once; one at a time only to find the one that is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # older numpy's word for what is no number
            values = np.fromstring(b" ".join(texts).decode(), np.float32, sep=" ")
    except (ValueError, DeprecationWarning):
        values = np.empty(0, np.float32)
    if len(values) != len(texts):
        for place, text in enumerate(texts):
            if _numbers([text]) is None:
                shown = text[:40].decode(errors="replace")
                raise DataError(f"{path}, line {number + place // dim}: {shown!r} is not a number")
        with np.errstate(over="ignore"):
            values = np.array([float(text) for text in texts], np.float64).astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        place = int(np.argmin(finite))
        shown = texts[place][:40].decode(errors="replace")
        raise DataError(f"{path}, line {number + place // dim}: {shown!r} is not a finite number")
    return values.reshape(-1, dim)


def _read_binary(path: Path, file: BinaryIO, count: int, dim: int) -> tuple[list[str], NDArray[np.float32]]:
    """`count` times a word, a space and `dim` float32; a newline before a word belongs to no word."""
    at = file.tell()
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(content) - at < count * (4 * dim + 2):  # before a header that lies makes us ask for its memory
        raise DataError(f"{path} announces {count} vectors of {dim} numbers but is truncated")
    words: list[str] = []
    matrix = np.empty((count, dim), np.float32)
    for row in range(count):
        space = content.find(b" ", at)
        if space < 0 or space + 1 + 4 * dim > len(content):
            raise DataError(f"{path} ends in vector {row + 1} of {count}; it is truncated")
        words.append(_text(path, row + 2, content[at:space].lstrip(b"\n")))
        matrix[row] = np.frombuffer(content, "<f4", dim, space + 1)
        if not np.isfinite(matrix[row]).all():
            raise DataError(f"{path}: vector {row + 1} of {count} has a number that is not finite")
        at = space + 1 + 4 * dim
    if content[at:].strip():
        raise DataError(f"{path} continues after its {count} vectors; it is damaged or not a word2vec file")
    return words, matrix


_VECTORS_FILE = "vectors.txt"
_LONGEST = 1000  # what is near to a word that is none is looked for letter by letter


class VectorsPredictor(Predictor[list[str]]):
    """The words nearest to a word, or to a sum of words as `king - man + woman`."""

    takes: ClassVar[str] = "a word, or words with + and - between them"

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[str]]:
        self.check_read_as(read_as)
        yield self.inputs([source])

    def inputs(self, values: Sequence[Any]) -> list[str]:
        for number, value in enumerate(values):
            if not isinstance(value, str) or not value.strip():
                raise UserError(f"input {number} is {str(value)[:40]!r}; it must be {self.takes}")
            if len(value) > _LONGEST:
                raise UserError(f"input {number} has {len(value):,} letters; {_LONGEST:,} at most")
            try:
                self.vectors.signed_rows(value)
            except UserError as error:
                raise UserError(f"input {number}: {error}") from error
        return [str(value) for value in values]

    def together(self, parts: Sequence[list[str]]) -> list[str]:
        return [words for part in parts for words in part]

    def answers(self, inputs: list[str]) -> list[Any]:
        found = [self.vectors.combine(words) for words in inputs]
        return [[{"word": word, "similarity": round(near, 6)} for word, near in best] for best in found]

    def lines(self, inputs: list[str]) -> Iterator[str]:
        answers = [near for answer in self.answers(inputs) for near in answer]
        return (f"{near['word']} {near['similarity']:.4f}" for near in answers)

    @property
    def example(self) -> Any:
        """The most frequent word that is an input: no sign, and none that is too long or falls apart."""
        for word in self.vectors.words:
            with suppress(UserError):
                return self.inputs([word])[0]
        return self.vectors.words[0]


def open_vectors(path: Path) -> VectorsPredictor:
    return VectorsPredictor(Vectors.load(path / _VECTORS_FILE if path.is_dir() else path))


def export_vectors(asked: ExportAsked) -> Export:
    raise UserError(f"{asked.run} holds word vectors, which are already one file: {asked.own(_VECTORS_FILE)}")
