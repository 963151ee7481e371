"""Rounds in which ranks lay data out, synchronize, and read from each other: the basis of compiled calls.

A call (`exchange` or `direct`) is one block of int64 words in this process's memory: its record (see `calls`), where it
stands, and what its kind needs. Every wait ends at `deadline_ns` at the latest with TIMED_OUT, and the same call may be
made again to go on: that is how Python sees signals during a long wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import int64, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from manyhands.interop.c10d.collective_calls import COMPARED_WORDS, RECORD_WORDS
from manyhands.interop.c10d.shared_layout import (
    ABORT_OFFSET,
    ARRIVED,
    DONE,
    HALF_BYTES,
    RECORD_BYTES,
    RECORDS,
    REGIONS,
    WAKEUP,
    MemoryLayout,
)
from manyhands.native.atomics import array_at, clock_ns, compare_swap_u32, futex_wake
from manyhands.native.decorators import njit
from manyhands.native.group.reduction_kernels import SCRATCH_BYTES, call_reducer
from manyhands.native.waiting import (
    LEAVE_BYTES,
    REACHED,
    announce,
    leave_cores,
    on_my_core,
    reached,
    wait_until,
)

__all__ = [
    "BEGIN",
    "CALL_WORDS",
    "CONTROL",
    "GATHER",
    "ITEM_BYTES",
    "MISMATCH",
    "PHASE",
    "RANK",
    "REDUCER",
    "ROUND",
    "SCRATCH_ROOM",
    "SETTLE",
    "STAGE_WORDS",
    "STEP",
    "WORLD",
    "RoundReducer",
    "abort",
    "all_agree",
    "arrive",
    "begin",
    "call_head",
    "copy",
    "half",
    "leave",
    "leave_round",
    "next_round",
    "record",
    "reduce",
    "region",
    "stage_words",
    "wait_for_all",
]

MISMATCH: Final = 20  # beside REACHED, ABORTED and TIMED_OUT: the records differ, and nothing was read

# The stage of this rank: a block of words that lives as long as the group.
(
    CONTROL,  # address of the shared memory
    _REGION_BYTES,
    _AREAS,  # address of the first rank's area
    _HALF_BYTES,
    RANK,
    WORLD,
    _SPINS,
    _SCRATCH,  # address of SCRATCH_ROOM bytes of this rank's own
    _ROUND,  # the last round this rank has arrived at
    _PART_NS,  # when this rank may next try to change its core
) = range(10)
STAGE_WORDS: Final = 10
SCRATCH_ROOM: Final = max(SCRATCH_BYTES, LEAVE_BYTES)
_PART_EVERY_NS = 1_000_000  # moving costs some 20 microseconds

# A call: its record, where it stands, and the reducer's address, operation and size of an item, or zeros.
PHASE, ROUND, STEP, REDUCER, _OPERATION, ITEM_BYTES = range(RECORD_WORDS, RECORD_WORDS + 6)
CALL_WORDS: Final = RECORD_WORDS + 6
BEGIN: Final = 0
"""Nothing is laid out yet."""
GATHER: Final = 1
"""This rank has laid its data out and waits until all have arrived."""
SETTLE: Final = 2
"""This rank has reduced its slice and waits until all are done."""


class RoundReducer(NamedTuple):
    """A compiled reduction (see `allreduce.kernels`): its address, its operation and the size of an item."""

    address: int
    operation: int
    item_bytes: int


def stage_words(
    *, control: int, where: MemoryLayout, rank: int, world: int, spins: int, scratch: int, before: int
) -> list[int]:
    """The stage of a rank: `control` is the address of the shared memory, `before` the round before the first."""
    areas = control + where.areas
    return [control, where.region_bytes, areas, HALF_BYTES, rank, world, spins, scratch, before, 0]


def call_head(record_words: Sequence[int], reducer: RoundReducer | None) -> list[int]:
    """The words that every call begins with, before it has begun."""
    return [*record_words, BEGIN, 0, 0, *(reducer or (0, 0, 0))]


@intrinsic  # type: ignore[untyped-decorator]
def copy(_typing: Any, target: Any, source: Any, num_bytes: Any) -> Any:  # noqa: ARG001
    """`memcpy` between two addresses."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(nogil=True, inline="always")
