"""int8: 255 evenly spaced values, from minus to plus the largest of each block of 256 items, rounded to nearest."""

from __future__ import annotations

import numpy as np

from manyhands.wire.floats import Bytes, FloatCodec, Floats, blocks_of, check_scales
from manyhands.wire.kernels.int8_kernels import BLOCK, pack_int8, unpack_int8
from manyhands.wire.parcels import Parcel


class Int8(FloatCodec):
    """A float32 per block, then one byte per item."""

    def size(self, parcel: Parcel) -> int:
        return 4 * blocks_of(parcel.count, BLOCK) + parcel.count

    def pack(self, parcel: Parcel, values: Floats, into: Bytes) -> int:
        head, end = 4 * blocks_of(parcel.count, BLOCK), self.size(parcel)
        pack_int8(values, into[:head].view(np.uint32), into[head:end].view(np.int8))
        return end

    def unpack(self, parcel: Parcel, encoded: Bytes, into: Floats) -> None:
        head = 4 * blocks_of(parcel.count, BLOCK)
        scales = encoded[:head].view(np.uint32)
        check_scales(scales)
        unpack_int8(scales, encoded[head:].view(np.int8), into)
