"""Rounds in which ranks lay data out, synchronize, and read from each other: the basis of compiled calls.

A call (`all_reduce` or `exchange`) is one block of int64 words in this process's memory: its record (see
`collective_calls`), where it stands, and what its kind needs. Every wait ends at `deadline_ns` at the latest with
TIMED_OUT, and the same call may be made again to continue: that is how Python sees signals during a long wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import int64, types, uint32
from numba.core import cgutils
from numba.extending import intrinsic

from manyhands.interop.c10d import collective_calls as calls
from manyhands.native.atomics import array_at, clock_ns, compare_swap_u32, futex_wake, load_u32
from manyhands.native.decorators import njit
from manyhands.native.group.reduction_kernels import ALL, SCRATCH_BYTES, call_reducer
from manyhands.native.segment import CACHE_LINE
from manyhands.native.waiting import (
    ABORTED,
    LEAVE_BYTES,
    REACHED,
    announce,
    leave_cores,
    on_my_core,
    reached,
    wait_until,
)

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
PHASE, ROUND, STEP, REDUCER, _OPERATION, ITEM_BYTES = range(calls.RECORD_WORDS, calls.RECORD_WORDS + 6)
CALL_WORDS: Final = calls.RECORD_WORDS + 6
BEGIN: Final = 0  # nothing is laid out yet
GATHER: Final = 1  # this rank has laid its data out and waits until all have arrived
REDUCED: Final = 2  # this rank has reduced its slice and waits until all are done


class RoundReducer(NamedTuple):
    """A compiled reduction (see `allreduce.kernels`): its address, its operation and the size of an item."""

    address: int
    operation: int
    item_bytes: int


def call_head(record_words: Sequence[int], reducer: RoundReducer | None) -> list[int]:
    return [*record_words, BEGIN, 0, 0, *(reducer or (0, 0, 0))]


@intrinsic  # type: ignore[untyped-decorator]
def copy(_typing: Any, target: Any, source: Any, num_bytes: Any) -> Any:  # noqa: ARG001
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(nogil=True, inline="always")
def region(stage: Any, rank: int) -> int:
    return stage[CONTROL] + calls.REGIONS + rank * stage[_REGION_BYTES]  # type: ignore[no-any-return]


@njit(nogil=True, inline="always")
def half(stage: Any, rank: int, number: int) -> int:
    return stage[_AREAS] + (2 * rank + (number & 1)) * stage[_HALF_BYTES]  # type: ignore[no-any-return]


@njit(nogil=True, inline="always")
def record(stage: Any, rank: int, number: int) -> Any:
    address = region(stage, rank) + calls.RECORDS + (number & 1) * calls.RECORD_BYTES
    return array_at(address, calls.RECORD_WORDS, int64)


@njit(nogil=True)
def _part_from(stage: Any, word: int) -> None:
    """Move to another core if the rank that writes `word` runs on this one, unless that was tried just now."""
    now_ns = clock_ns()
    if now_ns >= stage[_PART_NS] and on_my_core(word):
        leave_cores(region(stage, 0) + calls.ARRIVED, stage[WORLD], stage[_REGION_BYTES], stage[_SCRATCH])
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
        status = wait_until(word, number, stage[CONTROL] + calls.ABORT_OFFSET, deadline_ns, stage[_SPINS])
        if status != REACHED:
            return status  # type: ignore[no-any-return]
    return REACHED


@njit(nogil=True)
def arrive(stage: Any, number: int) -> None:
    stage[_ROUND] = number
    announce(region(stage, stage[RANK]) + calls.ARRIVED, number)


@njit(nogil=True)
def leave(stage: Any, number: int) -> None:
    announce(region(stage, stage[RANK]) + calls.DONE, number)


@njit(nogil=True)
def begin(stage: Any, call: Any) -> int:
    """Lay the record of a call out for its first round, whose number is returned."""
    number = stage[_ROUND] + 1
    call[ROUND] = number
    own = record(stage, stage[RANK], number)
    for word in range(calls.RECORD_WORDS):
        own[word] = call[word]
    return number  # type: ignore[no-any-return]


@njit(nogil=True)
def all_agree(stage: Any, call: Any, number: int) -> bool:
    """Whether all ranks have begun the same call in round `number`, at which all have arrived."""
    for rank in range(stage[WORLD]):
        other = record(stage, rank, number)
        for word in range(calls.COMPARED_WORDS):
            if other[word] != call[word]:
                return False
    return True


@njit(nogil=True, inline="always")
def reduce(stage: Any, call: Any, parts: int, count: int, target: int) -> None:
    """Combine `count` items at each of the addresses that lie at `parts`, one for each rank; see `call_reducer`."""
    call_reducer(call[REDUCER], parts, stage[WORLD], count, call[_OPERATION], target, stage[_SCRATCH])


@njit("void(int64)", nogil=True, cache=True)
def leave_round(stage_address: int) -> None:
    stage = array_at(stage_address, STAGE_WORDS, int64)
    leave(stage, stage[_ROUND])


@njit("void(int64, int64)", nogil=True, cache=True)
def abort(stage_address: int, word: int) -> None:
    """Store `word` (not 0) as the reason to stop, unless there is one, and wake everyone."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    compare_swap_u32(stage[CONTROL] + calls.ABORT_OFFSET, uint32(0), uint32(word))
    for rank in range(stage[WORLD]):
        for which in (calls.ARRIVED, calls.DONE, calls.WAKEUP):
            futex_wake(region(stage, rank) + which)


