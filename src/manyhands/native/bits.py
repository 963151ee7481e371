"""Conversions that numba has no word for: a float32 as its bits, and back."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, uint32
from numba.extending import intrinsic

__all__ = ["bits_of", "converter", "float_of"]


def converter(source: Any, target: Any, convert: Any) -> Any:
    """An intrinsic that turns one `source` into one `target` by `convert(builder, value)`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def conversion(_typing: Any, _value: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return convert(builder, args[0])

        return target(source), codegen

    return conversion


bits_of = converter(float32, uint32, lambda builder, value: builder.bitcast(value, ir.IntType(32)))
"""The bits of a float32."""

float_of = converter(uint32, float32, lambda builder, value: builder.bitcast(value, ir.FloatType()))
"""The float32 of 32 bits."""
