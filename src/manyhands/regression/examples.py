"""The examples of one file, pass after pass: parsed once and kept where they fit in memory, else read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.data.row_files import RowFile
from manyhands.data.rows import Rows
from manyhands.errors import DataError, UserError, format_bytes
from manyhands.regression.labels import Labels, labels_of

__all__ = ["Examples", "Labelled", "scale_of"]

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
        """The memory that it takes."""
        return self.rows.nbytes + self.targets.nbytes


def scale_of(rows: Rows) -> float:
    """The root of the mean square of the values of the first rows; 1 where they have none."""
    values = rows.values[: rows.starts[min(len(rows), _SCALE_ROWS)]].astype(np.float64)
    return float(np.sqrt(np.mean(values * values))) if values.any() else 1.0


class Examples:
    """Examples of `file`, of which up to `memory_bytes` are kept from one pass to the next.

    The labels are found on the way: blocks are held back only as long as they have label 1 alone, which is yes beside
    0 or -1 and no beside 2.
    """

    def __init__(self, file: RowFile, memory_bytes: int, passes: int) -> None:
        self.file = file
        self.labels: Labels | None = None
        self.count = 0
        """Of one pass; known after the first."""
        self._memory_bytes = memory_bytes
        self._passes = passes
        self._kept: list[Labelled] | None = None

    def stretches(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[list[Labelled]]:
        """One pass: as one stretch where everything is kept, else a block at a time.

        `on_bytes` is told of text as it is read.
        """
        if self._kept is not None:
            yield self._kept
            return
        kept: list[Labelled] | None = []
        kept_bytes = count = 0
        for block in self._labelled(on_bytes):
            count += len(block.rows)
            kept_bytes += block.nbytes
            if kept_bytes > self._memory_bytes:
                self._require_rereadable()
                kept = None
            if kept is not None:
                kept.append(block)
            yield [block]
        self.count = count
        self._kept = kept

    def _require_rereadable(self) -> None:
        if self._passes > 1 and not self.file.rereadable:
            raise UserError(
                f"the examples of stdin take more than memory={format_bytes(self._memory_bytes)}, so they can be seen "
                f"once only, not in passes={self._passes}; give a file, more memory or one pass"
            )

    def _labelled(self, on_bytes: Callable[[int], None] | None) -> Iterator[Labelled]:
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
