"""Codecs that send every item in fewer bits, by blocks with a scale each. Their arithmetic is compiled, on float32.

A number of float64 is rounded to float32 first, one of a half is widened. Blocks that hold something that is not finite
say so with one mark in place of their scale, and all of the block is read as NaN: so a broken gradient stays visible.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manyhands.wire import quantize_kernels as kernels
from manyhands.wire.codec import BadBytes, Bytes, Floats, ParcelCodec, expect_bytes, key_of
from manyhands.wire.parcels import Parcel
from manyhands.wire.quantize_kernels import NOT_FINITE

Scales = npt.NDArray[np.uint32]

_INFINITE: Final = 0x7F800000
_ONE: Final = 0x3F800000


class FloatCodec(ParcelCodec):
    """Fills in `pack` and `unpack` for float32; blocks of `block` items have `scale_bytes` each, before all items."""

    carries_values = False
    block: ClassVar[int]
    scale_bytes: ClassVar[int] = 4

    def item_bytes(self, count: int) -> int:
        """What `count` items take, without their scales: a byte each, unless a codec says otherwise."""
        return count

    @abstractmethod
    def pack(self, parcel: Parcel, values: Floats, scales: Any, items: Bytes) -> None:
        """Encode `values` into `scales`, which are words or bytes, and `items`."""

    @abstractmethod
    def unpack(self, scales: Any, items: Bytes, into: Floats) -> None:
        """Decode, or raise BadBytes."""

    def size(self, parcel: Parcel) -> int:
        return self._head(parcel) + self.item_bytes(parcel.count)

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        self.pack(parcel, values.to(torch.float32).numpy(), *self._parts(parcel, into))
        return self.size(parcel)

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        expect_bytes(encoded, self.size(parcel))
        scales, items = self._parts(parcel, encoded)
        if self.scale_bytes == 4:
            good = (scales < _INFINITE) | (scales == NOT_FINITE)
            if not good.all():
                number = int(np.argmin(good))
                value = scales[number : number + 1].view(np.float32)[0]
                raise BadBytes(f"block {number} has the invalid scale {value}")
        room = into if into.dtype == torch.float32 else torch.empty(into.numel(), dtype=torch.float32)
        self.unpack(scales, items, room.numpy())
        if room is not into:
            into.copy_(room)

    def _head(self, parcel: Parcel) -> int:
        return self.scale_bytes * -(-parcel.count // self.block)

    def _parts(self, parcel: Parcel, whole: Tensor) -> tuple[Any, Bytes]:
        """The scales, as words or bytes, and the items of an encoded parcel."""
        head, end = self._head(parcel), self.size(parcel)
        scales = whole[:head].numpy()
        return scales.view(np.uint32) if self.scale_bytes == 4 else scales, whole[head:end].numpy()


_KINDS: Final = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}
"""Formats of eight bits: bits of the fraction, bias of the exponent, and the code of the largest number."""


class Fp8(FloatCodec):
    """Floating-point numbers of one byte (Micikevicius et al., "FP8 Formats for Deep Learning", 2022), ties to even.

    e4m3 has 4 significant bits and reaches 448, e5m2 has 3 and reaches 57344. Each block of 256 items is multiplied
    with the power of two that brings its largest item just below that. The power travels as a byte: 127 more than its
    exponent, 255 for a block that holds something that is not finite (E8M0, as the OCP's microscaling formats have it).
    """

    block = kernels.FP8_BLOCK
    scale_bytes = 1

    def __init__(self, kind: str = "e4m3") -> None:
        self._kind = _KINDS[kind]

    def pack(self, parcel: Parcel, values: Floats, scales: Bytes, items: Bytes) -> None:  # noqa: ARG002
        kernels.pack_fp8(values, scales, items, *self._kind)

    def unpack(self, scales: Bytes, items: Bytes, into: Floats) -> None:
        if len(scales) and ((scales > 247) & (scales < kernels.FP8_MARK)).any():
            raise BadBytes("a block has an invalid scale")
        if kernels.unpack_fp8(scales, items, into, *self._kind):
            raise BadBytes("an item is not valid in this format")


class Int8(FloatCodec):
    """255 evenly spaced values, from minus to plus the largest of each block of 256 items, rounded to nearest."""

    block = kernels.INT8_BLOCK

    def pack(self, parcel: Parcel, values: Floats, scales: Scales, items: Bytes) -> None:  # noqa: ARG002
        kernels.pack_even(values, scales, items.view(np.int8), self.block, 127)

    def unpack(self, scales: Scales, items: Bytes, into: Floats) -> None:
        kernels.unpack_even(scales, items.view(np.int8), into, self.block)


class Int4(FloatCodec):
    """15 evenly spaced values, from minus to plus the largest of each block of 64 items, rounded to nearest."""

    block = kernels.INT4_BLOCK
    _most: ClassVar[int] = 7

    def item_bytes(self, count: int) -> int:
        return -(-count // 2)

    def pack(self, parcel: Parcel, values: Floats, scales: Scales, items: Bytes) -> None:
        codes = np.empty(parcel.count, np.int8)
        kernels.pack_even(values, scales, codes, self.block, self._most)
        kernels.pack_bits((codes + np.int8(self._most)).view(np.uint8), 4, items)

    def unpack(self, scales: Scales, items: Bytes, into: Floats) -> None:
        codes = np.empty(len(into), np.uint8)
        kernels.unpack_bits(items, 4, codes)
        if len(codes) and int(codes.max()) > 2 * self._most:
            raise BadBytes(f"an item is {int(codes.max())}, but there are {2 * self._most + 1} values")
        kernels.unpack_even(scales, codes.view(np.int8) - np.int8(self._most), into, self.block)


class Qsgd(FloatCodec):
    """QSGD (Alistarh et al., NIPS 2017): a few levels between 0 and the norm of each block of 512, rounded at random.

    An item x of a block of norm n becomes sign(x) · n · l / levels, where l is |x| / n · levels rounded up or down with
    the probabilities that make it right on average; the variance is at most min(d / levels², √d / levels) ‖x‖². Numbers
    of ⌈log₂(2 levels + 1)⌉ bits travel.
    """

    block = kernels.QSGD_BLOCK

    def __init__(self, levels: int = 7) -> None:
        self._levels = levels
        self._width = (2 * levels).bit_length()

    def item_bytes(self, count: int) -> int:
        return -(-count * self._width // 8)

    def pack(self, parcel: Parcel, values: Floats, scales: Scales, items: Bytes) -> None:
        codes = items if self._width == 8 else np.empty(parcel.count, np.uint8)
        kernels.draw_levels(values, scales, codes, self._levels, *key_of(self.drawn(parcel)))
        if self._width < 8:
            kernels.pack_bits(codes, self._width, items)

    def unpack(self, scales: Scales, items: Bytes, into: Floats) -> None:
        codes = items
        if self._width < 8:
            codes = np.empty(len(into), np.uint8)
            kernels.unpack_bits(items, self._width, codes)
        if len(codes) and int(codes.max()) > 2 * self._levels:
            raise BadBytes(f"an item is {int(codes.max())}, but there are {2 * self._levels + 1} values")
        kernels.multiply_levels(scales, codes, self._levels, into)


class Ternary(FloatCodec):
    """TernGrad (Wen et al., NIPS 2017): -s, 0 or s, where s is the largest size of each block of 640.

    An item of size |x| is kept with probability |x| / s: right on average. Five items take one byte: 3⁵ = 243.
    """

    block = kernels.TERNARY_BLOCK

    def item_bytes(self, count: int) -> int:
        return -(-count // 5)

    def pack(self, parcel: Parcel, values: Floats, scales: Scales, items: Bytes) -> None:
        kernels.pack_ternary(values, scales, items, *key_of(self.drawn(parcel)))

    def unpack(self, scales: Scales, items: Bytes, into: Floats) -> None:
        if len(items) and int(items.max()) >= kernels.TERNARY_VALUES:
            most = kernels.TERNARY_VALUES - 1
            raise BadBytes(f"a byte is {int(items.max())}, but five items are at most {most}")
        kernels.unpack_ternary(scales, items, into)


class Sign(FloatCodec):
    """One bit an item, 1 for a negative one, in words of 32; and the mean size of each block of d = 1024, so that

        ‖x - C(x)‖² = (1 - ‖x‖₁² / (d ‖x‖₂²)) ‖x‖²

    (Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019). `sign:vote` sends signs of size 1, and the sum over
    workers becomes its sign: -1, 0 or 1, the majority's (Bernstein et al., "signSGD with Majority Vote", ICLR 2019).
    """

    block = kernels.SIGN_BLOCK

    def __init__(self, kind: str = "scaled") -> None:
        self.sums_vote = kind == "vote"

    def item_bytes(self, count: int) -> int:
        return 4 * -(-count // 32)

    def pack(self, parcel: Parcel, values: Floats, scales: Scales, items: Bytes) -> None:  # noqa: ARG002
        kernels.pack_sign(values, scales, items.view(np.uint32))
        if self.sums_vote:
            scales[scales != NOT_FINITE] = _ONE

    def unpack(self, scales: Scales, items: Bytes, into: Floats) -> None:
        if self.sums_vote and not np.isin(scales, (_ONE, NOT_FINITE)).all():
            raise BadBytes("a vote must have size 1, but a block has another size")
        kernels.unpack_sign(scales, items.view(np.uint32), into)

    def finalize(self, parcel: Parcel, total: Tensor) -> None:  # noqa: ARG002
        """Replace the sum by the majority's sign, where there is a vote."""
        if self.sums_vote:
            total.sign_()
