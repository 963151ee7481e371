"""The examples of one file, parsed a block at a time; which two labels they have, and which of them means yes.

Parsed examples are gone through pass after pass: in memory where they fit, else in files that several processes map, so
that each page is in memory once, and only while it is needed.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.data.matrix import Rows
from manyhands.data.row_files import RowFile
from manyhands.errors import DataError
from manyhands.workloads.array_files import disk_errors, mapped_arrays

__all__ = [
    "PAIRS",
    "Examples",
    "Labelled",
    "Labels",
    "Metrics",
    "Parsed",
    "ParsedBlocks",
    "Spool",
    "SpooledRows",
    "labels_of",
    "measure",
    "parse_examples",
]

_SCALE_ROWS = 1000


PAIRS = ((-1.0, 1.0), (0.0, 1.0), (1.0, 2.0))  # no and yes, in the ways that files write them


@dataclass(frozen=True, slots=True)
class Labels:
    """The label of no and the label of yes."""

    no: float
    yes: float

    def __str__(self) -> str:
        return f"{self.no:g} {self.yes:g}"

    def targets(self, labels: NDArray[np.float32], where: str) -> NDArray[np.float32]:
        """0 for no and 1 for yes; DataError says what else there is in `where`."""
        is_yes = labels == self.yes
        wrong = labels[~(is_yes | (labels == self.no))]
        if len(wrong):
            shown = "none" if np.isnan(wrong[0]) else f"{wrong[0]:g}"
            raise DataError(
                f"{where} has an example with label {shown} beside {self.no:g} and {self.yes:g}; a logistic regression "
                "has two labels, which every example must have one of"
            )
        found: NDArray[np.float32] = is_yes.astype(np.float32)
        return found


def labels_of(seen: Iterable[float], where: str) -> Labels | None:
    """The pair of the labels seen so far; None while 1 alone may be yes or no. DataError names labels of no pair."""
    values = np.unique(np.array(list(seen), float)).tolist()  # one NaN at most, as the last
    fitting = [pair for pair in PAIRS if set(values) <= set(pair)]
    if not fitting:
        shown = ", ".join("none" if np.isnan(value) else f"{value:g}" for value in values[:5])
        raise DataError(
            f"{where} has labels {shown}{', ...' if len(values) > 5 else ''}; a logistic regression has two: "
            "-1 and 1, 0 and 1, or 1 and 2"
        )
    return Labels(*fitting[0]) if len(fitting) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Means over `examples`, each counted with its weight; `auc` is None where all have one label."""

    examples: int
    accuracy: float
    auc: float | None
    log_loss: float


def measure(
    margins: NDArray[np.float64], targets: NDArray[np.float32], weights: NDArray[np.float32] | None = None
) -> Metrics:
    """Compare margins (probability 1 / (1 + exp(-margin))) with targets of 0 and 1, at least one."""
    counted = np.ones(len(margins)) if weights is None else weights.astype(np.float64)
    is_yes = targets > 0
    away = np.where(is_yes, -margins, margins)
    # The chance that a yes has a larger margin than a no, a tie being half of one (Mann and Whitney).
    _, group = np.unique(margins, return_inverse=True)
    yes, no = np.bincount(group, counted * is_yes), np.bincount(group, counted * ~is_yes)
    pairs = yes.sum() * no.sum()
    area = float((yes * (np.cumsum(no) - no / 2)).sum() / pairs) if pairs else None
    return Metrics(
        examples=len(margins),
        accuracy=float(np.average((margins > 0) == is_yes, weights=counted)),
        auc=area,
        log_loss=float(np.average(np.logaddexp(0.0, away), weights=counted)),
    )


class Labelled(NamedTuple):
    """Rows and what they are to be learned as: 0 for no, 1 for yes."""

    rows: Rows
    targets: NDArray[np.float32]


