"""bfloat16: the sign, the exponent and the first 7 bits of the fraction, rounded to nearest, ties to even."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec, expect_bytes
from manyhands.wire.parcels import Parcel

__all__ = ["Bf16"]


class Bf16(ParcelCodec):
    """Two bytes per item, with the range of float32; stateless."""

    def size(self, parcel: Parcel) -> int:
        return 2 * parcel.count

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        num_bytes = self.size(parcel)
        into[:num_bytes].view(torch.bfloat16).copy_(values)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Widen; every bfloat16 is exact in the wider type."""
        expect_bytes(encoded, self.size(parcel))
        into.copy_(encoded.view(torch.bfloat16))
