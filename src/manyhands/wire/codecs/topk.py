"""The largest items (Aji and Heafield, EMNLP 2017): what is left out is at most 1 - fraction of the squared size.

A part of the items is looked at to guess the size from which on they are large: so all are read once, and those from
that size on are few enough to be counted exactly. `sampled` takes the guess for the border: it sends at most as many,
and mostly about as many, which are then seldom to be counted.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from manyhands.wire.codec import ParcelCodec
from manyhands.wire.floats import Floats
from manyhands.wire.kernels.select import largest, not_below
from manyhands.wire.parcels import Parcel
from manyhands.wire.sparse import Indices, SparseCodec, few

__all__ = ["largest_of"]

_LEAST_SAMPLES: Final = 4096
_SHARE: Final = 64  # one item of so many is looked at


class TopK(SparseCodec):
    """A fraction of the items, the largest; among equals the first."""

    def __init__(
        self, fraction: float = 0.01, sampled: bool = False, values: ParcelCodec | None = None
    ) -> None:
        super().__init__(values)
        self._fraction = fraction
        self._sampled = sampled

    def most(self, parcel: Parcel) -> int:
        """The number of items that are sent: exact, unless sampled."""
        return few(self._fraction, parcel)

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        """The largest, or those above what a sample says is large."""
        count = self.most(parcel)
        if self._sampled and len(values) > 4 * _LEAST_SAMPLES:
            found = _by_sample(values, count, self.drawn(parcel))
            if found is not None:
                return found
        return largest_of(values, count)


def largest_of(values: Floats, count: int) -> tuple[Indices, Floats]:
    """Exactly `count` of them: among those that a sample says are surely enough, or among all."""
    if len(values) > 4 * _LEAST_SAMPLES and 8 * count < len(values):
        indices, kept = _not_below(values, _border(values, 2 * count, 0), 4 * count)
        if len(indices) >= count:
            best, kept = _largest(kept, count)
            return indices[best], kept
    return _largest(values, count)


def _largest(values: Floats, count: int) -> tuple[Indices, Floats]:
    indices, kept = np.empty(count, np.uint32), np.empty(count, np.float32)
    if count:
        largest(values, count, indices, kept)
    return indices, kept


def _by_sample(values: Floats, count: int, drawn: int) -> tuple[Indices, Floats] | None:
    """At most `count`; None where the sample says nothing, as among many equals."""
    indices, kept = _not_below(values, _border(values, count, drawn), 2 * count)
    if not len(indices):
        return None
    if len(indices) <= count:
        return indices, kept
    best, kept = _largest(kept, count)
    return indices[best], kept


def _border(values: Floats, count: int, drawn: int) -> np.float32:
    """The magnitude that about `count` items reach, estimated from a regular sample."""
    stride = max(1, len(values) // max(_LEAST_SAMPLES, len(values) // _SHARE))
    sample = np.abs(values[drawn % stride :: stride])
    place = max(0, len(sample) - math.ceil(count * len(sample) / len(values)))
    return np.float32(np.partition(sample, place)[place])


def _not_below(values: Floats, border: np.float32, room: int) -> tuple[Indices, Floats]:
    """All items of at least a magnitude; none where there are more than `room`."""
    indices, kept = np.empty(room, np.uint32), np.empty(room, np.float32)
    found = max(0, not_below(values, border, indices, kept))
    return indices[:found], kept[:found]
