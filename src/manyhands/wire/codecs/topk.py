"""The largest items (Aji and Heafield, EMNLP 2017): what is left out is at most 1 - fraction of the squared size.

`sampled` looks at a part of the items to guess the size from which on they are large, so the rest is read once and not
three times; it then sends at most as many, and mostly about as many.
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

__all__ = ["TopK", "largest_of"]

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
        """Exactly so many, unless sampled."""
        return few(self._fraction, parcel.count)

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        """The largest, or those above what a sample says is large."""
        count = self.most(parcel)
        if self._sampled and len(values) > 4 * _LEAST_SAMPLES:
            found = _by_sample(values, count, self.drawn(parcel))
            if found is not None:
                return found
        return largest_of(values, count)


def largest_of(values: Floats, count: int) -> tuple[Indices, Floats]:
    """Exactly `count` of them."""
    indices, kept = np.empty(count, np.uint32), np.empty(count, np.float32)
    if count:
        largest(values, count, indices, kept)
    return indices, kept


def _by_sample(values: Floats, count: int, drawn: int) -> tuple[Indices, Floats] | None:
    """At most `count`; None where the sample says nothing, as among many equals."""
    stride = max(1, len(values) // max(_LEAST_SAMPLES, len(values) // _SHARE))
    sample = np.abs(values[drawn % stride :: stride])
    place = len(sample) - math.ceil(count * len(sample) / len(values))
    border = np.partition(sample, place)[place]
    indices, kept = np.empty(2 * count, np.uint32), np.empty(2 * count, np.float32)
    found = not_below(values, border, indices, kept)
    if found <= 0:
        return None
    indices, kept = indices[:found], kept[:found]
    if found <= count:
        return indices, kept
    best, kept = largest_of(kept, count)
    return indices[best], kept
