"""Codecs that send a few items of a parcel: how many, their values, and where they belong.

count (u32) · values, as float32 or by the codec that follows in a chain · places
"""

from __future__ import annotations

import math
from abc import abstractmethod
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyhands.data.randomness import mix
from manyhands.wire.codec import BadBytes, ParcelCodec, expect_bytes
from manyhands.wire.floats import Bytes, Floats
from manyhands.wire.kernels.indices import add_at, index_bytes, low_bits, read_indices, write_indices
from manyhands.wire.parcels import Parcel

__all__ = ["Indices", "SparseCodec", "empty_gaps", "few"]

Indices = npt.NDArray[np.uint32]

_HEAD = 4


def few(fraction: float, parcel: Parcel) -> int:
    """How many of a parcel's items a fraction is: of those that belong to tensors, at least one of any, rounded up.

    By the fraction's decimal digits: in binary, 0.07 of 100 is more than 7.
    """
    items = parcel.tensor_items
    return min(items, math.ceil(Decimal(repr(fraction)) * items))


def empty_gaps(parcel: Parcel, values: Tensor) -> None:
    """Set to 0 what earlier sums have left between tensors, so that it is not chosen."""
    for begin, end in parcel.gaps:
        values[begin:end] = 0.0


class SparseCodec(ParcelCodec):
    """Fills in how many items it sends at `most`, and which it chooses; `values` encodes what they are."""

    carries_values = False

    def __init__(self, values: ParcelCodec | None = None) -> None:
        self._values = values

    @abstractmethod
    def most(self, parcel: Parcel) -> int:
        """How many items it sends at most."""

    @abstractmethod
    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        """The places of those that are sent, ascending, and what is sent of them."""

    def place_bytes(self, parcel: Parcel, count: int) -> int:
        return index_bytes(parcel.count, count)

    def write_places(self, parcel: Parcel, indices: Indices, into: Bytes) -> None:
        write_indices(indices, low_bits(parcel.count, len(indices)), into)

    def read_places(self, parcel: Parcel, encoded: Bytes, count: int) -> Indices:
        """Where they belong, or BadBytes."""
        indices = np.empty(count, np.uint32)
        if not read_indices(encoded, low_bits(parcel.count, count), parcel.count, indices):
            raise BadBytes(f"{count} places do not ascend within {parcel.count} items")
        return indices

    def size(self, parcel: Parcel) -> int:
        """Of the most items that may be sent."""
        return self._size_of(parcel, self.most(parcel))

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        """Choose, and write those."""
        empty_gaps(parcel, values)
        indices, kept = self.choose(parcel, values.to(torch.float32).numpy())
        return self.write(parcel, indices, kept, into)

    def write(self, parcel: Parcel, indices: Indices, kept: Floats, into: Tensor) -> int:
        count = len(indices)
        middle = _HEAD + self._value_bytes(parcel, count)
        into[:_HEAD].view(torch.int32)[0] = count
        if self._values is None:
            into[_HEAD:middle].view(torch.float32).copy_(torch.from_numpy(kept))
        else:
            self._values.encode(self._parcel_of(parcel, count), torch.from_numpy(kept), into[_HEAD:middle])
        end = middle + self.place_bytes(parcel, count)
        self.write_places(parcel, indices, into[middle:end].numpy())
        return end

    def read(self, parcel: Parcel, encoded: Tensor) -> tuple[Indices, Tensor]:
        """The places and the values, or BadBytes."""
        if encoded.numel() < _HEAD:
            raise BadBytes(f"{encoded.numel()} bytes came, where {_HEAD} say how many items there are")
        count = int(encoded[:_HEAD].view(torch.int32).item())
        if not 0 <= count <= self.most(parcel):
            raise BadBytes(f"{count} items came, of at most {self.most(parcel)}")
        expect_bytes(encoded, self._size_of(parcel, count))
        middle = _HEAD + self._value_bytes(parcel, count)
        if self._values is None:
            values = encoded[_HEAD:middle].view(torch.float32)
        else:
            values = torch.empty(count)
            self._values.decode(self._parcel_of(parcel, count), encoded[_HEAD:middle], values)
        return self.read_places(parcel, encoded[middle:].numpy(), count), values

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """All other items are 0."""
        indices, values = self.read(parcel, encoded)
        into.zero_()
        _add(into, indices, values, 1.0)

    def add(self, parcel: Parcel, encoded: Tensor, into: Tensor, alpha: float = 1.0) -> None:
        """Only where something came."""
        indices, values = self.read(parcel, encoded)
        _add(into, indices, values, alpha)

    def at(self, step: int) -> None:
        super().at(step)
        if self._values is not None:
            self._values.at(step)

    def from_worker(self, seed: int, worker: int) -> None:
        super().from_worker(seed, worker)
        if self._values is not None:
            self._values.from_worker(mix(seed, 1), worker)  # or both would draw the same

    def _parcel_of(self, parcel: Parcel, count: int) -> Parcel:
        return Parcel(
            number=parcel.number, begin=parcel.begin, end=parcel.begin + 4 * count, dtype=torch.float32
        )

    def _value_bytes(self, parcel: Parcel, count: int) -> int:
        return 4 * count if self._values is None else self._values.size(self._parcel_of(parcel, count))

    def _size_of(self, parcel: Parcel, count: int) -> int:
        return _HEAD + self._value_bytes(parcel, count) + self.place_bytes(parcel, count)


def _add(into: Tensor, indices: Indices, values: Tensor, alpha: float) -> None:
    if into.dtype == torch.float32:
        add_at(values.numpy(), indices, into.numpy(), np.float32(alpha))
    else:
        places = torch.from_numpy(indices.astype(np.int64))
        into.index_add_(0, places, values.to(into.dtype), alpha=alpha)
