"""float32, of gradients in double precision: 24 significant bits, rounded to nearest, ties to even."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec, expect_bytes
from manyhands.wire.parcels import Parcel

__all__ = ["Fp32"]


class Fp32(ParcelCodec):
    """Four bytes per item, half of a float64; values beyond 3.4e38 become infinite. Stateless."""

    def size(self, parcel: Parcel) -> int:
        return 4 * parcel.count

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        num_bytes = self.size(parcel)
        into[:num_bytes].view(torch.float32).copy_(values)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Widen; every float32 is exact in the wider type."""
        expect_bytes(encoded, self.size(parcel))
        into.copy_(encoded.view(torch.float32))
