"""Real atomics, fences and futexes for compiled code, addressed by plain integers.

Two processes that share memory agree on nothing but the words in it, so every word that one process writes and
another reads goes through these functions: loads acquire, stores release, read-modify-writes are sequentially
consistent. They are numba intrinsics (LLVM's own atomic instructions), right on x86 and on ARM.

An address is an int64: a pointer into a mapped `Segment`. Words are 4-byte (`_u32`, the size a futex needs) or 8-byte
(`_i64`) and must be aligned to their size.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from manyhands.native.decorators import inlined, njit

_X86 = platform.machine() in ("x86_64", "AMD64", "i686")
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 202)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_CLOCK_MONOTONIC = 1

_syscall = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64),
)
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


def _word(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _word_atomics(bits: int, kind: Any) -> tuple[Any, Any, Any]:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_word(builder, args[0], bits), "acquire", bits // 8)

        return kind(types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # seq_cst, not release: a waker stores its word and then reads the sleepers' count, and those two must
            # not pass each other, or a sleeper is forgotten.
            builder.store_atomic(args[1], _word(builder, args[0], bits), "seq_cst", bits // 8)
            return context.get_dummy_value()

        return types.void(types.int64, kind), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def add(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw("add", _word(builder, args[0], bits), args[1], "seq_cst")

        return kind(types.int64, kind), codegen

    return load, store, add


load_u32, store_u32, add_u32 = _word_atomics(32, types.uint32)
load_i64, store_i64, add_i64 = _word_atomics(64, types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def compare_swap_u32(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Put `desired` where `expected` stands; return whether it did."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_word(builder, args[0], 32), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.uint32, types.uint32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fence(typingctx: Any) -> Any:
    """Order everything before against everything after, on every core."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _X86:
            kind, name = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        else:
            builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    pointee = dtype.dtype

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointee).as_pointer())

    return types.CPointer(pointee)(types.int64, dtype), codegen


@intrinsic  # type: ignore[untyped-decorator]
def stack_pair(typingctx: Any) -> Any:
    """The address of two int64 on this call's stack (a timespec)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), 2))
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(), codegen


@inlined()
def array_at(address, count, dtype):  # type: ignore[no-untyped-def]
    """A one-dimensional array over `count` items at `address`; compiled code only."""
    return carray(_pointer(address, dtype), count, dtype)


@njit(nogil=True, cache=True)
def clock_ns():  # type: ignore[no-untyped-def]
    """CLOCK_MONOTONIC in nanoseconds: the same clock as `time.monotonic_ns`, shared by all processes of a host."""
    spec = stack_pair()
    _clock_gettime(types.int32(_CLOCK_MONOTONIC), spec)
    return load_i64(spec) * 1_000_000_000 + load_i64(spec + 8)


@njit(nogil=True, cache=True)
def futex_wait(address, expected, timeout_ns):  # type: ignore[no-untyped-def]
    """Sleep while the word at `address` is `expected`, at most `timeout_ns`; may return early for no reason."""
    spec = stack_pair()
    store_i64(spec, timeout_ns // 1_000_000_000)
    store_i64(spec + 8, timeout_ns % 1_000_000_000)
    return _syscall(_FUTEX_NUMBER, address, _FUTEX_WAIT, types.int64(expected), spec, 0, 0)


@njit(nogil=True, cache=True)
def futex_wake(address):  # type: ignore[no-untyped-def]
    return _syscall(_FUTEX_NUMBER, address, _FUTEX_WAKE, 2147483647, 0, 0, 0)
