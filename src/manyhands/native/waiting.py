"""Waiting on a word of shared memory: spin briefly, then sleep on a futex, never without a deadline.

A word that others wait for is three 32-bit numbers: a sequence, written by one process only; the count of its sleepers,
which every waiter changes; and the core on which its writer last ran. A waker stores the sequence and then reads the
count; a sleeper adds itself to the count and then reads the sequence. Both orders are sequentially consistent, so one
of the two always sees the other, and a waker that sees no sleeper spares itself the system call. A sleeper that is
killed leaves the count one too high, which costs its wakers a system call and nothing else.

Schedulers like to put two processes that keep waking each other on one core and to leave them there, in virtual
machines above all, where an idle core looks taken. Spinning for someone who needs this very core only keeps them from
it, so a waiter sleeps at once when the writer was last seen on its own core; `leave_cores` is how the two part.

Sequence numbers wrap at 2^32: `reached` compares by signed difference, so numbers may be up to 2^31 - 1 apart.
"""

from __future__ import annotations

import os
import platform

from numba import int32, int64, types, uint32

from manyhands.native.atomics import (
    add_u32,
    array_at,
    clock_ns,
    fence,
    futex_wait,
    futex_wake,
    load_u32,
    pause,
    store_u32,
)
from manyhands.native.decorators import helper, inlined, njit

REACHED, ABORTED, TIMED_OUT = 0, 1, 2
WORD_BYTES = 12

_SLICE_NS = 100_000_000  # a sleeper looks at the abort word this often, even if nobody wakes it
_SPINS = 500  # about as long as it takes to fall asleep and be woken, 5 to 10 microseconds
_SPINS_CROWDED = 20
_SLEEPERS, _CORE = 4, 8
# On x86 a sequentially consistent store is itself a full fence; elsewhere a later acquire load may pass it.
_STORE_IS_FENCE = platform.machine() in ("x86_64", "AMD64", "i686")

_sched_getcpu = types.ExternalFunction("sched_getcpu", int32())
_sched_getaffinity = types.ExternalFunction("sched_getaffinity", int32(int32, int64, int64))
_sched_setaffinity = types.ExternalFunction("sched_setaffinity", int32(int32, int64, int64))
_SET_BYTES = 128  # of a set of 1024 cores, the C library's cpu_set_t
LEAVE_BYTES = 2 * _SET_BYTES


def spins_for(world: int) -> int:
    """How often a waiter looks before it sleeps, when `world` processes of this host wait for each other."""
    return _SPINS if world <= len(os.sched_getaffinity(0)) else _SPINS_CROWDED


@inlined()
def reached(word: int, target: int) -> bool:
    """Whether the sequence at address `word` is `target` or later; compiled code only."""
    return int32(load_u32(word) - uint32(target)) >= 0  # type: ignore[no-any-return]


@njit("void(int64, int64)", nogil=True, cache=True)
def announce(word: int, sequence: int) -> None:
    """Publish `sequence` (its low 32 bits) and all that was written before it; wake whoever sleeps on `word`."""
    core = uint32(_sched_getcpu())
    if load_u32(word + _CORE) != core:
        store_u32(word + _CORE, core)
    store_u32(word, uint32(sequence))
    if not _STORE_IS_FENCE:
        fence()
    if load_u32(word + _SLEEPERS) != 0:
        futex_wake(word)


@njit("void(int64)", nogil=True, cache=True)
def nudge(word: int) -> None:
    """Add one to a sequence with many writers, a wake-up counter, and wake the sleepers on it."""
    core = uint32(_sched_getcpu())
    if load_u32(word + _CORE) != core:
        store_u32(word + _CORE, core)
    add_u32(word, uint32(1))
    if not _STORE_IS_FENCE:
        fence()
    if load_u32(word + _SLEEPERS) != 0:
        futex_wake(word)


@njit("boolean(int64)", nogil=True, cache=True)
def on_my_core(word: int) -> bool:
    """Whether the writer of `word` was last seen on the core that this thread runs on."""
    return load_u32(word + _CORE) == uint32(_sched_getcpu())  # type: ignore[no-any-return]


@njit("void(int64, int64, int64, int64)", nogil=True, cache=True)
def leave_cores(words: int, count: int, stride: int, room: int) -> None:
    """Move this thread to a core where no writer of `count` words was last seen, if there is one.

    The words lie `stride` bytes apart from address `words`; `room` is the address of LEAVE_BYTES of the caller's own.
    The thread is bound to the other cores and at once unbound again, so it is free to move as before.
    """
    allowed = array_at(room, _SET_BYTES // 4, uint32)
    others = array_at(room + _SET_BYTES, _SET_BYTES // 4, uint32)
    if _sched_getaffinity(0, _SET_BYTES, room) != 0:
        return
    for i in range(_SET_BYTES // 4):
        others[i] = allowed[i]
    for i in range(count):
        core = load_u32(words + i * stride + _CORE)
        if core < 8 * _SET_BYTES:
            others[core // 32] &= ~(uint32(1) << (core % 32))
    left = uint32(0)
    for i in range(_SET_BYTES // 4):
        left |= others[i]
    if left != 0 and _sched_setaffinity(0, _SET_BYTES, room + _SET_BYTES) == 0:
        _sched_setaffinity(0, _SET_BYTES, room)


@helper()
def _sleep_until(word: int, target: int, abort: int, deadline_ns: int) -> int:
    while True:
        seen = load_u32(word)
        if int32(seen - uint32(target)) >= 0:
            return REACHED
        if load_u32(abort) != 0:
            return ABORTED
        left_ns = deadline_ns - clock_ns()
        if left_ns <= 0:
            return TIMED_OUT
        futex_wait(word, seen, min(left_ns, _SLICE_NS))


@njit("int64(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def wait_until(word: int, target: int, abort: int, deadline_ns: int, spins: int) -> int:
    """Wait until the sequence at `word` is `target` or later: REACHED, or ABORTED or TIMED_OUT.

    `abort` is the address of a u32 that is zero while all is well; `deadline_ns` is on the clock of `clock_ns`.
    """
    if on_my_core(word):
        spins = 0
    for _ in range(spins):
        if reached(word, target):
            return REACHED
        pause()
    add_u32(word + _SLEEPERS, uint32(1))
    status = _sleep_until(word, target, abort, deadline_ns)
    add_u32(word + _SLEEPERS, uint32(0xFFFFFFFF))  # minus one
    return status  # type: ignore[no-any-return]
