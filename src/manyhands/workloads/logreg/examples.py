"""The examples of one file, parsed a block at a time, with the labels that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.data.matrix import Rows
from manyhands.data.row_files import RowFile
from manyhands.errors import DataError
from manyhands.workloads.logreg.labels import Labels, labels_of

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
