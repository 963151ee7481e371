"""Compiled reductions: one slice of every rank's part is combined in rank order and written back to all.

This is the arithmetic of the direct all-reduce on one host. The parts lie in shared memory, so the operands
are read where they are and the results land where they are needed: two passes over each part in all, the
least that leaves every rank with its own copy.

* The order is always ((v0 + v1) + v2) + ..., at every size, so the result does not depend on how a vector
  was sliced.
* float16 and bfloat16 are widened to float32, combined over all ranks in float32 and rounded once, to
  nearest even.
* The mean divides the sum by the number of ranks. The maximum of anything and NaN is NaN, as in
  `torch.maximum`; of +0.0 and -0.0 it is that of the higher rank.
* With one rank nothing is computed and the part stays as it is.
* A result may go to one part only, which is half of a reduce-scatter.

numba knows no 16-bit floats, so these travel as uint16. The key of numba's cache holds the CPU's name and features, so
a cache on a shared disk serves different machines.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import float32, float64, int64, types, uint8, uint16, uint32
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from manyhands.native.atomics import array_at
from manyhands.native.bits import bits_of, converter, float_of
from manyhands.native.decorators import cfunc, helper

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = 0, 1, 2, 3
SUM, MEAN, MAX, COPY = 0, 1, 2, 3  # COPY + r: rank r's slice goes to all

_BLOCK = 1024  # items accumulated at a time: with the block being read they stay in the first-level cache
SCRATCH_BYTES = _BLOCK * 8
ALL = -1  # a result that goes to every part


_extend_half = converter(
    uint16,
    float32,
    lambda builder, value: builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType()),
)
_truncate_to_half = converter(
    float32,
    uint16,
    lambda builder, value: builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16)),
)


@helper()
def _same(value: float) -> float:
    return value


@helper()
def _widen_bfloat(bits: int) -> float:
    return float_of(uint32(bits) << uint32(16))  # type: ignore[no-any-return]


@helper()
def _narrow_bfloat(value: float) -> int:
    bits = bits_of(value)
    odd = uint32(uint32(bits >> uint32(16)) & uint32(1))
    rounded = uint32(uint32(bits + uint32(0x7FFF)) + odd) >> uint32(16)
    quiet = uint32(bits >> uint32(16)) | uint32(0x40)  # rounding could carry a NaN over into infinity
    return uint16(rounded if value == value else quiet)  # type: ignore[no-any-return]


@helper()
def _widen_half_by_bits(bits: int) -> float:
    """The float16 in `bits`: re-bias the exponent; a float subtraction normalises a subnormal."""
    sign = (uint32(bits) & uint32(0x8000)) << uint32(16)
    shifted = (uint32(bits) & uint32(0x7FFF)) << uint32(13)
    exponent = shifted & uint32(0x0F800000)
    normal = uint32(shifted + uint32(0x38000000))
    special = uint32(normal + uint32(0x38000000))
    tiny = bits_of(float_of(uint32(normal + uint32(0x00800000))) - float_of(uint32(0x38800000)))
    magnitude = special if exponent == uint32(0x0F800000) else (tiny if exponent == 0 else normal)
    return float_of(uint32(magnitude | sign))  # type: ignore[no-any-return]


@helper()
def _narrow_half_by_bits(value: float) -> int:
    """The float16 nearest to `value`; adding one half makes the float unit itself round a subnormal."""
    sign = bits_of(value) & uint32(0x80000000)
    bits = uint32(bits_of(value) ^ sign)
    special = uint32(0x7E00) if bits > uint32(0x7F800000) else uint32(0x7C00)
    tiny = uint32(bits_of(float_of(bits) + float32(0.5)) - uint32(0x3F000000))
    odd = (bits >> uint32(13)) & uint32(1)
    normal = uint32(bits + uint32(0xC8000FFF) + odd) >> uint32(13)
    magnitude = special if bits >= uint32(0x47800000) else (tiny if bits < uint32(0x38800000) else normal)
    return uint16(magnitude | (sign >> uint32(16)))  # type: ignore[no-any-return]


# Where LLVM has no instructions to convert halves, it would call a library that is not there.
_features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
if platform.machine() == "aarch64" or "+f16c" in _features:
    _widen_half, _narrow_half = _extend_half, _truncate_to_half
else:
    _widen_half, _narrow_half = _widen_half_by_bits, _narrow_half_by_bits


@helper()
def _combine(one: float, other: float, largest: bool) -> float:
    """The larger of the two or their sum: computing both and selecting is free beside the memory's pace."""
    larger = one if (one > other) | (one != one) else other
    return larger if largest else one + other


