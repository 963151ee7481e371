"""A byte stream through shared memory: one producer, one consumer, two counters (Lamport's ring, 1977).

Each side owns a cache line. In it are a word that the other side waits for (see `native.waiting`), which
counts the bytes written or read modulo 2^32; the same count in full, for the side itself; and how it left:

      0  written (word) · 64 cursor (i64) · 72 state (u32)       the producer's line
    128  read (word) · 64 cursor (i64) · 72 state (u32)          the consumer's line
    256  ended (u32): not 0 once a side has left · 8 capacity (i64)
    384  the bytes

The stream knows nothing of messages: anything longer than the ring flows through it in pieces of a quarter of
it, so that both sides copy at the same time.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import int64, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from manyhands.native.atomics import (
    clock_ns,
    fence,
    futex_wake,
    load_i64,
    load_u32,
    pause,
    store_i64,
    store_u32,
)
from manyhands.native.decorators import helper, inlined, njit
from manyhands.native.segment import CACHE_LINE
from manyhands.native.waiting import announce, wait_until

CONTROL_BYTES: Final = 3 * CACHE_LINE
MAX_CAPACITY_BYTES: Final = 1 << 30  # the counters are compared modulo 2^32

OPEN: Final = 0  # this side still works on the ring
CLOSED: Final = 1  # this side left, and everything it had to say is in the ring
CUT: Final = 2  # this side left with something unsaid

_CURSOR, _STATE = 64, 72  # well past the word, whatever its waiters keep beside it
_ENDED, _CAPACITY = 2 * CACHE_LINE, 2 * CACHE_LINE + 8
_PIECES = 4
_NAP_NS: Final = 200_000
ROW_BYTES: Final = 48  # in the table of `carry`


@intrinsic  # type: ignore[untyped-decorator]
def _copy(typingctx: Any, target: Any, source: Any, num_bytes: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@inlined()
def _ready(cursor: int, producer: int) -> int:
    return int64(uint32(load_u32(producer) - uint32(cursor)))  # type: ignore[no-any-return]


@inlined()
def _room(cursor: int, consumer: int, capacity: int) -> int:
    return capacity - int64(uint32(uint32(cursor) - load_u32(consumer)))  # type: ignore[no-any-return]


@inlined()
def _put(ring: int, capacity: int, cursor: int, source: int, num_bytes: int) -> None:
    start = cursor % capacity
    first = min(num_bytes, capacity - start)
    _copy(ring + CONTROL_BYTES + start, source, first)
    _copy(ring + CONTROL_BYTES, source + first, num_bytes - first)


@njit("void(int64, int64)", nogil=True, cache=True)
def prepare(ring: int, capacity: int) -> None:
    store_i64(ring + _CAPACITY, capacity)


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def write(
    ring: int,
    header: int,
    header_bytes: int,
    payload: int,
    payload_bytes: int,
    done: int,
    until_ns: int,
    spins: int,
) -> int:
    """Write a header and a payload, of which `done` bytes are written already; return how many are now.

    Waits for room until `until_ns`, and only while both sides are open; 0 means not to wait, and to copy no more than
    the ring holds, however fast the other side reads.
    """
    own, other = ring, ring + CACHE_LINE
    capacity = load_i64(ring + _CAPACITY)
    total = header_bytes + payload_bytes
    if until_ns == 0:
        total = min(total, done + capacity)
    cursor = load_i64(own + _CURSOR)
    while done < total:
        piece = min(total - done, capacity // _PIECES)
        if _room(cursor, other, capacity) < piece:
            if until_ns != 0:
                wait_until(other, cursor + piece - capacity, ring + _ENDED, until_ns, spins)
            piece = min(piece, _room(cursor, other, capacity))
            if piece == 0 or load_u32(other + _STATE) != OPEN:
                break
        in_header = min(max(header_bytes - done, 0), piece)
        _put(ring, capacity, cursor, header + done, in_header)
        _put(ring, capacity, cursor + in_header, payload + done + in_header - header_bytes, piece - in_header)
        cursor += piece
        done += piece
        store_i64(own + _CURSOR, cursor)
        announce(own, cursor)
        if done < total and until_ns != 0 and clock_ns() >= until_ns:
            break
    return done


@njit("int64(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def read(ring: int, target: int, num_bytes: int, done: int, until_ns: int, spins: int) -> int:
    """Read `num_bytes` to `target`, of which `done` bytes are read already; return how many are now. See `write`."""
    own, other = ring + CACHE_LINE, ring
    capacity = load_i64(ring + _CAPACITY)
    if until_ns == 0:
        num_bytes = min(num_bytes, done + capacity)
    cursor = load_i64(own + _CURSOR)
    while done < num_bytes:
        piece = min(num_bytes - done, capacity // _PIECES)
        if _ready(cursor, other) < piece:
            if until_ns != 0:
                wait_until(other, cursor + piece, ring + _ENDED, until_ns, spins)
            piece = min(piece, _ready(cursor, other))
            if piece == 0:
                break
        start = cursor % capacity
        first = min(piece, capacity - start)
        _copy(target + done, ring + CONTROL_BYTES + start, first)
        _copy(target + done + first, ring + CONTROL_BYTES, piece - first)
        cursor += piece
        done += piece
        store_i64(own + _CURSOR, cursor)
        announce(own, cursor)
        if done < num_bytes and until_ns != 0 and clock_ns() >= until_ns:
            break
    return done


@helper()
def _nap(ring: int, is_read: bool, until_ns: int) -> None:
    """Sleep until the other side of a ring has moved, or a short while: other rings may move before."""
    capacity = load_i64(ring + _CAPACITY)
    word, target = ring, load_i64(ring + CACHE_LINE + _CURSOR) + 1
    if not is_read:
        word, target = ring + CACHE_LINE, load_i64(ring + _CURSOR) + 1 - capacity
    wait_until(word, target, ring + _ENDED, min(until_ns, clock_ns() + _NAP_NS), 0)


@njit("boolean(int64, int64, int64, boolean, int64, int64)", nogil=True, cache=True)
def carry(table: int, writes: int, reads: int, all_leave: bool, until_ns: int, spins: int) -> bool:
    """Write several messages and read others, each through a ring of its own, all at once; whether that is done.

    A row of `table` is what a `write` is called with, to `done`, which is updated; a read has no header. The writes are
    first; they need not be complete unless `all_leave`. Returns early when a side has left a ring with something to do.
    """
    looks = 0
    while True:
        moved, left, ring, is_read = False, False, int64(0), False
        for row in range(writes + reads):
            at = table + ROW_BYTES * row
            done, total = load_i64(at + 40), load_i64(at + 16) + load_i64(at + 32)
            if done == total:
                continue
            if row < writes:
                now = write(
                    load_i64(at),
                    load_i64(at + 8),
                    load_i64(at + 16),
                    load_i64(at + 24),
                    load_i64(at + 32),
                    done,
                    0,
                    0,
                )
            else:
                now = read(load_i64(at), load_i64(at + 24), load_i64(at + 32), done, 0, 0)
            store_i64(at + 40, now)
            moved |= now != done
            if now != total:
                ring, is_read = load_i64(at), row >= writes
                left |= is_read or all_leave
        if not left:
            return True
        if moved:
            looks = 0
        elif load_u32(ring + _ENDED) != 0:
            return False
        elif looks < spins:
            looks += 1
            pause()
        else:
            _nap(ring, is_read, until_ns)
        if clock_ns() >= until_ns:
            return False


@njit("int64(int64)", nogil=True, cache=True)
def state(line: int) -> int:
    return load_u32(line + _STATE)  # type: ignore[no-any-return]


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def end(ring: int, line: int, how: int) -> None:
    """Leave the ring: say how in the own line, and wake the other side."""
    store_u32(line + _STATE, uint32(how))
    store_u32(ring + _ENDED, uint32(1))
    fence()
    futex_wake(line)