# The compiled all-reduce: direct, staged in blocks that stay in the cache. Rank j combines slice j of the block of all
# ranks, in rank order, and puts the result back into all of them. Its own slice it takes from, and leaves in, the
# caller's tensor: only what others need is copied into shared memory, and only what others have computed is copied out.
# While a rank waits for the results of one block, its part of the next is already laid out.
#
# After the words of every call: where the caller's items are, how many, and how many go in one block. Then comes a
# word for each rank.
ADDRESS, _COUNT, _BLOCK_ITEMS = range(CALL_WORDS, CALL_WORDS + 3)
_PARTS: Final = CALL_WORDS + 3


@njit(nogil=True, inline="always")
def _cut(num_bytes: int, rank: int, world: int) -> int:
    """Where the slice of `rank` begins in a block: on a cache line, slices as even as they divide."""
    lines = (num_bytes + CACHE_LINE - 1) // CACHE_LINE
    return min(lines * rank // world * CACHE_LINE, num_bytes)


@njit(nogil=True)
def _block(call: Any, step: int) -> Any:
    size = call[_BLOCK_ITEMS] * call[ITEM_BYTES]
    first = step * size
    return call[ADDRESS] + first, min(size, call[_COUNT] * call[ITEM_BYTES] - first)


@njit(nogil=True)
def _stage_block(stage: Any, call: Any, step: int, number: int, out: bool) -> None:
    address, size = _block(call, step)
    first = _cut(size, stage[RANK], stage[WORLD])
    end = _cut(size, stage[RANK] + 1, stage[WORLD])
    staged = half(stage, stage[RANK], number)
    if out:
        copy(address, staged, first)
        copy(address + end, staged + end, size - end)
    else:
        copy(staged, address, first)
        copy(staged + end, address + end, size - end)


@njit(nogil=True)
def _reduce_block(stage: Any, call: Any, call_address: int, number: int) -> None:
    address, size = _block(call, call[STEP])
    world = stage[WORLD]
    first, end = _cut(size, stage[RANK], world), _cut(size, stage[RANK] + 1, world)
    parts_address = call_address + 8 * _PARTS
    parts = array_at(parts_address, world, int64)
    for rank in range(world):
        parts[rank] = half(stage, rank, number) + first
    parts[stage[RANK]] = address + first
    reduce(stage, call, parts_address, (end - first) // call[ITEM_BYTES], ALL)


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def all_reduce(stage_address: int, call_address: int, deadline_ns: int) -> int:
    """Take part in an all-reduce, from where it stands to its end: REACHED, or why not."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    call = array_at(call_address, _PARTS, int64)
    if load_u32(stage[CONTROL] + calls.ABORT_OFFSET) != 0:
        return ABORTED
    steps = (call[_COUNT] + call[_BLOCK_ITEMS] - 1) // call[_BLOCK_ITEMS]
    if call[PHASE] == BEGIN:
        number = begin(stage, call)
        _stage_block(stage, call, 0, number, False)
        arrive(stage, number)
        call[PHASE] = GATHER
    while True:
        number = call[ROUND]
        if call[PHASE] == GATHER:
            status = wait_for_all(stage, calls.ARRIVED, number, deadline_ns)
            if status != REACHED:
                return status  # type: ignore[no-any-return]
            if call[STEP] == 0 and not all_agree(stage, call, number):
                return MISMATCH
            _reduce_block(stage, call, call_address, number)
            leave(stage, number)
            call[PHASE] = REDUCED
            if call[STEP] + 1 < steps:
                _stage_block(stage, call, call[STEP] + 1, number + 1, False)
                arrive(stage, number + 1)
        status = wait_for_all(stage, calls.DONE, number, deadline_ns)
        if status != REACHED:
            return status  # type: ignore[no-any-return]
        _stage_block(stage, call, call[STEP], number, True)
        call[STEP] += 1
        if call[STEP] >= steps:
            return REACHED
        call[ROUND] = number + 1
        call[PHASE] = GATHER


# The compiled exchange: every rank lays out chunks and reads those of others; all collectives but one are of this kind.
# A chunk is bytes for one rank, or one chunk for all. Broadcast, gathers, scatter, all-to-all and barrier are exchanges
# that differ only in their tables. With a reducer, a rank does not copy what it reads but combines it with its own, in
# rank order: that is reduce and reduce-scatter. What does not fit into one round goes in several, a window of each
# chunk at a time; the longest chunk of any rank says how many.

Chunk = tuple[int, int]  # address and size of bytes for one rank, or for all
Read = tuple[int, int, int, int]  # rank and chunk to read, address and size of where it goes

# After the words of every call: how many steps, chunks and reads there are, whether the ranks need not compare how much
# they bring and expect, and the room of a chunk in one round. Then the tables, and for a reducer a word for each rank.
_STEPS, _CHUNKS, _READS, _EVEN, _CHUNK_BYTES = range(CALL_WORDS, CALL_WORDS + 5)
_TABLE: Final = CALL_WORDS + 5
_CHUNK_WORDS: Final = 2
_READ_WORDS: Final = 4


def exchange_words(
    head: Sequence[int], chunks: Sequence[Chunk], reads: Sequence[Read], *, even: bool, chunk_bytes: int
) -> list[int]:
    return [*head, 0, len(chunks), len(reads), even, chunk_bytes, *chain(*chunks), *chain(*reads)]


def most_words(world: int) -> int:
    return _TABLE + (_CHUNK_WORDS + _READ_WORDS + 1) * world


@njit(nogil=True, inline="always")
def _brought(stage: Any, rank: int, number: int) -> Any:
    """What `rank` brings for each rank, then what it expects from each, in bytes."""
    size = 2 * stage[WORLD]
    return array_at(region(stage, rank) + calls.TABLES + (number & 1) * 8 * size, size, int64)


@njit(nogil=True)
def _tables_agree(stage: Any, number: int) -> bool:
    world = stage[WORLD]
    for sender in range(world):
        brings = _brought(stage, sender, number)
        for receiver in range(world):
            if brings[receiver] != _brought(stage, receiver, number)[world + sender]:
                return False
    return True


@njit(nogil=True)
def _publish_table(stage: Any, call: Any, number: int) -> None:
    world, rank = stage[WORLD], stage[RANK]
    table = _brought(stage, rank, number)
    for other in range(world):
        chunk = other if call[_CHUNKS] == world else 0  # one chunk for each, or one for all
        table[other] = call[_TABLE + chunk * _CHUNK_WORDS + 1]
    for read in range(call[_READS]):
        at = _TABLE + call[_CHUNKS] * _CHUNK_WORDS + read * _READ_WORDS
        table[world + call[at]] = call[at + 3]
    table[world + rank] = table[rank]  # what a rank keeps for itself does not travel


@njit(nogil=True)
def _lay_out(stage: Any, call: Any, number: int) -> None:
    room = call[_CHUNK_BYTES]
    first = call[STEP] * room
    target = half(stage, stage[RANK], number)
    for chunk in range(call[_CHUNKS]):
        at = _TABLE + chunk * _CHUNK_WORDS
        size = min(room, call[at + 1] - first)
        if size > 0:
            copy(target + chunk * room, call[at] + first, size)


@njit(nogil=True)
def _read(stage: Any, call: Any, number: int) -> None:
    room = call[_CHUNK_BYTES]
    first = call[STEP] * room
    for read in range(call[_READS]):
        at = _TABLE + call[_CHUNKS] * _CHUNK_WORDS + read * _READ_WORDS
        size = min(room, call[at + 3] - first)
        if size > 0:
            copy(call[at + 2] + first, half(stage, call[at], number) + call[at + 1] * room, size)


@njit(nogil=True)
def _combine(stage: Any, call: Any, parts_address: int, number: int) -> None:
    """Combine this step's window of the chunk that this rank reads from all others with its own, in rank order."""
    room = call[_CHUNK_BYTES]
    first = call[STEP] * room
    at = _TABLE + call[_CHUNKS] * _CHUNK_WORDS
    if call[_READS] == 0 or call[at + 3] <= first:
        return
    parts = array_at(parts_address, stage[WORLD], int64)
    for rank in range(stage[WORLD]):
        parts[rank] = half(stage, rank, number) + call[at + 1] * room
    parts[stage[RANK]] = call[at + 2] + first
    reduce(stage, call, parts_address, min(room, call[at + 3] - first) // call[ITEM_BYTES], stage[RANK])


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def exchange(stage_address: int, call_address: int, deadline_ns: int) -> int:
    """Take part in an exchange, from where it stands to its end: REACHED, or why not."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    head = array_at(call_address, _TABLE, int64)
    words = _TABLE + head[_CHUNKS] * _CHUNK_WORDS + head[_READS] * _READ_WORDS
    call = array_at(call_address, words, int64)
    if load_u32(stage[CONTROL] + calls.ABORT_OFFSET) != 0:
        return ABORTED
    while True:
        if call[PHASE] == BEGIN:
            if call[STEP] == 0:
                begin(stage, call)
                if call[_EVEN] == 0:
                    _publish_table(stage, call, call[ROUND])
            else:
                call[ROUND] = stage[_ROUND] + 1
            _lay_out(stage, call, call[ROUND])
            arrive(stage, call[ROUND])
            call[PHASE] = GATHER
        number = call[ROUND]
        status = wait_for_all(stage, calls.ARRIVED, number, deadline_ns)
        if status != REACHED:
            return status  # type: ignore[no-any-return]
        if call[STEP] == 0:
            if not all_agree(stage, call, number) or (call[_EVEN] == 0 and not _tables_agree(stage, number)):
                return MISMATCH
            longest = 0
            for rank in range(stage[WORLD]):
                longest = max(longest, record(stage, rank, number)[calls.EXTENT_WORD])
            call[_STEPS] = (longest + call[_CHUNK_BYTES] - 1) // call[_CHUNK_BYTES]
        if call[REDUCER] == 0:
            _read(stage, call, number)
        else:
            _combine(stage, call, call_address + 8 * words, number)
        leave(stage, number)
        call[STEP] += 1
        call[PHASE] = BEGIN
        if call[STEP] >= call[_STEPS]:
            return REACHED
