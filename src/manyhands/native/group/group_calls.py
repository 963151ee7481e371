"""The compiled half of `SharedGroup`: one call that launches, reduces and waits.

What the ranks share is the control segment: a line with the abort word, and for every rank one line with
the number of the last operation it has arrived at and one with the last it is done with. Operations are
numbered by one count per group, the same on all ranks because all launch in the same order. Rank j reduces
its slice of operation k once every rank has arrived at k, and k is complete once every rank is done with
it.

What one rank keeps to itself are blocks of int64 words, passed by address so that a call from Python costs
four integers: one block for the group (GROUP_*) and one per bucket (BUCKET_*). Operations launched and not
yet reduced are a linked list through their buckets' blocks.
"""

from __future__ import annotations

from typing import Any

from numba import int64, uint32

from manyhands.native.atomics import array_at, clock_ns, compare_swap_u32, futex_wake, load_u32
from manyhands.native.decorators import helper, inlined, njit
from manyhands.native.group.reduction_kernels import ALL, call_reducer
from manyhands.native.segment import CACHE_LINE
from manyhands.native.wait_sign import LONG_WAIT_NS, put_up, take_down
from manyhands.native.waiting import (
    ABORTED,
    REACHED,
    TIMED_OUT,
    announce,
    leave_cores,
    on_my_core,
    reached,
    wait_until,
)

# The control segment: line 0 is written once by its creator, line 1 holds the abort word, then come the ranks'.
ABORT_OFFSET = CACHE_LINE
_FIRST_RANK_OFFSET = 2 * CACHE_LINE
ARRIVED, DONE = 0, 1  # a rank's first and second line
_PART_EVERY_NS = 1_000_000  # moving costs some 20 microseconds

# How far `advance` goes, and what it may answer beside REACHED, ABORTED and TIMED_OUT.
LAUNCH, POLL, FINISH = 0, 1, 2
BUSY, CLOSED = 10, 11
SCATTER = 1 << 32  # added to an operation: the result of a rank's slice goes to its own part only

(
    GROUP_CONTROL,  # address of the control segment
    GROUP_RANK,
    GROUP_WORLD,
    GROUP_SPINS,
    GROUP_TIMEOUT_NS,
    GROUP_PART_NS,  # not before this time may the rank leave a core that it shares with another
    GROUP_SCRATCH,  # address of the reduction's scratch
    GROUP_LAUNCHED,  # number of the last operation launched
    GROUP_FINISHED,  # number of the last operation known to be complete on all ranks
    GROUP_OLDEST,  # first and last bucket launched and not yet reduced, or 0
    GROUP_NEWEST,
    GROUP_REDUCING_NS,
    GROUP_LATE,  # whom a failed wait was for, in which phase, of which operation, for how long
    GROUP_LATE_PHASE,
    GROUP_LATE_OPERATION,
    GROUP_LATE_NS,
    GROUP_SIGN,  # address of the two words that show whom this process waits for
    GROUP_WAITING_NS,  # one word per rank, and then one more each: the number that the launcher knows it by
) = range(18)

(
    BUCKET_COUNT,  # items in this rank's slice
    BUCKET_REDUCER,  # address of the compiled reduction of its type
    _BUCKET_OPERATION,
    _BUCKET_NUMBER,  # the operation it was last launched as
    _BUCKET_NEXT,
    BUCKET_TABLE,  # one word per rank: the address of this rank's slice in that rank's part
) = range(6)


def word_offset(rank: int, phase: int) -> int:
    """Where in the control segment `rank` says how far it has come in `phase` (ARRIVED or DONE)."""
    return _FIRST_RANK_OFFSET + (2 * rank + phase) * CACHE_LINE


_word_offset = inlined()(word_offset)  # for compiled code; Python calls the function as it stands


@njit("boolean(int64, int64, int64)", nogil=True, cache=True)
def abort_group(control: int, world: int, word: int) -> bool:
    """Store `word` (not 0) as the reason to stop, unless there is one, and wake everyone; whether it was first."""
    first = compare_swap_u32(control + ABORT_OFFSET, uint32(0), uint32(word))
    for rank in range(world):
        for phase in range(2):
            futex_wake(control + _word_offset(rank, phase))
    return first  # type: ignore[no-any-return]


@njit("boolean(int64, int64)", nogil=True, cache=True)
def all_done(group_address: int, bucket_address: int) -> bool:
    """Whether every rank is done with the operation that a bucket was last launched as; without waiting."""
    if group_address == 0:
        return False
    group = array_at(group_address, GROUP_WAITING_NS, int64)
    number = array_at(bucket_address, BUCKET_TABLE, int64)[_BUCKET_NUMBER]
    done = 0
    for rank in range(group[GROUP_WORLD]):
        done += reached(group[GROUP_CONTROL] + _word_offset(rank, DONE), number)
    return done == group[GROUP_WORLD]  # type: ignore[no-any-return]


@helper()
def _launch(group: Any, bucket_address: int, operation: int) -> bool:
    """Put a bucket at the end of the list and announce this rank's arrival, unless it is still under way."""
    bucket = array_at(bucket_address, BUCKET_TABLE, int64)
    if bucket[_BUCKET_NUMBER] > group[GROUP_FINISHED]:
        return False
    number = group[GROUP_LAUNCHED] + 1
    group[GROUP_LAUNCHED] = number
    bucket[_BUCKET_OPERATION] = operation
    bucket[_BUCKET_NUMBER] = number
    bucket[_BUCKET_NEXT] = 0
    if group[GROUP_OLDEST] == 0:
        group[GROUP_OLDEST] = bucket_address
    else:
        array_at(group[GROUP_NEWEST], BUCKET_TABLE, int64)[_BUCKET_NEXT] = bucket_address
    group[GROUP_NEWEST] = bucket_address
    announce(group[GROUP_CONTROL] + _word_offset(group[GROUP_RANK], ARRIVED), number)
    return True


