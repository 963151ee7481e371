"""bfloat16: the sign, the exponent and the first 7 bits of the fraction, rounded to nearest, ties to even."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec, expect_bytes
from manyhands.wire.parcels import Parcel

__all__ = ["Bf16"]


class Bf16(ParcelCodec):
    """Two bytes an item, of the range of float32; nothing is kept."""

    def size(self, parcel: Parcel) -> int:
        """Always exactly so many."""
        return 2 * parcel.count

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        """Round."""
        num_bytes = self.size(parcel)
        into[:num_bytes].view(torch.bfloat16).copy_(values)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Every bfloat16 is a number of the wider type."""
        expect_bytes(encoded, self.size(parcel))
        into.copy_(encoded.view(torch.bfloat16))
