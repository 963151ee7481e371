"""All-reduce among the processes of one host, in place, in shared memory.

The direct algorithm: a bucket has one part per rank, side by side in one shared arena. Rank j waits until
every rank has filled its part, reads slice j of all parts, combines them in rank order, and writes the
result back to all parts. No byte is copied on the way, and no two ranks write the same cache line.

    parent    files = SharedGroupFiles.create(world=2); start the children with pass_fds=files.descriptors
    child     group = SharedGroup(control=..., arena=..., rank=0, world=2, timeout_s=5)
              group.allocate(num_bytes, "gradients")
              bucket = group.bucket(0, count, torch.float32)
              bucket.tensor[:] = ...; group.all_reduce(bucket)

or, to overlap with computation: `launch` each bucket as it fills, `poll` now and then, `finish` at the end.
All ranks launch the same buckets with the same operations in the same order; polling is up to each. A
bucket launched with `scatter` stops halfway: rank j keeps the result of slice j, and nobody else gets it.
The memory has no name and goes with the last process that holds it.

What the ranks share is the control segment: a line with the abort word, and for every rank one line with
the number of the last operation it has arrived at and one with the last it is done with. Operations are
numbered by one count per group, the same on all ranks because all launch in the same order. Rank j reduces
its slice of operation k once every rank has arrived at k, and k is complete once every rank is done with it.

What one rank keeps to itself are blocks of int64 words, passed by address so that a call from Python costs four
integers: one for the group (GROUP_*) and one per bucket (_BUCKET_*), which are linked from launch to reduction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import int64, uint32

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, nearest
from manyhands.native.atomics import array_at, clock_ns, compare_swap_u32, futex_wake, load_u32
from manyhands.native.closeable import Closeable
from manyhands.native.decorators import helper, inlined, njit
from manyhands.native.dtypes import SUMMED
from manyhands.native.group.reduction_kernels import (
    ALL,
    COPY,
    MAX,
    MEAN,
    SCRATCH_BYTES,
    SUM,
    call_reducer,
    reducer_address,
)
from manyhands.native.segment import CACHE_LINE, PAGE, Segment, reserve, round_up
from manyhands.native.wait_sign import LONG_WAIT_NS, put_up, sign_address, take_down
from manyhands.native.waiting import (
    ABORTED,
    REACHED,
    TIMED_OUT,
    announce,
    leave_cores,
    on_my_core,
    reached,
    spins_for,
    wait_until,
)

Ranges = Sequence[range]
_OPERATIONS = {"sum": SUM, "mean": MEAN, "max": MAX}
_MAGIC, _VERSION = 0x6D68_6772, 1
_HEADER = 4  # words of line 0: magic, version, world, number of the operation before the first
_PATIENCE = 4  # times the usual spinning: whoever sleeps may be woken on the core of its waker
_NEVER_NS = 2**63 - 1
_RESERVE_BYTES_PER_S = 200e6  # a cautious pace for the kernel to hand out zeroed pages

# The control segment: line 0 is written once by its creator, line 1 holds the abort word, then come the ranks'.
_ABORT_OFFSET = CACHE_LINE
_FIRST_RANK_OFFSET = 2 * CACHE_LINE
ARRIVED, _DONE = 0, 1  # a rank's first and second line
_PART_EVERY_NS = 1_000_000  # moving costs some 20 microseconds

# How far `advance` goes, and what it may answer beside REACHED, ABORTED and TIMED_OUT.
_LAUNCH, _POLL, _FINISH = 0, 1, 2
_BUSY, _CLOSED = 10, 11
_SCATTER = 1 << 32  # added to an operation: the result of a rank's slice goes to its own part only

(
    _GROUP_CONTROL,  # address of the control segment
    _GROUP_RANK,
    _GROUP_WORLD,
    _GROUP_SPINS,
    _GROUP_TIMEOUT_NS,
    _GROUP_PART_NS,  # not before this time may the rank leave a core that it shares with another
    _GROUP_SCRATCH,  # address of the reduction's scratch
    _GROUP_LAUNCHED,  # number of the last operation launched
    _GROUP_FINISHED,  # number of the last operation known to be complete on all ranks
    _GROUP_OLDEST,  # first and last bucket launched and not yet reduced, or 0
    _GROUP_NEWEST,
    _GROUP_REDUCING_NS,
    _GROUP_LATE,  # whom a failed wait was for, in which phase, of which operation, for how long
    _GROUP_LATE_PHASE,
    _GROUP_LATE_OPERATION,
    _GROUP_LATE_NS,
    GROUP_SIGN,  # address of the two words that show whom this process waits for
    _GROUP_WAITING_NS,  # one word per rank, and then one more each: the number that the launcher knows it by
) = range(18)

(
    _BUCKET_COUNT,  # items in this rank's slice
    _BUCKET_REDUCER,  # address of the compiled reduction of its type
    _BUCKET_OPERATION,
    _BUCKET_NUMBER,  # the operation it was last launched as
    _BUCKET_NEXT,
    _BUCKET_TABLE,  # one word per rank: the address of this rank's slice in that rank's part
) = range(6)


def warm(dtypes: Iterable[torch.dtype]) -> None:
    """Compile the reductions of these types into the cache: once here, so that workers do not each do it."""
    for dtype in dtypes:
        if dtype in SUMMED:
            reducer_address(SUMMED[dtype])


def slice_of(count: int, item_bytes: int, rank: int, world: int) -> range:
    """The items of a bucket that `rank` reduces: whole cache lines, as even as they divide."""
    lines = round_up(count * item_bytes, CACHE_LINE) // CACHE_LINE
    first, last = (lines * one // world * (CACHE_LINE // item_bytes) for one in (rank, rank + 1))
    return range(min(first, count), min(last, count))


def word_offset(rank: int, phase: int) -> int:
    """Where in the control segment `rank` says how far it has come in `phase` (ARRIVED or _DONE)."""
    return _FIRST_RANK_OFFSET + (2 * rank + phase) * CACHE_LINE


class GroupStats(NamedTuple):
    """Where one rank's time went; while several ranks are late, the time counts for the first of them."""

    reducing_ns: int
    waiting_ns: tuple[int, ...]  # by rank