def _compiled_for(name: str) -> Callable[[Any], Any]:
    """`helper` for a function that is made once for each type, with `name` in its own.

    Compiled code in the cache finds what it calls by name and by a number that each process counts anew. Code that two
    processes have compiled would otherwise share names, and the sum of one type would run the loop of another.
    """

    def compiled(function: Any) -> Any:
        function.__qualname__ = f"{function.__qualname__}_{name}"
        return helper()(function)

    return compiled


def _viewer(item: Any, name: str) -> Any:
    """Compiled code that sees items at an address as an array; a call of its own, so compiled only once."""

    @_compiled_for(name)
    def items_at(address: int, count: int) -> Any:
        return array_at(address, count, item)

    return items_at


_bytes_at = _viewer(uint8, "bytes")


def _pair_loops(name: str, widen: Any, narrow: Any) -> tuple[Any, Any]:
    """Two ranks: one pass, no scratch. A multiplication by 1 or by 1/2 is exact."""

    @_compiled_for(name)
    def reduce_pair(first: Any, second: Any, largest: bool, scale: float) -> None:
        for i in range(first.size):
            result = narrow(_combine(widen(first[i]), widen(second[i]), largest) * scale)
            first[i] = result
            second[i] = result

    @_compiled_for(name)
    def reduce_pair_to(first: Any, second: Any, target: int, largest: bool, scale: float) -> None:
        """A loop for each target: one that stored to either could alias both and would not be vectorised."""
        if target == 0:
            for i in range(first.size):
                first[i] = narrow(_combine(widen(first[i]), widen(second[i]), largest) * scale)
        else:
            for i in range(first.size):
                second[i] = narrow(_combine(widen(first[i]), widen(second[i]), largest) * scale)

    return reduce_pair, reduce_pair_to


def _block_loops(name: str, items_at: Any, widen: Any, narrow: Any) -> tuple[Any, Any]:
    """Three ranks or more, a block at a time: `total` and the block being read stay in the cache."""

    @_compiled_for(name)
    def add_up(parts: Any, ranks: int, shift: int, total: Any, largest: bool) -> None:
        first, second = items_at(parts[0] + shift, total.size), items_at(parts[1] + shift, total.size)
        for i in range(total.size):
            total[i] = _combine(widen(first[i]), widen(second[i]), largest)
        for rank in range(2, ranks):
            part = items_at(parts[rank] + shift, total.size)
            for i in range(total.size):
                total[i] = _combine(total[i], widen(part[i]), largest)

    @_compiled_for(name)
    def reduce_block(parts: Any, shift: int, total: Any, largest: bool, divisor: float) -> None:
        add_up(parts, parts.size - 1, shift, total, largest)
        last = items_at(parts[parts.size - 1] + shift, total.size)
        for i in range(total.size):
            last[i] = narrow(_combine(total[i], widen(last[i]), largest) / divisor)

    @_compiled_for(name)
    def reduce_block_to(parts: Any, target: int, shift: int, total: Any, most: bool, divisor: float) -> None:
        add_up(parts, parts.size, shift, total, most)
        result = items_at(parts[target] + shift, total.size)
        for i in range(total.size):
            result[i] = narrow(total[i] / divisor)

    return reduce_block, reduce_block_to


def _reducer(name: str, item: Any, wide: Any, widen: Any, narrow: Any) -> Any:
    items_at, totals_at = _viewer(item, name), _viewer(wide, f"{name}_total")
    item_bytes = item.bitwidth // 8
    reduce_pair, reduce_pair_to = _pair_loops(name, widen, narrow)
    reduce_block, reduce_block_to = _block_loops(name, items_at, widen, narrow)

    @_compiled_for(name)
    def reduce(parts: Any, count: int, operation: int, target: int, scratch: int) -> None:
        if _copied(parts, item_bytes * count, operation):
            return
        divisor = wide(parts.size if operation == MEAN else 1)
        if parts.size == 2:
            first, second = items_at(parts[0], count), items_at(parts[1], count)
            if target == ALL:
                reduce_pair(first, second, operation == MAX, wide(1) / divisor)
            else:
                reduce_pair_to(first, second, target, operation == MAX, wide(1) / divisor)
            return
        for begin in range(0, count, _BLOCK):
            size = min(_BLOCK, count - begin)
            shift, total = begin * item_bytes, totals_at(scratch, size)
            if target == ALL:
                reduce_block(parts, shift, total, operation == MAX, divisor)
                _spread(parts, parts.size - 1, shift, size * item_bytes)
            else:
                reduce_block_to(parts, target, shift, total, operation == MAX, divisor)

    return reduce


