"""Shorter floating-point types, rounded to nearest, ties to even. Stateless.

bfloat16 has the sign, the exponent and the first 7 bits of the fraction: the range of float32 in two bytes. float16 has
11 significant bits in two bytes; from 65520 on, what is too large becomes infinite. float32, for gradients in double
precision, has 24 significant bits; beyond 3.4e38 it is infinite.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from manyhands.wire.codec import ParcelCodec, expect_bytes
from manyhands.wire.parcels import Parcel


class Bf16(ParcelCodec):
    """The items in another type; every value of it is exact in the wider one."""

    dtype: ClassVar = torch.bfloat16

    def size(self, parcel: Parcel) -> int:
        return self.dtype.itemsize * parcel.count

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        num_bytes = self.size(parcel)
        into[:num_bytes].view(self.dtype).copy_(values)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        expect_bytes(encoded, self.size(parcel))
        into.copy_(encoded.view(self.dtype))


class Fp16(Bf16):
    """See `Bf16`."""

    dtype = torch.float16


class Fp32(Bf16):
    """See `Bf16`."""

    dtype = torch.float32