class Bucket:
    """A vector that all ranks reduce together; `tensor` is this rank's part, shared with the others.

    Its owner fills `tensor`, launches the bucket and leaves it alone until `finish`. `parts` are those of all ranks,
    to be read between two barriers. `SharedGroup.bucket` makes it.
    """

    __slots__ = ("_block", "address", "group", "parts", "tensor")

    def __init__(self, parts: Sequence[torch.Tensor], block: np.ndarray, group: SharedGroup) -> None:
        self.parts, self.group, self._block = parts, group, block
        self.tensor = parts[group.rank] if parts else torch.empty(0)
        self.address = block.ctypes.data


class SharedGroupFiles(Closeable):
    """The memory of a group before its ranks exist: two descriptors that the children inherit.

    The parent keeps this while the group runs, to `abort` it. A context manager; `close` is idempotent.
    """

    def __init__(self, control: Segment, arena: int, world: int) -> None:
        self._control, self.world = control, world
        self.arena = arena  # the descriptor of the arena, which rank 0 sizes in `allocate`

    @classmethod
    def create(cls, world: int, *, first_operation: int = 1) -> Self:
        """Fresh memory for `world` ranks, whose operations are numbered from `first_operation`."""
        if world < 1:
            raise UserError(f"world={world}: a group needs at least one rank")
        control = Segment.create(word_offset(world, 0), "group control")
        before = (first_operation - 1) & 0xFFFFFFFF
        control.array(0, _HEADER, np.uint32)[:] = _MAGIC, _VERSION, world, before
        for rank in range(world):
            for phase in (ARRIVED, _DONE):
                control.array(word_offset(rank, phase), 1, np.uint32)[0] = before
        return cls(control, os.memfd_create("manyhands:arena", os.MFD_CLOEXEC), world)

    @property
    def control(self) -> int:
        return self._control.descriptor

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.control, self.arena

    def abort(self, rank_blamed: int | None = None) -> None:
        """End every wait in the group with `Aborted`; the first to be blamed stays blamed."""
        _abort(self._control, self.world, rank_blamed)

    def close(self) -> None:
        self._control.close()
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


