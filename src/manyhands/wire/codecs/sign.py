"""Signs: one bit an item, and the mean size of each block of 1024, so that in each block of d items

    ‖x - C(x)‖² = (1 - ‖x‖₁² / (d ‖x‖₂²)) ‖x‖²

(Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).

`sign:vote` sends signs of size 1, and the sum over workers becomes its sign: -1, 0 or 1, the majority's (Bernstein et
al., "signSGD with Majority Vote", ICLR 2019).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from torch import Tensor

from manyhands.wire.codec import BadBytes
from manyhands.wire.floats import Bytes, FloatCodec, Floats, blocks_of, check_scales
from manyhands.wire.kernels.marks import NOT_FINITE
from manyhands.wire.kernels.sign_kernels import BLOCK, pack_sign, unpack_sign
from manyhands.wire.parcels import Parcel

_ONE: Final = 0x3F800000


class Sign(FloatCodec):
    """A float32 per block, then one bit per item, in words of 32: 1 for a negative item."""

    def __init__(self, kind: str = "scaled") -> None:
        self.sums_vote = kind == "vote"

    def size(self, parcel: Parcel) -> int:
        return 4 * blocks_of(parcel.count, BLOCK) + 4 * blocks_of(parcel.count, 32)

    def pack(self, parcel: Parcel, values: Floats, into: Bytes) -> int:
        head, end = 4 * blocks_of(parcel.count, BLOCK), self.size(parcel)
        scales = into[:head].view(np.uint32)
        pack_sign(values, scales, into[head:end].view(np.uint32))
        if self.sums_vote:
            scales[scales != NOT_FINITE] = _ONE
        return end

    def unpack(self, parcel: Parcel, encoded: Bytes, into: Floats) -> None:
        head = 4 * blocks_of(parcel.count, BLOCK)
        scales = encoded[:head].view(np.uint32)
        check_scales(scales)
        if self.sums_vote and not np.isin(scales, (_ONE, NOT_FINITE)).all():
            raise BadBytes("a vote counts 1, and a block came with another size")
        unpack_sign(scales, encoded[head:].view(np.uint32), into)

    def settle(self, parcel: Parcel, total: Tensor) -> None:
        """Replace the sum by the majority's sign, where there is a vote."""
        del parcel
        if self.sums_vote:
            total.sign_()
