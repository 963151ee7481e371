"""Files of sparse examples, read as blocks of rows by several threads: LIBSVM and Vowpal Wabbit, plain, gzip or stdin.

The text is cut into blocks at line ends; threads parse blocks beside each other in compiled code that needs no
interpreter, and the blocks come out in the order of the file. No more is held than the blocks read ahead, two for
each thread, so a file may be larger than memory.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data import libsvm, vowpal
from manyhands.data.parse_kernels import PADDING
from manyhands.errors import DataError, UserError, check_count, format_bytes, nearest
from manyhands.native.warming import prepare

FORMATS = ("auto", "libsvm", "vw")
HASHES = ("numbers", "all")
MOST_BITS = 30
MOST_LINE_BYTES = 1 << 28
STDIN = "-"
_PADDING = bytes(PADDING)
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Row i has the features `indices[starts[i]:starts[i + 1]]` and their `values`; arrays are contiguous.

    `labels` are as the file has them, NaN where it has none. `weights` say how often a row counts. `size` is one more
    than the largest feature.
    """

    starts: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    size: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        arrays = (self.starts, self.indices, self.values, self.labels, self.weights)
        return sum(array.nbytes for array in arrays)

    @staticmethod
    def join(blocks: Sequence[Rows]) -> Rows:
        ends = np.cumsum([0, *(len(block.indices) for block in blocks)])
        starts = [block.starts[:-1] + end for block, end in zip(blocks, ends[:-1], strict=True)]
        kinds = {"indices": np.int32, "values": np.float32, "labels": np.float32, "weights": np.float32}
        joined: dict[str, Any] = {
            name: np.concatenate([np.empty(0, kind), *(getattr(block, name) for block in blocks)])
            for name, kind in kinds.items()
        }
        size = max((block.size for block in blocks), default=0)
        return Rows(starts=np.concatenate([*starts, ends[-1:]]).astype(np.int64), **joined, size=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How files of examples are read; checked when made."""

    format: str = "auto"  # `libsvm`, `vw`, or `auto`: Vowpal Wabbit's where the first line has a bar
    bits: int | None = None  # hash features into a table of 2^bits rows; None: the index is the row
    hash: str = "numbers"  # which names of vw files are hashed: `numbers` stand for themselves, or `all` are
    skip_bad: bool = False  # leave out lines that are wrong and count them, instead of refusing the file
    threads: int = 2
    block_bytes: int = 1 << 22

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"unknown format {self.format!r}; {nearest(self.format, FORMATS)}")
        if self.hash not in HASHES:
            raise UserError(f"unknown hash {self.hash!r}; {nearest(self.hash, HASHES)}")
        if self.bits is not None and not 1 <= self.bits <= MOST_BITS:
            raise UserError(f"bits={self.bits} must be from 1 to {MOST_BITS}")
        if self.hash == "all" and self.bits is None:
            raise UserError("hash=all needs a number of bits to hash into, such as bits=18")
        for name in ("threads", "block_bytes"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The contents of one block of text."""

    rows: Rows
    lines: int
    bad_lines: int
    # The first malformed line, and the first that the settings reject: the number in the block (from 0), and the
    # column (from 1) with a sentence about it
    bad: tuple[int, str] | None
    rejected: tuple[int, str] | None
    # The namespace whose features are numbers; None where there is none, or no namespaces
    numbered_in: int | None
    num_bytes: int


class RowFile:
    """A file of examples, `-` is stdin, to be read once; `bad_lines` and `lines` tell of the last reading."""

    label_names: Sequence[str] | None = None  # what label 0, 1, … means, where labels are names

    def __init__(self, path: Path | str, reading: Reading | None = None) -> None:
        self.path, self.reading = str(path), reading or Reading()
        self.lines = self.bad_lines = 0
        self.rereadable, self._taken = self.path != STDIN, False
        self.name = self.path if self.rereadable else "stdin"

    def blocks(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[Rows]:
        """Rows in the order of the file; `on_bytes` is called with the bytes of text read, a block at a time.

        DataError names file, line and column of a line that is wrong, unless those are skipped, and a file without
        any row.
        """
        self.lines = self.bad_lines = 0
        found, numbered_in = False, None
        for block in self._parsed():
            problem = block.rejected or (block.bad if not self.reading.skip_bad else None)
            if problem is not None:
                raise DataError(f"{self.name}, line {self.lines + problem[0] + 1}, {problem[1]}")
            if block.numbered_in is not None:
                if numbered_in is not None and numbered_in != block.numbered_in:
                    raise DataError(
                        f"{self.name}, line {self.lines + 1} or later: features of two namespaces are numbers; give "
                        "hash=all and a number of bits to keep them separate"
                    )
                numbered_in = block.numbered_in
            self.lines += block.lines
            self.bad_lines += block.bad_lines
            if on_bytes is not None:
                on_bytes(block.num_bytes)
            if len(block.rows):
                found = True
                yield block.rows
        if not found:
            raise DataError(f"{self.name} holds no example; give a file with at least one")

    def _parsed(self) -> Iterator[_Block]:
        with ExitStack() as stack:
            stream = self._open(stack)
            pool = stack.enter_context(ThreadPoolExecutor(self.reading.threads, "read"))
            ahead: deque[Future[_Block]] = deque()
            stack.callback(lambda: [one.cancel() for one in ahead])
            parse: Callable[[bytes], _Block] | None = None
            for text in self._texts(stream):
                if parse is None:  # the first line shows the format
                    wanted, line = self.reading.format, text.lstrip().partition(b"\n")[0]
                    is_vowpal = wanted == "vw" or (wanted == "auto" and b"|" in line)
                    prepare("vowpal" if is_vowpal else "libsvm")
                    parse = partial(_parse, vowpal if is_vowpal else libsvm, self.reading)
                ahead.append(pool.submit(parse, text))
                if len(ahead) > 2 * self.reading.threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _open(self, stack: ExitStack) -> io.BufferedIOBase:
        if self.path == STDIN:
            if self._taken:
                raise UserError("stdin can be read only once; give a file, or more memory for its examples")
            self._taken = True
            raw: Any = sys.stdin.buffer
        else:
            try:
                raw = stack.enter_context(io.FileIO(self.path))
            except OSError as error:
                raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        stream = io.BufferedReader(raw, 1 << 16)
        stack.callback(stream.detach)  # stdin stays open
        if stream.peek(2)[:2] != _GZIP_MAGIC:
            return stream
        return stack.enter_context(gzip.GzipFile(fileobj=stream))

    def _texts(self, stream: io.BufferedIOBase) -> Iterator[bytes]:
        kept: list[bytes] = []
        kept_bytes = 0
        while True:
            try:
                more = stream.read(self.reading.block_bytes)
            except EOFError as error:
                raise DataError(f"{self.name} is truncated: gzip ends early") from error
            except (OSError, zlib.error) as error:
                raise DataError(f"{self.name} cannot be read: {error}") from error
            if not more:
                break
            end = more.rfind(b"\n") + 1
            if end:
                yield b"".join((*kept, memoryview(more)[:end], _PADDING))
                kept, kept_bytes = [], 0
            kept.append(more[end:])
            kept_bytes += len(more) - end
            if kept_bytes > MOST_LINE_BYTES:
                raise DataError(
                    f"{self.name} has {format_bytes(kept_bytes)} without a line end; an example is a line of at most "
                    f"{format_bytes(MOST_LINE_BYTES)}"
                )
        if kept_bytes:
            yield b"".join((*kept, b"\n", _PADDING))


class RowText(RowFile):
    """Examples in text in memory, read like a `RowFile`."""

    def __init__(self, text: bytes, reading: Reading | None = None) -> None:
        super().__init__("the input", reading)
        self._text = text

    def _open(self, stack: ExitStack) -> io.BufferedIOBase:
        return stack.enter_context(io.BytesIO(self._text))


def warm_libsvm() -> None:
    _parse(libsvm, Reading(), b"1 1:1\n" + _PADDING)


def warm_vowpal() -> None:
    _parse(vowpal, Reading(), b"1 | 1:1\n" + _PADDING)


def _parse(module: Any, reading: Reading, text: bytes) -> _Block:
    view = np.frombuffer(text, np.uint8)[:-PADDING]
    most_rows, most = int(np.count_nonzero(view == 10)), module.most_entries(view)
    starts, problems = np.empty(most_rows + 1, np.int64), np.zeros((2, 4), np.int64)
    indices, values = np.empty(most, np.int32), np.empty(most, np.float32)
    labels, weights = np.empty(most_rows, np.float32), np.empty(most_rows, np.float32)
    shift = 0 if reading.bits is None else 64 - reading.bits
    mode = (HASHES.index(reading.hash),) if module is vowpal else ()
    arrays = starts, indices, values, labels, weights
    rows, entries, lines, size, numbered = module.parse(view, shift, *mode, *arrays, problems)
    bad, rejected = (_problem(module, text, *found[1:].tolist()) for found in problems)
    return _Block(
        rows=Rows(
            starts=starts[: rows + 1],
            indices=indices[:entries],
            values=values[:entries],
            labels=labels[:rows],
            weights=weights[:rows],
            size=size if reading.bits is None else 1 << reading.bits,
        ),
        lines=lines,
        bad_lines=int(problems[0, 0]),
        bad=bad,
        rejected=rejected,
        numbered_in=numbered[1] if numbered[0] else None,
        num_bytes=len(view),
    )


def _problem(module: Any, text: bytes, line: int, at: int, code: int) -> tuple[int, str] | None:
    if not code:
        return None
    column = at - text.rfind(b"\n", 0, at)
    token = text[at : at + 200].split(None, 1)
    shown = token[0].decode("utf-8", "replace") if token else ""
    shown = shown if len(shown) <= 60 else shown[:60] + "…"
    return line, f"column {column}: {module.WRONG[code].format(token=repr(shown))}"
