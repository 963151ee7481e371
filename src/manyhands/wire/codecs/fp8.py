"""fp8: floating-point numbers of one byte (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), by blocks.

e4m3 has 4 significant bits and reaches 448, e5m2 has 3 and reaches 57344. Each block of 256 items is multiplied with
the power of two that brings its largest item just below that. The power travels as a byte: 127 more than its exponent,
255 for a block that holds something that is not finite (E8M0, as the OCP's microscaling formats have it).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from manyhands.wire.codec import BadBytes
from manyhands.wire.floats import Bytes, FloatCodec, Floats, blocks_of
from manyhands.wire.kernels.fp8_kernels import BLOCK, MARK, pack_fp8, unpack_fp8
from manyhands.wire.parcels import Parcel


class _Kind(NamedTuple):
    """A format of eight bits: bits of its fraction, bias of its exponent, and the code of its largest number."""

    fraction: int
    bias: int
    largest: int


_KINDS: Final = {"e4m3": _Kind(3, 7, 0x7E), "e5m2": _Kind(2, 15, 0x7B)}


class Fp8(FloatCodec):
    """One byte per block, then one byte per item."""

    def __init__(self, kind: str = "e4m3") -> None:
        self._kind = _KINDS[kind]

    def size(self, parcel: Parcel) -> int:
        return blocks_of(parcel.count, BLOCK) + parcel.count

    def pack(self, parcel: Parcel, values: Floats, into: Bytes) -> int:
        """Round to nearest, ties to even."""
        head, end = blocks_of(parcel.count, BLOCK), self.size(parcel)
        pack_fp8(values, into[:head], into[head:end], *self._kind)
        return end

    def unpack(self, parcel: Parcel, encoded: Bytes, into: Floats) -> None:
        """Decode; every value is a float32 times a power of two."""
        head = blocks_of(parcel.count, BLOCK)
        powers, codes = encoded[:head], encoded[head:]
        if len(powers) and ((powers > 247) & (powers < MARK)).any():
            raise BadBytes("a block has a scale that no block has")
        if unpack_fp8(powers, codes, into, *self._kind):
            raise BadBytes("an item is no number of this format")