@helper()
def _spread(parts: Any, source: int, shift: int, num_bytes: int) -> None:
    block = _bytes_at(parts[source] + shift, num_bytes)
    for rank in range(parts.size):
        if rank != source:
            part = _bytes_at(parts[rank] + shift, num_bytes)
            for i in range(num_bytes):
                part[i] = block[i]


@helper()
def _copied(parts: Any, num_bytes: int, operation: int) -> bool:
    """Do what needs no arithmetic; whether that was all."""
    if parts.size == 1 or num_bytes == 0:
        return True
    if operation < COPY:
        return False
    for begin in range(0, num_bytes, SCRATCH_BYTES):
        _spread(parts, operation - COPY, begin, min(SCRATCH_BYTES, num_bytes - begin))
    return True


_reduce_float = _reducer("float32", float32, float32, _same, _same)
_reduce_double = _reducer("float64", float64, float64, _same, _same)
_reduce_bfloat = _reducer("bfloat16", uint16, float32, _widen_bfloat, _narrow_bfloat)
_reduce_half = _reducer("float16", uint16, float32, _widen_half, _narrow_half)


# Written out for each type: numba finds a function that was made by another one in no cache.
def _float32(table: int, world: int, count: int, operation: int, target: int, scratch: int) -> None:
    _reduce_float(array_at(table, world, int64), count, operation, target, scratch)


def _float64(table: int, world: int, count: int, operation: int, target: int, scratch: int) -> None:
    _reduce_double(array_at(table, world, int64), count, operation, target, scratch)


def _bfloat16(table: int, world: int, count: int, operation: int, target: int, scratch: int) -> None:
    _reduce_bfloat(array_at(table, world, int64), count, operation, target, scratch)


def _float16(table: int, world: int, count: int, operation: int, target: int, scratch: int) -> None:
    _reduce_half(array_at(table, world, int64), count, operation, target, scratch)


_ENTRIES = {FLOAT32: _float32, FLOAT64: _float64, BFLOAT16: _bfloat16, FLOAT16: _float16}


@cache
def _compiled(kind: int) -> Any:
    return cfunc(types.void(*[int64] * 6))(_ENTRIES[kind])


def reducer_address(kind: int) -> int:
    """The address of the compiled reduction of one type (FLOAT32 ...), for `call_reducer`.

    Compiled when it is first asked for: a program pays for the types it uses, seconds each, once per machine.
    """
    return int(_compiled(kind).address)


def reduce_parts(
    kind: int, parts: Sequence[int], count: int, operation: int, target: int, scratch: int
) -> None:
    """As `call_reducer`, from Python, for parts at these addresses; the interpreter's lock is free meanwhile.

    In the thread that calls: torch would have all its threads add, and after each addition they spin for milliseconds
    on the cores of others.
    """
    table = (ctypes.c_int64 * len(parts))(*parts)
    _compiled(kind).ctypes(ctypes.addressof(table), len(parts), count, operation, target, scratch)


def warm() -> None:
    reducer_address(FLOAT32)


def warm_double() -> None:
    reducer_address(FLOAT64)


@intrinsic  # type: ignore[untyped-decorator]
def call_reducer(
    _typing: Any, _address: Any, _table: Any, _world: Any, _count: Any, _op: Any, _target: Any, _scratch: Any
) -> Any:
    """Reduce `count` items in place at each of the `world` addresses that lie at address `table`.

    The operation is SUM, MEAN, MAX or COPY + root; the result goes to the part of rank `target` or, for ALL, to every
    part (COPY always does). `scratch` is the address of SCRATCH_BYTES of the caller's own. The slices must not
    overlap, and nobody else may touch them meanwhile. Through an address, so that its callers need not be compiled
    again with every type.
    """

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.void(*[int64] * 7), codegen