def _scale_of(rows: Rows) -> float:
    """The root of the mean square of the values of the first rows; 1 where they have none."""
    values = rows.values[: rows.starts[min(len(rows), _SCALE_ROWS)]].astype(np.float64)
    return float(np.sqrt(np.mean(values * values))) if values.any() else 1.0


class Examples:
    """Examples of `file`, gone through once.

    The labels are found on the way: blocks are held back only as long as they have label 1 alone, which is yes beside
    0 or -1 and no beside 2.
    """

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.labels: Labels | None = None

    def blocks(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[Labelled]:
        held, name = list[Rows](), self.file.name
        for rows in self.file.blocks(on_bytes):
            held.append(rows)
            if self.labels is None:
                seen = {value for block in held for value in np.unique(block.labels).tolist()}
                self.labels = labels_of(seen, name)
            if self.labels is not None:
                for block in held:
                    yield Labelled(block, self.labels.targets(block.labels, name))
                held.clear()
        if self.labels is None:
            raise DataError(f"all examples of {name} have label 1; a logistic regression has two labels")


Piece = tuple[Any, NDArray[np.float32], tuple[int, int], int]
"""Rows and targets as compiled code takes them, which of the rows, and how many examples of the pass precede row 0."""
Pieces = Callable[[int, int], Iterator[Piece]]  # examples `begin` to `end` of a pass


class Parsed(ABC):
    """All examples of a file."""

    examples: int
    entries: int  # features of all examples
    size: int  # one more than the largest feature
    scale: float  # the root of the mean square of the first values

    @abstractmethod
    def opened(self) -> Pieces:
        """In this process."""


class ParsedBlocks(Parsed):
    """Examples in the memory of this process."""

    def __init__(self, blocks: Sequence[Labelled]) -> None:
        self.blocks = blocks
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

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name: starts, indices, values, weights and targets. What is written to them is lost."""
        return mapped_arrays(self.folder, _KINDS)

    def opened(self) -> Pieces:
        *rows, targets = self.arrays().values()

        def pieces(begin: int, end: int) -> Iterator[Piece]:
            yield tuple(rows), targets, (begin, end), 0

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

    def add(self, block: Labelled) -> None:
        """Append examples; ManyhandsError says when the disk is full."""
        rows = block.rows
        if self.folder is None:
            folder = self.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-logreg-"))
            self.folder, self._scale = Path(folder), _scale_of(rows)
            for name in _KINDS:  # the stack closes them
                self._files[name] = self.enter_context(Path(folder, name).open("wb"))  # noqa: SIM115
        starts = rows.starts + self._entries
        parts: list[NDArray[Any]] = [starts[1:] if self._examples else starts, rows.indices, rows.values]
        with disk_errors("parsed examples", self.folder):
            for name, array in zip(_KINDS, [*parts, rows.weights, block.targets], strict=True):
                self._files[name].write(array.data)
        self._examples += len(rows)
        self._entries += len(rows.indices)
        self._size = max(self._size, rows.size)

    def finish(self) -> SpooledRows:
        with disk_errors("parsed examples", self.folder):
            for file in self._files.values():
                file.close()
        return SpooledRows(
            folder=str(self.folder),
            examples=self._examples,
            entries=self._entries,
            size=self._size,
            scale=self._scale,
        )


def parse_examples(
    examples: Examples, memory_bytes: int, spool: Spool, on_bytes: Callable[[int], None] | None = None
) -> Parsed:
    """All examples: in memory where they take no more than `memory_bytes`, else in the files of `spool`."""
    kept: list[Labelled] | None = []
    kept_bytes = 0
    for block in examples.blocks(on_bytes):
        kept_bytes += block.rows.nbytes + block.targets.nbytes
        if kept is not None and kept_bytes <= memory_bytes:
            kept.append(block)
            continue
        for one in (*(kept or ()), block):
            spool.add(one)
        kept = None
    return ParsedBlocks(kept) if kept is not None else spool.finish()
