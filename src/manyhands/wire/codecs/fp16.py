"""float16: 11 significant bits, rounded to nearest, ties to even; from 65520 on, what is too large becomes infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec, expect_bytes
from manyhands.wire.parcels import Parcel

__all__ = ["Fp16"]


class Fp16(ParcelCodec):
    """Two bytes per item, finer than bfloat16 and of a smaller range; stateless."""

    def size(self, parcel: Parcel) -> int:
        return 2 * parcel.count

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        num_bytes = self.size(parcel)
        into[:num_bytes].view(torch.float16).copy_(values)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Widen; every float16 is exact in the wider type."""
        expect_bytes(encoded, self.size(parcel))
        into.copy_(encoded.view(torch.float16))
