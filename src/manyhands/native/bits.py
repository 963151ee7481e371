"""Bits in compiled code: a float32 as its bits and back, and random bits by place.

The i-th random number of a key is a function of both, so nothing is carried from one to the next.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, uint32
from numba.extending import intrinsic

from manyhands.native.decorators import inlined


def converter(source: Any, target: Any, convert: Any) -> Any:
    """An intrinsic that turns one `source` into one `target` by `convert(builder, value)`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def conversion(_typing: Any, _value: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return convert(builder, args[0])

        return target(source), codegen

    return conversion


bits_of = converter(float32, uint32, lambda builder, value: builder.bitcast(value, ir.IntType(32)))
float_of = converter(uint32, float32, lambda builder, value: builder.bitcast(value, ir.FloatType()))


@inlined()
def bits_at(place: int, low: int, high: int) -> int:
    """32 bits: two rounds of multiplying and shifting, each begun with half of the key."""
    x = uint32(uint32(place) * uint32(0x9E3779B1)) ^ low
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x ^ (x >> uint32(15))) ^ high
    x = uint32(uint32(x) * uint32(0x846CA68B))
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    return uint32(x ^ (x >> uint32(15)))  # type: ignore[no-any-return]


@inlined()
def uniform_at(place: int, low: int, high: int) -> float:
    """From 0 to below 1, in steps of 2^-24."""
    return float32(bits_at(place, low, high) >> uint32(8)) * float32(2.0**-24)  # type: ignore[no-any-return]
