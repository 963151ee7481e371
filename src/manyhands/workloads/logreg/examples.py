"""The examples of one file, parsed a block at a time, with the labels that they have.

Parsed examples are gone through pass after pass: in memory where they fit, else in files that several processes map, so
that each page is in memory once, and only while it is needed.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.data.row_files import RowFile, Rows
from manyhands.errors import DataError
from manyhands.workloads.array_files import disk_errors, mapped_arrays, unload
from manyhands.workloads.logreg.labels import MOST_CLASSES, Labels, labels_of

_SCALE_ROWS = 1000
_TARGETS = 1 << 20  # labels that become targets at a time
_READING_BYTES = 96 << 20  # blocks of rows that are read, and what allocators keep of them


class Labelled(NamedTuple):
    """Rows and what they are to be learned as: 0 for no, 1 for yes; of several classes their numbers."""

    rows: Rows
    targets: NDArray[np.float32]


def _scale_of(rows: Rows) -> float:
    """The root of the mean square of the values of the first rows; 1 where they have none."""
    values = rows.values[: rows.starts[min(len(rows), _SCALE_ROWS)]].astype(np.float64)
    return float(np.sqrt(np.mean(values * values))) if values.any() else 1.0


class Examples:
    """Examples of `file`, gone through once; then it is known which labels they have."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self._seen: NDArray[Any] = np.zeros(0)

    def blocks(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[Rows]:
        first, name = 0, self.file.name
        for rows in self.file.blocks(on_bytes):
            missing = np.isnan(rows.labels)
            if missing.any():
                raise DataError(
                    f"{name}: row {first + int(missing.argmax()) + 1} has no label; each needs one"
                )
            self._seen = np.union1d(self._seen, rows.labels)
            if len(self._seen) > MOST_CLASSES:
                break  # which `labels` says
            first += len(rows)
            yield rows

    @cached_property
    def labels(self) -> Labels:
        """DataError where there are too few or too many."""
        return labels_of(self._seen, self.file.name, self.file.label_names)

    def targets(self, labels: NDArray[Any]) -> NDArray[np.float32]:
        return self.labels.targets(labels, self.file.name, names=self.file.label_names)


Piece = tuple[Any, NDArray[np.float32], tuple[int, int], int]
"""Rows and targets as compiled code takes them, which of the rows, and how many examples of the pass precede row 0."""
Pieces = Callable[[int, int], Iterator[Piece]]  # examples `begin` to `end` of a pass


class Parsed(ABC):
    """All examples of a file."""

    examples: int
    entries: int  # features of all examples
    size: int  # one more than the largest feature
    scale: float  # the root of the mean square of the first values
    outputs: int  # weights of a feature: one, or one for each of several classes

    @abstractmethod
    def opened(self) -> Pieces:
        """In this process."""


class ParsedBlocks(Parsed):
    """Examples in the memory of this process."""

    def __init__(self, blocks: Sequence[Labelled], outputs: int = 1) -> None:
        self.blocks, self.outputs = blocks, outputs
        self.ends = list(accumulate(len(block.rows) for block in blocks))
        self.examples = self.ends[-1]
        self.entries = sum(len(block.rows.indices) for block in blocks)
        self.size = max(block.rows.size for block in blocks)
        self.scale = _scale_of(blocks[0].rows)

    def opened(self) -> Pieces:
        def pieces(begin: int, end: int) -> Iterator[Piece]:
            number = bisect_right(self.ends, begin)
            while begin < end:
                block, rows, last = self.blocks[number], self.blocks[number].rows, self.ends[number]
                before, until = last - len(rows), min(end, last)
                arrays = rows.starts, rows.indices, rows.values, rows.weights
                yield arrays, block.targets, (begin - before, until - before), before
                begin, number = until, number + 1

        return pieces


_FLOATS = ("values", "weights", "targets")
_KINDS: dict[str, Any] = {"starts": np.int64, "indices": np.int32, **dict.fromkeys(_FLOATS, np.float32)}


@dataclass(frozen=True, kw_only=True)
class SpooledRows(Parsed):
    """Where the examples lie; may be pickled, and is good as long as the spool that made it."""

    folder: str
    examples: int
    entries: int
    size: int
    scale: float
    outputs: int = 1

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name: starts, indices, values, weights and targets. What is written to them is lost."""
        return mapped_arrays(self.folder, _KINDS)

    def opened(self) -> Pieces:
        starts, indices, values, weights, targets = self.arrays().values()

        def pieces(begin: int, end: int) -> Iterator[Piece]:
            yield (starts, indices, values, weights), targets, (begin, end), 0
            first, last = int(starts[begin]), int(starts[end])
            for array in (indices, values):  # the most of it
                unload(array, first, last)

        return pieces


class Spool(ExitStack):
    """A temporary folder that takes blocks of examples; a context manager that removes it in any case.

    It is made for the first block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self._examples = self._entries = self._size = 0
        self._scale = 1.0
        self._files: dict[str, BinaryIO] = {}

    def add(self, rows: Rows) -> None:
        """Append examples; ManyhandsError says when the disk is full."""
        if self.folder is None:
            folder = self.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-logreg-"))
            self.folder, self._scale = Path(folder), _scale_of(rows)
            for name in _KINDS:  # the stack closes them
                self._files[name] = self.enter_context(Path(folder, name).open("wb"))  # noqa: SIM115
        starts = rows.starts + self._entries
        parts: list[NDArray[Any]] = [starts[1:] if self._examples else starts, rows.indices, rows.values]
        with disk_errors("parsed examples", self.folder):
            for name, array in zip(_KINDS, [*parts, rows.weights, rows.labels], strict=True):
                self._files[name].write(array.data)
        self._examples += len(rows)
        self._entries += len(rows.indices)
        self._size = max(self._size, rows.size)

    def finish(self, examples: Examples) -> SpooledRows:
        """Where labels were written are now targets."""
        assert self.folder is not None, "examples were added"
        with disk_errors("parsed examples", self.folder):
            for file in self._files.values():
                file.close()
            written = np.memmap(self.folder / "targets", np.float32, "r+")
            for begin in range(0, self._examples, _TARGETS):
                written[begin : begin + _TARGETS] = examples.targets(written[begin : begin + _TARGETS])
        return SpooledRows(
            folder=str(self.folder),
            examples=self._examples,
            entries=self._entries,
            size=self._size,
            scale=self._scale,
            outputs=examples.labels.outputs,
        )


def parse_examples(
    examples: Examples, memory_bytes: int, spool: Spool, on_bytes: Callable[[int], None] | None = None
) -> Parsed:
    """All examples: in memory where they take, with reading, at most `memory_bytes`; else in the files of `spool`."""
    kept: list[Rows] | None = []
    kept_bytes = 0
    for block in examples.blocks(on_bytes):
        kept_bytes += block.nbytes + block.labels.nbytes
        if kept is not None and kept_bytes <= memory_bytes - _READING_BYTES:
            kept.append(block)
            continue
        for one in (*(kept or ()), block):
            spool.add(one)
        kept = None
    if kept is None:
        return spool.finish(examples)
    return ParsedBlocks(
        [Labelled(rows, examples.targets(rows.labels)) for rows in kept], examples.labels.outputs
    )
