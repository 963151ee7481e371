"""Items at random, each made as much larger as it is seldom sent: right on average, and no place travels.

The items of tensors are cut into as many stretches as items are sent, and one of each is drawn; receivers draw the
same from the 64 bits that come along. An item of a stretch of n is sent with probability 1 / n and then counts n times.
"""

from __future__ import annotations

import numpy as np

from manyhands.wire.codec import ParcelCodec
from manyhands.wire.floats import Bytes, Floats, key_of
from manyhands.wire.kernels.randomk_kernels import draw, enlarge
from manyhands.wire.parcels import Parcel
from manyhands.wire.sparse import Indices, SparseCodec, few

_KEY = 8


class RandomK(SparseCodec):
    """A fraction of the items; unbiased."""

    def __init__(self, fraction: float = 0.01, values: ParcelCodec | None = None) -> None:
        super().__init__(values)
        self._fraction = fraction

    def most(self, parcel: Parcel) -> int:
        return few(self._fraction, parcel)

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        indices = self._drawn(parcel, self.drawn(parcel))
        kept = np.empty(len(indices), np.float32)
        enlarge(values, parcel.tensor_items, indices, kept)
        return indices, kept

    def place_bytes(self, parcel: Parcel, count: int) -> int:
        """The bytes of the key that the places are drawn by."""
        del parcel, count
        return _KEY

    def write_places(self, parcel: Parcel, indices: Indices, into: Bytes) -> None:
        del indices
        into[:] = np.frombuffer(self.drawn(parcel).to_bytes(_KEY, "little"), np.uint8)

    def read_places(self, parcel: Parcel, encoded: Bytes, count: int) -> Indices:
        """Draw the same places from the key."""
        return self._drawn(parcel, int.from_bytes(encoded.tobytes(), "little"))[:count]

    def _drawn(self, parcel: Parcel, drawn: int) -> Indices:
        indices = np.empty(self.most(parcel), np.uint32)
        draw(parcel.tensor_items, indices, *key_of(drawn))
        return _beside_gaps(parcel, indices)


def _beside_gaps(parcel: Parcel, indices: Indices) -> Indices:
    """The places of items that were counted without those in gaps."""
    lengths = np.cumsum([0, *(end - begin for begin, end in parcel.gaps)])
    begins = [begin - before for (begin, _), before in zip(parcel.gaps, lengths, strict=False)]
    return indices + lengths[np.searchsorted(begins, indices, side="right")].astype(np.uint32)
