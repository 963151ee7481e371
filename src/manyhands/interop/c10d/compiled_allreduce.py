"""The compiled all-reduce: direct, staged in blocks that stay in the cache.

Rank j combines slice j of the block of all ranks, in rank order, and puts the result back into all of them. Its own
slice it takes from, and leaves in, the caller's tensor: only what others need is copied into shared memory, and only
what others have computed is copied out. While a rank waits for the results of one block, its part of the next is
already laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numba import int64

from manyhands.interop.c10d.layout_rounds import (
    BEGIN,
    CALL_WORDS,
    CONTROL,
    GATHER,
    ITEM_BYTES,
    MISMATCH,
    PHASE,
    RANK,
    ROUND,
    SETTLE,
    STAGE_WORDS,
    STEP,
    WORLD,
    all_agree,
    arrive,
    begin,
    copy,
    half,
    leave,
    reduce,
    wait_for_all,
)
from manyhands.interop.c10d.shared_layout import ABORT_OFFSET, ARRIVED, DONE
from manyhands.native.atomics import array_at, load_u32
from manyhands.native.decorators import njit
from manyhands.native.group.reduction_kernels import ALL
from manyhands.native.segment import CACHE_LINE
from manyhands.native.waiting import ABORTED, REACHED

__all__ = ["ADDRESS", "all_reduce", "all_reduce_words"]

# After the words of every call: where the caller's items are, how many, and how many go in one block. Then comes a
# word for each rank.
ADDRESS, _COUNT, _BLOCK_ITEMS = range(CALL_WORDS, CALL_WORDS + 3)
_TABLE: Final = CALL_WORDS + 3


def all_reduce_words(head: Sequence[int], items: int, block_items: int, world: int) -> list[int]:
    """The block of an all-reduce that has not begun; `head` is what `rounds.call_head` gives, ADDRESS is to be set."""
    return [*head, 0, items, block_items, *(0,) * world]


@njit(nogil=True, inline="always")
def _cut(num_bytes: int, rank: int, world: int) -> int:
    """Where the slice of `rank` begins in a block: on a cache line, slices as even as they divide."""
    lines = (num_bytes + CACHE_LINE - 1) // CACHE_LINE
    return min(lines * rank // world * CACHE_LINE, num_bytes)


@njit(nogil=True)
def _block(call: Any, step: int) -> Any:
    """Address and size in bytes of the block of one step."""
    size = call[_BLOCK_ITEMS] * call[ITEM_BYTES]
    first = step * size
    return call[ADDRESS] + first, min(size, call[_COUNT] * call[ITEM_BYTES] - first)


@njit(nogil=True)
def _stage_block(stage: Any, call: Any, step: int, number: int, out: bool) -> None:
    """Copy what other ranks reduce into this rank's half, or their results `out` of it."""
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
    """Combine this rank's slice of the block, its own part in the caller's tensor."""
    address, size = _block(call, call[STEP])
    world = stage[WORLD]
    first, end = _cut(size, stage[RANK], world), _cut(size, stage[RANK] + 1, world)
    parts_address = call_address + 8 * _TABLE
    parts = array_at(parts_address, world, int64)
    for rank in range(world):
        parts[rank] = half(stage, rank, number) + first
    parts[stage[RANK]] = address + first
    reduce(stage, call, parts_address, (end - first) // call[ITEM_BYTES], ALL)


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def all_reduce(stage_address: int, call_address: int, deadline_ns: int) -> int:
    """Take part in an all-reduce, from where it stands to its end: REACHED, or why not."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    call = array_at(call_address, _TABLE, int64)
    if load_u32(stage[CONTROL] + ABORT_OFFSET) != 0:
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
            status = wait_for_all(stage, ARRIVED, number, deadline_ns)
            if status != REACHED:
                return status  # type: ignore[no-any-return]
            if call[STEP] == 0 and not all_agree(stage, call, number):
                return MISMATCH
            _reduce_block(stage, call, call_address, number)
            leave(stage, number)
            call[PHASE] = SETTLE
            if call[STEP] + 1 < steps:
                _stage_block(stage, call, call[STEP] + 1, number + 1, False)
                arrive(stage, number + 1)
        status = wait_for_all(stage, DONE, number, deadline_ns)
        if status != REACHED:
            return status  # type: ignore[no-any-return]
        _stage_block(stage, call, call[STEP], number, True)
        call[STEP] += 1
        if call[STEP] >= steps:
            return REACHED
        call[ROUND] = number + 1
        call[PHASE] = GATHER
