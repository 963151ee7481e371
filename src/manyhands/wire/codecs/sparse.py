"""Codecs that send a few items of a parcel: how many, their values, and where they belong.

count (u32) · values, as float32 or by the codec that follows in a chain · places
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyhands.data.randomness import mix
from manyhands.wire import sparse_kernels as kernels
from manyhands.wire.codec import BadBytes, Bytes, Floats, ParcelCodec, expect_bytes, key_of
from manyhands.wire.parcels import Parcel

Indices = npt.NDArray[np.uint32]
Inner = ParcelCodec | None

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
    """Fills in which items it chooses, a `fraction` at `most`; `values` encodes what they are."""

    carries_values = False

    def __init__(self, fraction: float, values: Inner = None) -> None:
        self._fraction, self.inner = fraction, values

    def most(self, parcel: Parcel) -> int:
        """How many items it sends at most."""
        return few(self._fraction, parcel)

    @abstractmethod
    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        """The places of those that are sent, ascending, and what is sent of them."""

    def place_bytes(self, parcel: Parcel, count: int) -> int:
        return kernels.index_bytes(parcel.count, count)

    def write_places(self, parcel: Parcel, indices: Indices, into: Bytes) -> None:
        kernels.write_indices(indices, kernels.low_bits(parcel.count, len(indices)), into)

    def read_places(self, parcel: Parcel, encoded: Bytes, count: int) -> Indices:
        indices = np.empty(count, np.uint32)
        if not kernels.read_indices(encoded, kernels.low_bits(parcel.count, count), parcel.count, indices):
            raise BadBytes(f"{count} positions must ascend and be below {parcel.count}")
        return indices

    def size(self, parcel: Parcel) -> int:
        return self._size_of(parcel, self.most(parcel))

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        empty_gaps(parcel, values)
        indices, kept = self.choose(parcel, values.to(torch.float32).numpy())
        return self.write(parcel, indices, kept, into)

    def write(self, parcel: Parcel, indices: Indices, kept: Floats, into: Tensor) -> int:
        count = len(indices)
        middle = _HEAD + self._value_bytes(parcel, count)
        into[:_HEAD].view(torch.int32)[0] = count
        if self.inner is None:
            into[_HEAD:middle].view(torch.float32).copy_(torch.from_numpy(kept))
        else:
            self.inner.encode(self._parcel_of(parcel, count), torch.from_numpy(kept), into[_HEAD:middle])
        end = middle + self.place_bytes(parcel, count)
        self.write_places(parcel, indices, into[middle:end].numpy())
        return end

    def read(self, parcel: Parcel, encoded: Tensor) -> tuple[Indices, Tensor]:
        if encoded.numel() < _HEAD:
            raise BadBytes(f"received {encoded.numel()} bytes; the number of items alone takes {_HEAD}")
        count = int(encoded[:_HEAD].view(torch.int32).item())
        if not 0 <= count <= self.most(parcel):
            raise BadBytes(f"received {count} items; at most {self.most(parcel)} are allowed")
        expect_bytes(encoded, self._size_of(parcel, count))
        middle = _HEAD + self._value_bytes(parcel, count)
        if self.inner is None:
            values = encoded[_HEAD:middle].view(torch.float32)
        else:
            values = torch.empty(count)
            self.inner.decode(self._parcel_of(parcel, count), encoded[_HEAD:middle], values)
        return self.read_places(parcel, encoded[middle:].numpy(), count), values

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        found = self.read(parcel, encoded)  # or raises, and leaves `into` as it is
        self._add(into.zero_(), *found, 1.0)

    def add(self, parcel: Parcel, encoded: Tensor, into: Tensor, alpha: float = 1.0) -> None:
        self._add(into, *self.read(parcel, encoded), alpha)

    @staticmethod
    def _add(into: Tensor, indices: Indices, values: Tensor, alpha: float) -> None:
        if into.dtype == torch.float32:
            kernels.add_at(values.numpy(), indices, into.numpy(), np.float32(alpha))
        else:
            places = torch.from_numpy(indices.astype(np.int64))
            into.index_add_(0, places, values.to(into.dtype), alpha=alpha)

    def from_worker(self, seed: int, worker: int) -> None:
        self.seed, self.worker = seed, worker
        if self.inner is not None:
            self.inner.from_worker(mix(seed, 1), worker)  # or both would draw the same

    def _parcel_of(self, parcel: Parcel, count: int) -> Parcel:
        end = parcel.begin + 4 * count
        return Parcel(number=parcel.number, begin=parcel.begin, end=end, dtype=torch.float32)

    def _value_bytes(self, parcel: Parcel, count: int) -> int:
        return 4 * count if self.inner is None else self.inner.size(self._parcel_of(parcel, count))

    def _size_of(self, parcel: Parcel, count: int) -> int:
        return _HEAD + self._value_bytes(parcel, count) + self.place_bytes(parcel, count)


_LEAST_SAMPLES: Final = 4096
_SHARE: Final = 64  # one item of so many is looked at


class TopK(SparseCodec):
    """The largest items (Aji and Heafield, EMNLP 2017), among equals the first.

    What is left out is at most 1 - fraction of the squared size. A part of the items is looked at to guess the size
    from which on they are large: so all are read once, and those from that size on are few enough to be counted
    exactly. `sampled` takes the guess for the border: it sends at most as many, and mostly about as many.
    """

    def __init__(self, fraction: float = 0.01, sampled: bool = False, values: Inner = None) -> None:
        super().__init__(fraction, values)
        self._sampled = sampled

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        count = self.most(parcel)
        if self._sampled and len(values) > 4 * _LEAST_SAMPLES:
            indices, kept = _not_below(values, _border(values, count, self.drawn(parcel)), 2 * count)
            if 0 < len(indices) <= count:
                return indices, kept
            if len(indices):
                best, kept = _largest(kept, count)
                return indices[best], kept
        return largest_of(values, count)  # also where the sample says nothing, as among many equals


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
        kernels.largest(values, count, indices, kept)
    return indices, kept


def _border(values: Floats, count: int, drawn: int) -> np.float32:
    """The magnitude that about `count` items reach, estimated from a regular sample."""
    stride = max(1, len(values) // max(_LEAST_SAMPLES, len(values) // _SHARE))
    sample = np.abs(values[drawn % stride :: stride])
    place = max(0, len(sample) - math.ceil(count * len(sample) / len(values)))
    return np.float32(np.partition(sample, place)[place])


def _not_below(values: Floats, border: np.float32, room: int) -> tuple[Indices, Floats]:
    """All items of at least a magnitude; none where there are more than `room`."""
    indices, kept = np.empty(room, np.uint32), np.empty(room, np.float32)
    found = max(0, kernels.not_below(values, border, indices, kept))
    return indices[:found], kept[:found]


_KEY = 8


class RandomK(SparseCodec):
    """Items at random, each made as much larger as it is seldom sent: right on average, and no place travels.

    The items of tensors are cut into as many stretches as items are sent, and one of each is drawn; receivers draw the
    same from the 64 bits that come along. An item of a stretch of n is sent with probability 1 / n and counts n times.
    """

    def __init__(self, fraction: float = 0.01, values: Inner = None) -> None:
        super().__init__(fraction, values)

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        indices = self._drawn(parcel, self.drawn(parcel))
        kept = np.empty(len(indices), np.float32)
        kernels.enlarge(values, parcel.tensor_items, indices, kept)
        return indices, kept

    def place_bytes(self, parcel: Parcel, count: int) -> int:  # noqa: ARG002
        return _KEY

    def write_places(self, parcel: Parcel, indices: Indices, into: Bytes) -> None:  # noqa: ARG002
        into[:] = np.frombuffer(self.drawn(parcel).to_bytes(_KEY, "little"), np.uint8)

    def read_places(self, parcel: Parcel, encoded: Bytes, count: int) -> Indices:
        return self._drawn(parcel, int.from_bytes(encoded.tobytes(), "little"))[:count]

    def _drawn(self, parcel: Parcel, drawn: int) -> Indices:
        indices = np.empty(self.most(parcel), np.uint32)
        kernels.draw(parcel.tensor_items, indices, *key_of(drawn))
        # They were counted without the items in gaps.
        lengths = np.cumsum([0, *(end - begin for begin, end in parcel.gaps)])
        begins = [begin - before for (begin, _), before in zip(parcel.gaps, lengths, strict=False)]
        return indices + lengths[np.searchsorted(begins, indices, side="right")].astype(np.uint32)


_FIRST = 0.25
_QUARTERS = 4


class DgcSums(SparseCodec):
    """The variant of `Dgc` for sums, which include their momentum already: top-k, with more items in the first steps.

    In the first `warmup` steps a quarter, a sixteenth, … of the items are sent, a quarter of these steps each, until
    `fraction` is.
    """

    def __init__(self, fraction: float = 0.001, warmup: int = 0, values: Inner = None) -> None:
        super().__init__(fraction, values)
        self._warmup = warmup

    def density(self, step: int) -> float:
        if step >= self._warmup:
            return self._fraction
        return max(self._fraction, _FIRST ** (1 + _QUARTERS * step // self._warmup))

    def most(self, parcel: Parcel) -> int:
        return few(self.density(0), parcel)

    def usual_size(self, parcel: Parcel) -> int:
        """The mean over the warm-up: so even that takes less than what is not encoded, in the form that is chosen."""
        if not self._warmup:
            return self.size(parcel)
        shares = [max(self._fraction, _FIRST ** (1 + quarter)) for quarter in range(_QUARTERS)]
        return sum(self._size_of(parcel, few(share, parcel)) for share in shares) // _QUARTERS

    def choose(self, parcel: Parcel, values: Floats) -> tuple[Indices, Floats]:
        return largest_of(values, few(self.density(self.step), parcel))


class Dgc(DgcSums):
    """Deep gradient compression (Lin et al., ICLR 2018): the largest items of a momentum that every worker keeps.

        u ← momentum · u + clipped gradient        v ← v + u
        the largest items of v are sent; where they were, v and u begin at 0 again

    So what is late still has the momentum it would have had. The optimizer must then have none of its own. `clip` is
    the largest norm that the gradient of a parcel may have, 0 for any. Momentum and residual are of the parcel's type.
    """

    def __init__(
        self,
        fraction: float = 0.001,
        momentum: float = 0.9,
        clip: float = 0.0,
        warmup: int = 0,
        values: Inner = None,
    ) -> None:
        super().__init__(fraction, warmup, values)
        self.momentum, self._clip = momentum, clip
        self._velocity: dict[str, Tensor] = {}
        self._residual: dict[str, Tensor] = {}

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        empty_gaps(parcel, values)
        velocity = self._velocity.setdefault(parcel.key, torch.zeros_like(values))
        residual = self._residual.setdefault(parcel.key, torch.zeros_like(values))
        norm = float(values.norm()) if self._clip else 0.0
        clipped = self._clip / norm if norm > self._clip else 1.0
        velocity.mul_(self.momentum).add_(values, alpha=clipped)
        residual.add_(velocity)
        indices, kept = self.choose(parcel, residual.to(torch.float32).numpy())
        num_bytes = self.write(parcel, indices, kept, into)
        velocity[torch.from_numpy(indices.astype(np.int64))] = 0.0
        self.add(parcel, into[:num_bytes], residual, -1.0)
        for one in (velocity, residual):
            if not one.sum().isfinite():
                one.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return num_bytes

    def memory(self) -> dict[str, Tensor]:
        kept = {f"velocity/{key}": one for key, one in self._velocity.items()}
        return kept | {f"owed/{key}": one for key, one in self._residual.items()}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        for name, one in memory.items():
            kind, _, key = name.partition("/")
            {"velocity": self._velocity, "owed": self._residual}[kind][key] = one.clone()