class SharedGroup(Closeable):
    """One rank's end of a group; used by one thread at a time, a context manager, `close` is idempotent.

    Takes over both descriptors. Every wait ends after `timeout_s` with a `PeerTimeout` that names the rank waited
    for; the operation is then still under way and `finish` may be called again. After an abort every call raises
    `Aborted`. `roles` are the numbers by which the launcher knows the ranks, and errors name them.
    """

    def __init__(
        self,
        *,
        control: int,
        arena: int,
        rank: int,
        world: int,
        timeout_s: float,
        roles: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise UserError(f"rank={rank}: must be at least 0 and less than world={world}")
        self.rank, self.world = rank, world
        self._roles = tuple(range(world) if roles is None else roles)
        os.set_inheritable(control, False)
        os.set_inheritable(arena, False)
        self._control, self._arena_descriptor = Segment.attach(control), arena
        self._arena: Segment | None = None
        self._common_bytes: int | None = None
        self._part_bytes = 0
        self._blocks: list[np.ndarray] = []  # compiled code holds their addresses
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        self._state = np.zeros(_GROUP_WAITING_NS + 2 * world, np.int64)
        self._address = self._state.ctypes.data
        magic, version, of_world, before = self._control.array(0, _HEADER, np.uint32).tolist()
        if (magic, version, of_world) != (_MAGIC, _VERSION, world):
            self.close()
            raise ManyhandsError(
                f"the control segment does not belong to a group of {world} (it has {magic:#x}, version {version}, "
                f"world {of_world})"
            )
        for word, value in {
            _GROUP_CONTROL: self._control.address,
            _GROUP_RANK: rank,
            _GROUP_WORLD: world,
            _GROUP_SPINS: _PATIENCE * spins_for(world),
            _GROUP_PART_NS: 0 if world <= len(os.sched_getaffinity(0)) else _NEVER_NS,
            _GROUP_SCRATCH: self._scratch.ctypes.data,
            GROUP_SIGN: sign_address(),
            _GROUP_LAUNCHED: before,
            _GROUP_FINISHED: before,
        }.items():
            self._state[word] = value
        self._state[_GROUP_WAITING_NS + world :] = self._roles
        self._barrier = Bucket((), np.zeros(_BUCKET_TABLE + world, np.int64), self)
        self.timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        """How long each wait may take; starting processes may need more than running ones."""
        return float(self._state[_GROUP_TIMEOUT_NS] / 1e9)

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        if not 0 < timeout_s < 1e9:
            raise UserError(f"timeout_s={timeout_s}: must be above 0 and below 1e9 seconds")
        self._state[_GROUP_TIMEOUT_NS] = int(timeout_s * 1e9)

    @property
    def abort_address(self) -> int:
        """Where compiled code sees that every wait is to end: a word that is zero while all is well."""
        return self._control.address + _ABORT_OFFSET

    def share(self, num_bytes: int, purpose: str) -> Segment:
        """Collective, once, before `allocate`: zeroed memory that all ranks see as one, and the caller closes.

        Rank 0 reserves it, as in `allocate`. Who writes where, and when, is the caller's business.
        """
        if self._common_bytes is not None or self._arena is not None or num_bytes < 0:
            raise UserError(f"share({num_bytes}): call it once, before allocate, with at least 0 bytes")
        self._common_bytes = round_up(num_bytes, PAGE)
        self._reserve(self._common_bytes, purpose)
        common = Segment.attach(os.dup(self._arena_descriptor))
        try:
            self.barrier()  # rank 0 may resize the file only when all have mapped this much of it
        except BaseException:
            common.close()
            raise
        return common

    def allocate(self, num_bytes: int, purpose: str) -> None:
        """Collective, once: room for `num_bytes` of buckets per rank.

        Rank 0 reserves it for all and raises OutOfSharedMemory where it does not suffice; the others then raise
        Aborted.
        """
        if self._arena is not None or num_bytes < 0:
            raise UserError(f"allocate({num_bytes}): call it once, with at least 0 bytes")
        self._common_bytes = self._common_bytes or 0
        self._part_bytes = round_up(num_bytes, PAGE)
        end = self._common_bytes + self._part_bytes * self.world
        self._reserve(end, purpose, self._common_bytes, parts=self.world)
        self._arena = Segment.attach(self._arena_descriptor)

    def bucket(self, offset: int, count: int, dtype: torch.dtype, ranges: Ranges | None = None) -> Bucket:
        """The same call on every rank: a vector of `count` items, `offset` bytes into each rank's memory.

        `ranges` says which items each rank reduces, where even slices of whole cache lines will not do.
        """
        if self._arena is None:
            raise UserError("bucket: call allocate first")
        if dtype not in SUMMED:
            raise UserError(f"dtype={dtype}: allowed: {', '.join(map(str, SUMMED))}")
        end = offset + count * dtype.itemsize
        if offset < 0 or offset % CACHE_LINE or count < 0 or end > self._part_bytes:
            raise UserError(
                f"bucket(offset={offset}, count={count}, {dtype}): the offset must be a multiple of {CACHE_LINE} "
                f"and the end at most {self._part_bytes} bytes"
            )
        if ranges is None:
            mine = slice_of(count, dtype.itemsize, self.rank, self.world)
        else:
            ends = [0, *(one.stop for one in ranges)]
            follow = all(one == range(begin, one.stop) for begin, one in zip(ends, ranges, strict=False))
            if len(ranges) != self.world or ends[-1] != count or not follow:
                wanted = f"must be {self.world} ranges, one after the other from 0 to {count}"
                raise UserError(f"ranges={list(ranges)}: {wanted}")
            mine = ranges[self.rank]
        begins = [(self._common_bytes or 0) + rank * self._part_bytes + offset for rank in range(self.world)]
        first = self._arena.address + mine.start * dtype.itemsize
        block = np.zeros(_BUCKET_TABLE + self.world, np.int64)
        block[[_BUCKET_COUNT, _BUCKET_REDUCER]] = len(mine), reducer_address(SUMMED[dtype])
        block[_BUCKET_TABLE:] = [first + begin for begin in begins]
        self._blocks.append(block)
        return Bucket([self._arena.tensor(begin, count, dtype) for begin in begins], block, self)

    def launch(self, bucket: Bucket, op: str = "sum", *, scatter: bool = False) -> None:
        """This rank's part is filled: say so and return at once; the order is the same on every rank.

        With `scatter`, each rank's own slice of its own `Bucket.tensor` will hold the result, the rest what it held.
        """
        self._advance(_LAUNCH, bucket, _operation(op) + scatter * _SCATTER)

    def poll(self) -> bool:
        """Reduce my slice of every bucket that all ranks have launched; whether some are still to come."""
        self._advance(_POLL)
        return bool(self._state[_GROUP_OLDEST])

    def is_done(self, bucket: Bucket) -> bool:
        """Whether every rank has reduced its slice of a bucket that was launched; never waits."""
        return bool(_all_done(self._address, bucket.address))

    def finish(self) -> None:
        """Wait until everything launched is complete: every rank's `Bucket.tensor` holds the result."""
        self._advance(_FINISH)

    def all_reduce(self, bucket: Bucket, op: str = "sum") -> None:
        self._advance(_FINISH, bucket, _operation(op))

    def broadcast(self, bucket: Bucket, root: int = 0) -> None:
        """Collective: rank `root`'s part goes to all, byte by byte; finishes everything launched before."""
        if not 0 <= root < self.world:
            raise UserError(f"root={root}: must be at least 0 and less than world={self.world}")
        self._advance(_FINISH, bucket, COPY + root)

    def barrier(self) -> None:
        """Collective: wait until every rank is here; finishes everything launched before."""
        self._advance(_FINISH, self._barrier)

    def abort(self, rank_blamed: int | None = None) -> None:
        """End every wait in the group, on all ranks, with `Aborted`; the first to be blamed stays blamed."""
        _abort(self._control, self.world, rank_blamed)

    def take_stats(self) -> GroupStats:
        waiting = self._state[_GROUP_WAITING_NS:][: self.world]
        stats = GroupStats(int(self._state[_GROUP_REDUCING_NS]), tuple(waiting.tolist()))
        self._state[_GROUP_REDUCING_NS] = 0
        waiting[:] = 0
        return stats

    def close(self) -> None:
        """Unmap; a bucket's tensor still in use keeps its memory alive until it goes."""
        self._address = 0
        self._control.close()
        if self._arena is not None:
            self._arena.close()
        elif self._arena_descriptor >= 0:
            os.close(self._arena_descriptor)
        self._arena_descriptor = -1

    def _reserve(self, num_bytes: int, purpose: str, kept_bytes: int = 0, parts: int = 1) -> None:
        """Collective: rank 0 makes the arena `num_bytes` long, in equal parts after the kept bytes; all wait for it."""
        if self.rank == 0:
            try:
                reserve(self._arena_descriptor, num_bytes, purpose, kept_bytes)
            except BaseException:
                self.abort(0)
                raise
        usual_s = self.timeout_s
        self.timeout_s = usual_s + min((num_bytes - kept_bytes) / _RESERVE_BYTES_PER_S, 3600)
        try:
            self.barrier()
        finally:
            self.timeout_s = usual_s
        there = os.fstat(self._arena_descriptor).st_size
        asked, reserved = ((size - kept_bytes) // parts for size in (num_bytes, there))
        if asked != reserved:
            self.abort(self.rank)
            raise UserError(
                f"rank {self.rank} asks for {asked} bytes of shared memory, but rank 0 for {reserved}; all ranks must "
                "ask for the same"
            )

    def _advance(self, until: int, bucket: Bucket | None = None, operation: int = 0) -> None:
        if bucket is not None and bucket.group is not self:
            raise UserError("the bucket belongs to another group")
        status = advance(self._address, 0 if bucket is None else bucket.address, operation, until)
        if status == REACHED:
            return
        if status == _CLOSED:
            raise UserError("the group is closed")
        if status == _BUSY:
            raise UserError("this bucket is still in use; call finish before launching it again")
        if status == TIMED_OUT:
            raise self._timeout()
        word = int(self._control.array(_ABORT_OFFSET, 1, np.uint32)[0])
        reason = f"rank {self._roles[word - 2]} failed first" if word > 1 else "the run is ending"
        raise Aborted(f"rank {self._roles[self.rank]} stopped its exchange: {reason}")

    def _timeout(self) -> PeerTimeout:
        first, phase, number, waited_ns = self._state[_GROUP_LATE : _GROUP_LATE_NS + 1].tolist()
        last = {}  # the low 32 bits are shared, and nobody is 2^32 operations behind
        for rank in range(first, self.world):
            low = int(self._control.array(word_offset(rank, phase), 1, np.uint32)[0])
            last[rank] = number - ((number - low) & 0xFFFFFFFF)
        others = [f"rank {self._roles[rank]}" for rank, at in last.items() if rank != first and at < number]
        deed = "arrive at" if phase == ARRIVED else "reduce its slice of"
        return PeerTimeout(
            f"rank {self._roles[self.rank]} waited {waited_ns / 1e9:.1f} s for rank {self._roles[first]} to {deed} "
            f"operation {number} (last seen at operation {last[first]}){'; also late: ' if others else ''}"
            f"{', '.join(others)}; check that it is still running, or raise timeout_s={self.timeout_s:g}",
            self._roles[first],
        )


def _operation(op: str) -> int:
    if op not in _OPERATIONS:
        raise UserError(f"op={op!r}: {nearest(op, _OPERATIONS)}")
    return _OPERATIONS[op]


def _abort(control: Segment, world: int, rank_blamed: int | None) -> None:
    """The abort word is 1 for no rank in particular and rank + 2 for a rank."""
    if rank_blamed is not None and not 0 <= rank_blamed < world:
        raise UserError(f"rank_blamed={rank_blamed}: must be at least 0 and less than world={world}")
    abort_group(control.address, world, 1 if rank_blamed is None else rank_blamed + 2)


# The compiled half: one call that launches, reduces and waits.

_word_offset = inlined()(word_offset)  # for compiled code; Python calls the function as it stands


@njit("boolean(int64, int64, int64)", nogil=True, cache=True)
def abort_group(control: int, world: int, word: int) -> bool:
    """Store `word` (not 0) as the reason to stop, unless there is one, and wake everyone; whether it was first."""
    first = compare_swap_u32(control + _ABORT_OFFSET, uint32(0), uint32(word))
    for rank in range(world):
        for phase in range(2):
            futex_wake(control + _word_offset(rank, phase))
    return first  # type: ignore[no-any-return]


@helper()
def _all_reached(group: Any, phase: int, number: int) -> bool:
    for rank in range(group[_GROUP_WORLD]):
        if not reached(group[_GROUP_CONTROL] + _word_offset(rank, phase), number):
            return False
    return True


@njit("boolean(int64, int64)", nogil=True, cache=True)
def _all_done(group_address: int, bucket_address: int) -> bool:
    if group_address == 0:
        return False
    number = array_at(bucket_address, _BUCKET_TABLE, int64)[_BUCKET_NUMBER]
    return _all_reached(array_at(group_address, _GROUP_WAITING_NS, int64), int64(_DONE), number)  # type: ignore[no-any-return]


@helper()
def _launch(group: Any, bucket_address: int, operation: int) -> bool:
    """Put a bucket at the end of the list and announce this rank's arrival, unless it is still under way."""
    bucket = array_at(bucket_address, _BUCKET_TABLE, int64)
    if bucket[_BUCKET_NUMBER] > group[_GROUP_FINISHED]:
        return False
    number = group[_GROUP_LAUNCHED] + 1
    group[_GROUP_LAUNCHED] = bucket[_BUCKET_NUMBER] = number
    bucket[_BUCKET_OPERATION], bucket[_BUCKET_NEXT] = operation, 0
    if group[_GROUP_OLDEST] == 0:
        group[_GROUP_OLDEST] = bucket_address
    else:
        array_at(group[_GROUP_NEWEST], _BUCKET_TABLE, int64)[_BUCKET_NEXT] = bucket_address
    group[_GROUP_NEWEST] = bucket_address
    announce(group[_GROUP_CONTROL] + _word_offset(group[_GROUP_RANK], ARRIVED), number)
    return True


@helper()
def _reduce_ready(group: Any) -> None:
    """Reduce this rank's slice of every operation at which all ranks have arrived, oldest first."""
    reduced = 0
    while group[_GROUP_OLDEST] != 0:
        bucket = array_at(group[_GROUP_OLDEST], _BUCKET_TABLE, int64)
        if not _all_reached(group, int64(ARRIVED), bucket[_BUCKET_NUMBER]):
            break
        reduced = bucket[_BUCKET_NUMBER]
        if bucket[_BUCKET_COUNT] != 0:
            began_ns = clock_ns()
            operation, target = bucket[_BUCKET_OPERATION], ALL
            if operation >= _SCATTER:
                operation, target = operation - _SCATTER, group[_GROUP_RANK]
            call_reducer(
                bucket[_BUCKET_REDUCER],
                group[_GROUP_OLDEST] + 8 * _BUCKET_TABLE,
                group[_GROUP_WORLD],
                bucket[_BUCKET_COUNT],
                operation,
                target,
                group[_GROUP_SCRATCH],
            )
            group[_GROUP_REDUCING_NS] += clock_ns() - began_ns
        group[_GROUP_OLDEST] = bucket[_BUCKET_NEXT]
    if reduced != 0:
        announce(group[_GROUP_CONTROL] + _word_offset(group[_GROUP_RANK], _DONE), reduced)


@helper()
def _wait_for_all(group: Any, group_address: int, phase: int, number: int) -> int:
    """Wait for one rank after the other: while several are late, the time counts for the first of them."""
    waiting_ns = array_at(group_address + 8 * _GROUP_WAITING_NS, 2 * group[_GROUP_WORLD], int64)
    for rank in range(group[_GROUP_WORLD]):
        word = group[_GROUP_CONTROL] + _word_offset(rank, phase)
        if reached(word, number):
            continue
        began_ns = clock_ns()
        # Of two on one core, the higher moves to another, unless that was tried just now.
        if rank < group[_GROUP_RANK] and began_ns >= group[_GROUP_PART_NS] and on_my_core(word):
            words = group[_GROUP_CONTROL] + _word_offset(0, ARRIVED)
            leave_cores(words, group[_GROUP_WORLD], 2 * CACHE_LINE, group[_GROUP_SCRATCH])
            group[_GROUP_PART_NS] = began_ns + _PART_EVERY_NS
        abort, deadline_ns = group[_GROUP_CONTROL] + _ABORT_OFFSET, began_ns + group[_GROUP_TIMEOUT_NS]
        patient_ns = min(deadline_ns, began_ns + LONG_WAIT_NS)
        status = wait_until(word, number, abort, patient_ns, group[_GROUP_SPINS])
        if status == TIMED_OUT and patient_ns < deadline_ns:
            put_up(group[GROUP_SIGN], waiting_ns[group[_GROUP_WORLD] + rank], began_ns)
            status = wait_until(word, number, abort, deadline_ns, 0)
            take_down(group[GROUP_SIGN])
        waited_ns = clock_ns() - began_ns
        waiting_ns[rank] += waited_ns
        if status != REACHED:
            group[_GROUP_LATE], group[_GROUP_LATE_PHASE] = rank, phase
            group[_GROUP_LATE_OPERATION], group[_GROUP_LATE_NS] = number, waited_ns
            return status  # type: ignore[no-any-return]
    return REACHED


@njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)
def advance(group_address: int, bucket_address: int, operation: int, until: int) -> int:
    """Launch a bucket (unless its address is 0), then continue as far as _LAUNCH, _POLL or _FINISH says.

    _LAUNCH only announces the bucket; _POLL reduces whatever can be reduced without waiting; _FINISH waits until
    every operation launched is complete on all ranks. A wait that fails leaves all as it is, to be tried again.
    """
    if group_address == 0:
        return _CLOSED
    group = array_at(group_address, _GROUP_WAITING_NS, int64)
    if load_u32(group[_GROUP_CONTROL] + _ABORT_OFFSET) != 0:
        return ABORTED
    if bucket_address != 0 and not _launch(group, bucket_address, operation):
        return _BUSY
    if until == _LAUNCH:
        return REACHED
    _reduce_ready(group)
    if until == _POLL:
        return REACHED
    while group[_GROUP_OLDEST] != 0:
        number = array_at(group[_GROUP_OLDEST], _BUCKET_TABLE, int64)[_BUCKET_NUMBER]
        status = _wait_for_all(group, group_address, int64(ARRIVED), number)
        if status != REACHED:
            return status  # type: ignore[no-any-return]
        _reduce_ready(group)
    status = _wait_for_all(group, group_address, int64(_DONE), group[_GROUP_LAUNCHED])
    if status == REACHED:
        group[_GROUP_FINISHED] = group[_GROUP_LAUNCHED]
    return status  # type: ignore[no-any-return]
