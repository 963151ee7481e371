"""Ternary gradients (Wen et al., "TernGrad", NIPS 2017): -s, 0 or s, where s is the largest size of each block of 640.

An item of size |x| is kept with probability |x| / s: right on average. Five items take one byte: 3⁵ = 243.
"""

from __future__ import annotations

import numpy as np

from manyhands.wire.codec import BadBytes
from manyhands.wire.floats import Bytes, FloatCodec, Floats, blocks_of, check_scales, key_of
from manyhands.wire.kernels.ternary_kernels import BLOCK, VALUES, pack_ternary, unpack_ternary
from manyhands.wire.parcels import Parcel


class Ternary(FloatCodec):
    """A float32 per block, then one byte per five items."""

    def size(self, parcel: Parcel) -> int:
        return 4 * blocks_of(parcel.count, BLOCK) + blocks_of(parcel.count, 5)

    def pack(self, parcel: Parcel, values: Floats, into: Bytes) -> int:
        head, end = 4 * blocks_of(parcel.count, BLOCK), self.size(parcel)
        pack_ternary(values, into[:head].view(np.uint32), into[head:end], *key_of(self.drawn(parcel)))
        return end

    def unpack(self, parcel: Parcel, encoded: Bytes, into: Floats) -> None:
        head = 4 * blocks_of(parcel.count, BLOCK)
        scales, codes = encoded[:head].view(np.uint32), encoded[head:]
        check_scales(scales)
        if len(codes) and int(codes.max()) >= VALUES:
            raise BadBytes(f"a byte is {int(codes.max())}, and five items make at most {VALUES - 1}")
        unpack_ternary(scales, codes, into)
