"""Parsed examples in files that several processes map: each page is in memory once, and only while it is needed."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError
from manyhands.workloads.logreg.examples import Labelled, scale_of
from manyhands.workloads.logreg.parsed import Opened, Parsed, Piece

__all__ = ["Spool", "SpooledRows"]

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
        """Mapped."""
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
        """One."""
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
