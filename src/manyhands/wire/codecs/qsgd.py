"""QSGD (Alistarh et al., NIPS 2017): a few levels between 0 and the norm of each block of 512, rounded at random.

An item x of a block of norm n becomes sign(x) · n · l / levels, where l is |x| / n · levels rounded up or down with the
probabilities that make it right on average; the variance is at most min(d / levels², √d / levels) ‖x‖². Numbers of
⌈log₂(2 levels + 1)⌉ bits travel.
"""

from __future__ import annotations

import numpy as np

from manyhands.wire.codec import BadBytes
from manyhands.wire.floats import Bytes, FloatCodec, Floats, blocks_of, check_scales, key_of
from manyhands.wire.kernels.packing import pack_bits, packed_bytes, unpack_bits
from manyhands.wire.kernels.qsgd_kernels import BLOCK, draw_levels, multiply
from manyhands.wire.parcels import Parcel


class Qsgd(FloatCodec):
    """A float32 per block, then a few bits per item."""

    def __init__(self, levels: int = 7) -> None:
        self._levels = levels
        self._width = (2 * levels).bit_length()

    def size(self, parcel: Parcel) -> int:
        return 4 * blocks_of(parcel.count, BLOCK) + packed_bytes(parcel.count, self._width)

    def pack(self, parcel: Parcel, values: Floats, into: Bytes) -> int:
        head, end = 4 * blocks_of(parcel.count, BLOCK), self.size(parcel)
        codes = into[head:end] if self._width == 8 else np.empty(parcel.count, np.uint8)
        draw_levels(values, into[:head].view(np.uint32), codes, self._levels, *key_of(self.drawn(parcel)))
        if self._width < 8:
            pack_bits(codes, self._width, into[head:end])
        return end

    def unpack(self, parcel: Parcel, encoded: Bytes, into: Floats) -> None:
        head = 4 * blocks_of(parcel.count, BLOCK)
        scales, codes = encoded[:head].view(np.uint32), encoded[head:]
        check_scales(scales)
        if self._width < 8:
            codes = np.empty(parcel.count, np.uint8)
            unpack_bits(encoded[head:], self._width, codes)
        if len(codes) and int(codes.max()) > 2 * self._levels:
            raise BadBytes(f"an item is {int(codes.max())}, and there are {2 * self._levels + 1} values")
        multiply(scales, codes, self._levels, into)
