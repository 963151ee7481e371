"""The examples of one file, parsed a block at a time, with the labels that they have.

Parsed examples, gone through pass after pass: in memory where they fit, else in files that are mapped.

Parsed examples in files that several processes map: each page is in memory once, and only while it is needed.
"""

from __future__ import annotations

import errno
import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.data.matrix import Rows
from manyhands.data.row_files import RowFile
from manyhands.errors import DataError, ManyhandsError
from manyhands.workloads.logreg.labels import Labels, labels_of

__all__ = [
    "Examples",
    "Labelled",
    "Opened",
    "Parsed",
    "ParsedBlocks",
    "Piece",
    "Spool",
    "SpooledRows",
    "scale_of",
]

_SCALE_ROWS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """Rows and what they are to be learned as: 0 for no, 1 for yes."""

    rows: Rows
    targets: NDArray[np.float32]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """The rows as compiled code takes them."""
        rows = self.rows
        return rows.starts, rows.indices, rows.values, rows.weights

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.targets.nbytes


def scale_of(rows: Rows) -> float:
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
        """All of them; `on_bytes` is told of text as it is read."""
        held: list[Rows] = []
        for rows in self.file.blocks(on_bytes):
            if self.labels is None:
                held.append(rows)
                seen = {value for block in held for value in np.unique(block.labels).tolist()}
                self.labels = labels_of(seen, self.file.name)
                if self.labels is None:
                    continue
                for block in held:
                    yield Labelled(block, self.labels.targets(block.labels, self.file.name))
                held.clear()
            else:
                yield Labelled(rows, self.labels.targets(rows.labels, self.file.name))
        if self.labels is None:
            raise DataError(
                f"all examples of {self.file.name} have label 1; a logistic regression has two labels"
            )


Piece = tuple[Any, NDArray[np.float32], tuple[int, int], int]
"""Rows and targets as compiled code takes them, which of the rows, and how many examples of the pass precede row 0."""


class Opened(Protocol):
    """Examples that can be gone through."""

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Examples `begin` to `end` of a pass."""


class Parsed(ABC):
    """All examples of a file."""

    examples: int
    entries: int
    """Features of all examples together."""
    size: int
    """One more than the largest feature."""
    scale: float
    """The size of the values, as of `scale_of`."""

    @abstractmethod
    def opened(self) -> Opened:
        """In this process."""


@dataclass(frozen=True, eq=False)
class ParsedBlocks(Parsed):
    """Examples in the memory of this process."""

    blocks: Sequence[Labelled]
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", list(accumulate(len(block.rows) for block in self.blocks)))

    @property
    def examples(self) -> int:  # type: ignore[override]
        return self.ends[-1]

    @property
    def entries(self) -> int:  # type: ignore[override]
        return sum(len(block.rows.indices) for block in self.blocks)

    @property
    def size(self) -> int:  # type: ignore[override]
        return max(block.rows.size for block in self.blocks)

    @property
    def scale(self) -> float:  # type: ignore[override]
        return scale_of(self.blocks[0].rows)

    def opened(self) -> ParsedBlocks:
        return self

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Whole blocks, and parts of the first and the last."""
        number = bisect_right(self.ends, begin)
        while begin < end:
            block, before = self.blocks[number], self.ends[number] - len(self.blocks[number].rows)
            until = min(end, self.ends[number])
            yield block.arrays(), block.targets, (begin - before, until - before), before
            begin, number = until, number + 1


_KINDS: dict[str, Any] = {
    "starts": np.int64,
    "indices": np.int32,
    "values": np.float32,
    "weights": np.float32,
    "targets": np.float32,
}


@dataclass(frozen=True, kw_only=True)
class SpooledRows(Parsed):
    """Where the examples lie; may be pickled, and is good as long as the spool that made it."""

    folder: str
    examples: int
    entries: int
    size: int
    scale: float

    def opened(self) -> Opened:
        return _Mapped(self.open())

    def open(self) -> dict[str, NDArray[Any]]:
        """The arrays by name: starts, indices, values, weights and targets. What is written to them is lost."""
        return {name: self._map(name, kind) for name, kind in _KINDS.items()}

    def _map(self, name: str, kind: Any) -> NDArray[Any]:
        path = Path(self.folder, name)
        if not path.stat().st_size:
            return np.empty(0, kind)
        return np.asarray(np.memmap(path, kind, mode="c"))


class _Mapped:
    """All examples in one piece."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._rows = tuple(arrays[name] for name in ("starts", "indices", "values", "weights"))
        self._targets = arrays["targets"]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        yield self._rows, self._targets, (begin, end), 0


class Spool:
    """A temporary folder that takes blocks of examples; a context manager that removes it in any case.

    It is made for the first block.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.folder: Path | None = None
        self._examples = self._entries = self._size = 0
        self._scale = 1.0
        return self

    def _open(self) -> None:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-logreg-")))
            self._files: dict[str, BinaryIO] = {
                name: stack.enter_context((self.folder / name).open("wb")) for name in _KINDS
            }
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, block: Labelled) -> None:
        """Append examples; ManyhandsError says when the disk is full."""
        rows = block.rows
        if self.folder is None:
            self._open()
        if not self._examples:
            self._scale = scale_of(rows)
        starts = rows.starts + self._entries
        parts: dict[str, NDArray[Any]] = {
            "starts": starts if not self._examples else starts[1:],
            "indices": rows.indices,
            "values": rows.values,
            "weights": rows.weights,
            "targets": block.targets,
        }
        try:
            for name, array in parts.items():
                self._files[name].write(array.data)
        except OSError as error:
            raise self._full(error) from error
        self._examples += len(rows)
        self._entries += len(rows.indices)
        self._size = max(self._size, rows.size)

    def finish(self) -> SpooledRows:
        """Everything is in; no more is added."""
        try:
            for file in self._files.values():
                file.close()
        except OSError as error:
            raise self._full(error) from error
        return SpooledRows(
            folder=str(self.folder),
            examples=self._examples,
            entries=self._entries,
            size=self._size,
            scale=self._scale,
        )

    def _full(self, error: OSError) -> ManyhandsError:
        hint = "; free some space, or set TMPDIR to another disk" if error.errno == errno.ENOSPC else ""
        return ManyhandsError(f"parsed examples could not be kept in {self.folder}: {error.strerror}{hint}")


def parse_examples(
    examples: Examples, memory_bytes: int, spool: Spool, on_bytes: Callable[[int], None] | None = None
) -> Parsed:
    """All examples: in memory where they take no more than `memory_bytes`, else in the files of `spool`."""
    kept: list[Labelled] | None = []
    kept_bytes = 0
    for block in examples.blocks(on_bytes):
        kept_bytes += block.nbytes
        if kept is not None and kept_bytes <= memory_bytes:
            kept.append(block)
            continue
        for one in (*(kept or ()), block):
            spool.add(one)
        kept = None
    return ParsedBlocks(kept) if kept is not None else spool.finish()