@helper()
def _all_arrived(group: Any, number: int) -> bool:
    for rank in range(group[GROUP_WORLD]):
        if not reached(group[GROUP_CONTROL] + _word_offset(rank, ARRIVED), number):
            return False
    return True


@helper()
def _reduce(group: Any, bucket: Any, table: int) -> None:
    operation, target = bucket[_BUCKET_OPERATION], ALL
    if operation >= SCATTER:
        operation, target = operation - SCATTER, group[GROUP_RANK]
    call_reducer(
        bucket[BUCKET_REDUCER],
        table,
        group[GROUP_WORLD],
        bucket[BUCKET_COUNT],
        operation,
        target,
        group[GROUP_SCRATCH],
    )


@helper()
def _reduce_ready(group: Any) -> None:
    """Reduce this rank's slice of every operation at which all ranks have arrived, oldest first."""
    reduced = 0
    while group[GROUP_OLDEST] != 0:
        bucket = array_at(group[GROUP_OLDEST], BUCKET_TABLE, int64)
        if not _all_arrived(group, bucket[_BUCKET_NUMBER]):
            break
        reduced = bucket[_BUCKET_NUMBER]
        if bucket[BUCKET_COUNT] != 0:
            began_ns = clock_ns()
            _reduce(group, bucket, group[GROUP_OLDEST] + 8 * BUCKET_TABLE)
            group[GROUP_REDUCING_NS] += clock_ns() - began_ns
        group[GROUP_OLDEST] = bucket[_BUCKET_NEXT]
    if reduced != 0:
        announce(group[GROUP_CONTROL] + _word_offset(group[GROUP_RANK], DONE), reduced)


@helper()
def _part_from(group: Any, word: int, now_ns: int) -> None:
    """Move to another core if the rank that writes `word` runs on this one, unless that was tried just now."""
    if now_ns >= group[GROUP_PART_NS] and on_my_core(word):
        words = group[GROUP_CONTROL] + _word_offset(0, ARRIVED)
        leave_cores(words, group[GROUP_WORLD], 2 * CACHE_LINE, group[GROUP_SCRATCH])
        group[GROUP_PART_NS] = now_ns + _PART_EVERY_NS


@helper()
def _wait_for_all(group: Any, group_address: int, phase: int, number: int) -> int:
    """Wait for one rank after the other: while several are late, the time counts for the first of them."""
    waiting_ns = array_at(group_address + 8 * GROUP_WAITING_NS, 2 * group[GROUP_WORLD], int64)
    for rank in range(group[GROUP_WORLD]):
        word = group[GROUP_CONTROL] + _word_offset(rank, phase)
        if reached(word, number):
            continue
        began_ns = clock_ns()
        if rank < group[GROUP_RANK]:  # of two on one core, the higher leaves
            _part_from(group, word, began_ns)
        abort, deadline_ns = group[GROUP_CONTROL] + ABORT_OFFSET, began_ns + group[GROUP_TIMEOUT_NS]
        patient_ns = min(deadline_ns, began_ns + LONG_WAIT_NS)
        status = wait_until(word, number, abort, patient_ns, group[GROUP_SPINS])
        if status == TIMED_OUT and patient_ns < deadline_ns:
            put_up(group[GROUP_SIGN], waiting_ns[group[GROUP_WORLD] + rank], began_ns)
            status = wait_until(word, number, abort, deadline_ns, 0)
            take_down(group[GROUP_SIGN])
        waited_ns = clock_ns() - began_ns
        waiting_ns[rank] += waited_ns
        if status != REACHED:
            group[GROUP_LATE] = rank
            group[GROUP_LATE_PHASE] = phase
            group[GROUP_LATE_OPERATION] = number
            group[GROUP_LATE_NS] = waited_ns
            return status  # type: ignore[no-any-return]
    return REACHED


@helper()
def _finish(group: Any, group_address: int) -> int:
    while group[GROUP_OLDEST] != 0:
        number = array_at(group[GROUP_OLDEST], BUCKET_TABLE, int64)[_BUCKET_NUMBER]
        status = _wait_for_all(group, group_address, int64(ARRIVED), number)
        if status != REACHED:
            return status  # type: ignore[no-any-return]
        _reduce_ready(group)
    status = _wait_for_all(group, group_address, int64(DONE), group[GROUP_LAUNCHED])
    if status == REACHED:
        group[GROUP_FINISHED] = group[GROUP_LAUNCHED]
    return status  # type: ignore[no-any-return]


@njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)
def advance(group_address: int, bucket_address: int, operation: int, until: int) -> int:
    """Launch a bucket (unless its address is 0), then continue as far as LAUNCH, POLL or FINISH says.

    LAUNCH only announces the bucket; POLL reduces whatever can be reduced without waiting; FINISH waits until
    every operation launched is complete on all ranks. A wait that fails leaves all as it is, to be tried again.
    """
    if group_address == 0:
        return CLOSED
    group = array_at(group_address, GROUP_WAITING_NS, int64)
    if load_u32(group[GROUP_CONTROL] + ABORT_OFFSET) != 0:
        return ABORTED
    if bucket_address != 0 and not _launch(group, bucket_address, operation):
        return BUSY
    if until == LAUNCH:
        return REACHED
    _reduce_ready(group)
    if until == POLL:
        return REACHED
    return _finish(group, group_address)  # type: ignore[no-any-return]
