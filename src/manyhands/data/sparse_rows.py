"""Sparse examples in memory: the rows of a matrix of features (CSR), their labels and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows"]


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
        """The memory of all arrays."""
        arrays = (self.starts, self.indices, self.values, self.labels, self.weights)
        return sum(array.nbytes for array in arrays)

    @staticmethod
    def join(blocks: Sequence[Rows]) -> Rows:
        """All rows of some blocks, in order, in new memory."""
        ends = np.cumsum([0, *(len(block.indices) for block in blocks)])
        starts = [block.starts[:-1] + end for block, end in zip(blocks, ends[:-1], strict=True)]
        return Rows(
            starts=np.concatenate([*starts, ends[-1:]]).astype(np.int64),
            indices=np.concatenate([np.empty(0, np.int32), *(block.indices for block in blocks)]),
            values=np.concatenate([np.empty(0, np.float32), *(block.values for block in blocks)]),
            labels=np.concatenate([np.empty(0, np.float32), *(block.labels for block in blocks)]),
            weights=np.concatenate([np.empty(0, np.float32), *(block.weights for block in blocks)]),
            size=max((block.size for block in blocks), default=0),
        )
