"""Where workers meet while they grow a tree: each writes numbers that all read, in memory that they share.

Two kinds of memory: an area of each worker, as large as a histogram, and a row of a few words that it tells the others.
Both are written before a barrier and read after it; rows are two in turn, so that one barrier each is enough.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, Segment, round_up

__all__ = ["SharedHistograms", "alone", "histogram_bytes", "shared_histograms"]


class SharedHistograms:
    """One worker's side; `areas` are those of all workers, a row each, of whole cache lines."""

    def __init__(
        self,
        rank: int,
        areas: NDArray[np.int64],
        told: NDArray[np.int64],
        barrier: Callable[[], None],
    ) -> None:
        self.rank, self.world = rank, len(areas)
        self.areas = areas
        self._told, self._barrier = told, barrier
        self._turn = 0
        self.bytes_sent = 0

    @property
    def area(self) -> NDArray[np.int64]:
        """This worker's: written before `meet`, read by all after it."""
        found: NDArray[np.int64] = self.areas[self.rank]
        return found

    def meet(self, words: int) -> None:
        """Collective: all have written their areas, of which the others read `words`."""
        self.bytes_sent += 8 * words * (self.world - 1)
        self._barrier()

    def tell(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective: what each worker tells, a row each; to be read before the next but one."""
        told = self._told[self._turn]
        self._turn = 1 - self._turn
        told[self.rank, : len(words)] = words
        self.bytes_sent += 8 * len(words) * (self.world - 1)
        self._barrier()
        found: NDArray[np.int64] = told[:, : len(words)]
        return found

    def largest(self, value: float) -> float:
        """Collective: of a number of each worker."""
        return float(self.tell(np.array([value]).view(np.int64)).copy().view(np.float64).max())

    def total(self, value: int) -> int:
        """Collective: the sum of a whole number of each worker."""
        return int(self.tell(np.array([value], np.int64)).sum())


def alone(area_words: int, told_words: int) -> SharedHistograms:
    """One worker that meets nobody."""
    areas, told = np.zeros((1, _lines(area_words)), np.int64), np.zeros((2, 1, told_words), np.int64)
    return SharedHistograms(0, areas, told, lambda: None)


def _lines(words: int) -> int:
    return round_up(8 * words, CACHE_LINE) // 8


def histogram_bytes(world: int, area_words: int, told_words: int) -> int:
    """The memory that a meeting takes."""
    return 8 * world * (_lines(area_words) + 2 * _lines(told_words))


def shared_histograms(
    group: SharedGroup, segment: Segment, offset: int, area_words: int, told_words: int
) -> SharedHistograms:
    """The meeting of a group, in memory of `segment` that is zero and begins at `offset`, a whole cache line."""
    wide, narrow = _lines(area_words), _lines(told_words)
    areas = segment.array(offset, group.world * wide, np.int64).reshape(group.world, wide)
    told = segment.array(offset + 8 * group.world * wide, 2 * group.world * narrow, np.int64)
    return SharedHistograms(group.rank, areas, told.reshape(2, group.world, narrow), group.barrier)
