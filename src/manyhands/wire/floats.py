"""Codecs whose arithmetic is compiled: on float32, whatever the parcel's own type.

A number of float64 is rounded to float32 first, one of a half is widened. Blocks that hold something that is not finite
say so with one mark in place of their scale, and all of the block is read as NaN: so a broken gradient stays visible.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyhands.wire.codec import BadBytes, ParcelCodec, expect_bytes
from manyhands.wire.kernels.marks import NOT_FINITE
from manyhands.wire.parcels import Parcel

__all__ = ["Bytes", "FloatCodec", "Floats", "blocks_of", "check_scales", "key_of"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_INFINITE: Final = 0x7F800000


class FloatCodec(ParcelCodec):
    """Fills in `size`, `pack` and `unpack`; parcels of one length take the same number of bytes, where `is_fixed`."""

    carries_values = False
    is_fixed: ClassVar[bool] = True

    @abstractmethod
    def pack(self, parcel: Parcel, values: Floats, into: Bytes) -> int:
        """Encode `values` into `into`; returns the number of bytes."""

    @abstractmethod
    def unpack(self, parcel: Parcel, encoded: Bytes, into: Floats) -> None:
        """Decode, or raise BadBytes."""

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        return self.pack(parcel, values.to(torch.float32).numpy(), into.numpy())

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Check the number of bytes, then `unpack` and convert."""
        if self.is_fixed:
            expect_bytes(encoded, self.size(parcel))
        if into.dtype == torch.float32:
            self.unpack(parcel, encoded.numpy(), into.numpy())
            return
        room = torch.empty(into.numel(), dtype=torch.float32)
        self.unpack(parcel, encoded.numpy(), room.numpy())
        into.copy_(room)


def blocks_of(count: int, block: int) -> int:
    """The number of blocks that `count` items make; the last one may be shorter."""
    return -(-count // block)


def check_scales(scales: npt.NDArray[np.uint32]) -> None:
    """Raise BadBytes unless every scale is a finite float32 of at least 0, or the mark."""
    good = (scales < _INFINITE) | (scales == NOT_FINITE)
    if not good.all():
        number = int(np.argmin(good))
        value: Any = scales[number : number + 1].view(np.float32)[0]
        raise BadBytes(f"block {number} has the scale {value}, which no block has")


def key_of(drawn: int) -> tuple[np.uint32, np.uint32]:
    """64 drawn bits as compiled code takes them."""
    return np.uint32(drawn & 0xFFFFFFFF), np.uint32(drawn >> 32)