def region(stage: Any, rank: int) -> int:
    """Where the lines of `rank` begin."""
    return stage[CONTROL] + REGIONS + rank * stage[_REGION_BYTES]  # type: ignore[no-any-return]


@njit(nogil=True, inline="always")
def half(stage: Any, rank: int, number: int) -> int:
    """Where `rank` stages round `number`."""
    return stage[_AREAS] + (2 * rank + (number & 1)) * stage[_HALF_BYTES]  # type: ignore[no-any-return]


@njit(nogil=True, inline="always")
def record(stage: Any, rank: int, number: int) -> Any:
    """The record of the call that `rank` began in round `number`."""
    return array_at(region(stage, rank) + RECORDS + (number & 1) * RECORD_BYTES, RECORD_WORDS, int64)


@njit(nogil=True)
def _part_from(stage: Any, word: int) -> None:
    """Move to another core if the rank that writes `word` runs on this one, unless that was tried just now."""
    now_ns = clock_ns()
    if now_ns >= stage[_PART_NS] and on_my_core(word):
        leave_cores(region(stage, 0) + ARRIVED, stage[WORLD], stage[_REGION_BYTES], stage[_SCRATCH])
        stage[_PART_NS] = now_ns + _PART_EVERY_NS


@njit(nogil=True)
def wait_for_all(stage: Any, which: int, number: int, deadline_ns: int) -> int:
    """Wait until every rank's word `which` (ARRIVED or DONE) has come to `number`: REACHED, or why not."""
    for rank in range(stage[WORLD]):
        word = region(stage, rank) + which
        if reached(word, number):
            continue
        if rank < stage[RANK]:  # of two on one core, the higher leaves
            _part_from(stage, word)
        status = wait_until(word, number, stage[CONTROL] + ABORT_OFFSET, deadline_ns, stage[_SPINS])
        if status != REACHED:
            return status  # type: ignore[no-any-return]
    return REACHED


@njit(nogil=True, inline="always")
def next_round(stage: Any) -> int:
    """The number of the round that comes after the last this rank has arrived at."""
    return stage[_ROUND] + 1  # type: ignore[no-any-return]


@njit(nogil=True)
def arrive(stage: Any, number: int) -> None:
    """Announce that this rank's data of round `number` is laid out."""
    stage[_ROUND] = number
    announce(region(stage, stage[RANK]) + ARRIVED, number)


@njit(nogil=True)
def leave(stage: Any, number: int) -> None:
    """Announce that this rank is done with round `number`."""
    announce(region(stage, stage[RANK]) + DONE, number)


@njit(nogil=True)
def begin(stage: Any, call: Any) -> int:
    """Lay the record of a call out for its first round, whose number is returned."""
    number = next_round(stage)
    call[ROUND] = number
    own = record(stage, stage[RANK], number)
    for word in range(RECORD_WORDS):
        own[word] = call[word]
    return number  # type: ignore[no-any-return]


@njit(nogil=True)
def all_agree(stage: Any, call: Any, number: int) -> bool:
    """Whether all ranks have begun the same call in round `number`, at which all have arrived."""
    for rank in range(stage[WORLD]):
        other = record(stage, rank, number)
        for word in range(COMPARED_WORDS):
            if other[word] != call[word]:
                return False
    return True


@njit(nogil=True, inline="always")
def reduce(stage: Any, call: Any, parts: int, count: int, target: int) -> None:
    """Combine `count` items at each of the addresses that lie at `parts`, one for each rank; see `call_reducer`."""
    call_reducer(call[REDUCER], parts, stage[WORLD], count, call[_OPERATION], target, stage[_SCRATCH])


@njit("void(int64)", nogil=True, cache=True)
def leave_round(stage_address: int) -> None:
    """Announce that this rank is done with the round it has arrived at, having read nothing."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    leave(stage, stage[_ROUND])


@njit("void(int64, int64)", nogil=True, cache=True)
def abort(stage_address: int, word: int) -> None:
    """Store `word` (not 0) as the reason to stop, unless there is one, and wake everyone."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    compare_swap_u32(stage[CONTROL] + ABORT_OFFSET, uint32(0), uint32(word))
    for rank in range(stage[WORLD]):
        for which in (ARRIVED, DONE, WAKEUP):
            futex_wake(region(stage, rank) + which)
