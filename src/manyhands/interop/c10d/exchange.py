"""The compiled exchange: every rank lays out lanes and reads lanes of others. All collectives but one are of this kind.

A lane is bytes for one rank, or one lane for all. Broadcast, gathers, scatter, all-to-all and barrier are exchanges
that differ only in their tables. With a reducer, a rank does not copy what it reads but combines it with its own, in
rank order: that is reduce and reduce-scatter. What does not fit into one round goes in several, a window of each lane
at a time; the longest lane of any rank says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numba import int64

from manyhands.interop.c10d.collective_calls import EXTENT_WORD
from manyhands.interop.c10d.layout_rounds import (
    BEGIN,
    CALL_WORDS,
    CONTROL,
    GATHER,
    ITEM_BYTES,
    MISMATCH,
    PHASE,
    RANK,
    REDUCER,
    ROUND,
    STAGE_WORDS,
    STEP,
    WORLD,
    all_agree,
    arrive,
    begin,
    copy,
    half,
    leave,
    next_round,
    record,
    reduce,
    region,
    wait_for_all,
)
from manyhands.interop.c10d.shared_layout import ABORT_OFFSET, ARRIVED, TABLES
from manyhands.native.atomics import array_at, load_u32
from manyhands.native.decorators import njit
from manyhands.native.waiting import ABORTED, REACHED

__all__ = ["Lane", "Read", "exchange", "exchange_words", "most_words"]

Lane = tuple[int, int]
"""Address and size of bytes for one rank, or for all."""
Read = tuple[int, int, int, int]
"""Rank and lane to read, address and size of where it goes."""

# After the words of every call: how many steps, lanes and reads there are, whether the ranks need not compare how much
# they bring and expect, and the room of a lane in one round. Then the tables, and for a reducer a word for each rank.
_STEPS, _LANES, _READS, _EVEN, _LANE_BYTES = range(CALL_WORDS, CALL_WORDS + 5)
_TABLE: Final = CALL_WORDS + 5
_LANE_WORDS: Final = 2
_READ_WORDS: Final = 4


def exchange_words(
    head: Sequence[int], lanes: Sequence[Lane], reads: Sequence[Read], *, even: bool, lane_bytes: int
) -> list[int]:
    """The block of an exchange that has not begun; `head` is what `rounds.call_head` gives."""
    words = [*head, 0, len(lanes), len(reads), even, lane_bytes]
    for lane in lanes:
        words += lane
    for read in reads:
        words += read
    return words


def most_words(world: int) -> int:
    """The largest block of an exchange among `world` ranks, with room for a reducer's table."""
    return _TABLE + (_LANE_WORDS + _READ_WORDS + 1) * world


@njit(nogil=True, inline="always")
def _brought(stage: Any, rank: int, number: int) -> Any:
    """What `rank` brings for each rank, then what it expects from each, in bytes."""
    size = 2 * stage[WORLD]
    return array_at(region(stage, rank) + TABLES + (number & 1) * 8 * size, size, int64)


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
        lane = other if call[_LANES] == world else 0  # one lane for each, or one for all
        table[other] = call[_TABLE + lane * _LANE_WORDS + 1]
    for read in range(call[_READS]):
        at = _TABLE + call[_LANES] * _LANE_WORDS + read * _READ_WORDS
        table[world + call[at]] = call[at + 3]
    table[world + rank] = table[rank]  # what a rank keeps for itself does not travel


@njit(nogil=True)
def _lay_out(stage: Any, call: Any, number: int) -> None:
    """Copy this step's window of each lane into this rank's half."""
    room = call[_LANE_BYTES]
    first = call[STEP] * room
    target = half(stage, stage[RANK], number)
    for lane in range(call[_LANES]):
        at = _TABLE + lane * _LANE_WORDS
        size = min(room, call[at + 1] - first)
        if size > 0:
            copy(target + lane * room, call[at] + first, size)


@njit(nogil=True)
def _read(stage: Any, call: Any, number: int) -> None:
    """Copy this step's window of each lane that this rank reads."""
    room = call[_LANE_BYTES]
    first = call[STEP] * room
    for read in range(call[_READS]):
        at = _TABLE + call[_LANES] * _LANE_WORDS + read * _READ_WORDS
        size = min(room, call[at + 3] - first)
        if size > 0:
            copy(call[at + 2] + first, half(stage, call[at], number) + call[at + 1] * room, size)


@njit(nogil=True)
def _combine(stage: Any, call: Any, parts_address: int, number: int) -> None:
    """Combine this step's window of the lane that this rank reads from all others with its own, in rank order."""
    room = call[_LANE_BYTES]
    first = call[STEP] * room
    at = _TABLE + call[_LANES] * _LANE_WORDS
    if call[_READS] == 0 or call[at + 3] <= first:
        return
    parts = array_at(parts_address, stage[WORLD], int64)
    for rank in range(stage[WORLD]):
        parts[rank] = half(stage, rank, number) + call[at + 1] * room
    parts[stage[RANK]] = call[at + 2] + first
    reduce(stage, call, parts_address, min(room, call[at + 3] - first) // call[ITEM_BYTES], stage[RANK])


@njit(nogil=True)
def _steps(stage: Any, call: Any, number: int) -> int:
    """How many rounds the longest lane of any rank takes."""
    longest = 0
    for rank in range(stage[WORLD]):
        longest = max(longest, record(stage, rank, number)[EXTENT_WORD])
    return (longest + call[_LANE_BYTES] - 1) // call[_LANE_BYTES]  # type: ignore[no-any-return]


@njit("int64(int64, int64, int64)", nogil=True, cache=True)
def exchange(stage_address: int, call_address: int, deadline_ns: int) -> int:
    """Take part in an exchange, from where it stands to its end: REACHED, or why not."""
    stage = array_at(stage_address, STAGE_WORDS, int64)
    head = array_at(call_address, _TABLE, int64)
    words = _TABLE + head[_LANES] * _LANE_WORDS + head[_READS] * _READ_WORDS
    call = array_at(call_address, words, int64)
    if load_u32(stage[CONTROL] + ABORT_OFFSET) != 0:
        return ABORTED
    while True:
        if call[PHASE] == BEGIN:
            if call[STEP] == 0:
                begin(stage, call)
                if call[_EVEN] == 0:
                    _publish_table(stage, call, call[ROUND])
            else:
                call[ROUND] = next_round(stage)
            _lay_out(stage, call, call[ROUND])
            arrive(stage, call[ROUND])
            call[PHASE] = GATHER
        number = call[ROUND]
        status = wait_for_all(stage, ARRIVED, number, deadline_ns)
        if status != REACHED:
            return status  # type: ignore[no-any-return]
        if call[STEP] == 0:
            if not all_agree(stage, call, number) or (call[_EVEN] == 0 and not _tables_agree(stage, number)):
                return MISMATCH
            call[_STEPS] = _steps(stage, call, number)
        if call[REDUCER] == 0:
            _read(stage, call, number)
        else:
            _combine(stage, call, call_address + 8 * words, number)
        leave(stage, number)
        call[STEP] += 1
        call[PHASE] = BEGIN
        if call[STEP] >= call[_STEPS]:
            return REACHED
