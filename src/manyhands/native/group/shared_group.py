"""All-reduce among the processes of one host, in place, in shared memory.

The direct algorithm: a bucket has one part per rank, side by side in one shared arena. Rank j waits until
every rank has filled its part, reads slice j of all parts, combines them in rank order, and writes the
result back to all parts. No byte is copied on the way, and nobody writes a line that another writes.

    parent    files = SharedGroupFiles.create(world=2); start the children with pass_fds=files.descriptors
    child     group = SharedGroup(control=..., arena=..., rank=0, world=2, timeout_s=5)
              group.allocate(num_bytes, "gradients")
              bucket = group.bucket(0, count, torch.float32)
              bucket.tensor[:] = ...; group.all_reduce(bucket)

or, to overlap with computation: `launch` each bucket as it fills, `poll` now and then, `finish` at the end.
All ranks launch the same buckets with the same operations in the same order; polling is up to each. A
bucket launched with `scatter` stops halfway: rank j keeps the result of slice j, and nobody else gets it.

The memory has no name and goes with the last process that holds it. The compiled half is `progress.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Self

import numpy as np
import torch

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, nearest
from manyhands.native.closeable import Closeable
from manyhands.native.dtypes import SUMMED
from manyhands.native.group import group_calls, reduction_kernels
from manyhands.native.segment import CACHE_LINE, PAGE, Segment, reserve, round_up
from manyhands.native.wait_sign import sign_address
from manyhands.native.waiting import ABORTED, REACHED, TIMED_OUT, spins_for

__all__ = ["Bucket", "SharedGroup", "SharedGroupFiles", "slice_of", "warm"]

_OPERATIONS = {"sum": reduction_kernels.SUM, "mean": reduction_kernels.MEAN, "max": reduction_kernels.MAX}
_MAGIC, _VERSION = 0x6D68_6772, 1
_HEADER = 4  # words of line 0: magic, version, world, number of the operation before the first
_PATIENCE = 4  # times the usual spinning: whoever sleeps may be woken on the core of its waker
_NEVER_NS = 2**63 - 1
_RESERVE_BYTES_PER_S = 200e6  # a cautious pace for the kernel to hand out zeroed pages


def warm(dtypes: Iterable[torch.dtype]) -> None:
    """Compile the reductions of these types into the cache: once here, so that workers do not each do it."""
    for dtype in dtypes:
        if dtype in SUMMED:
            reduction_kernels.reducer_address(SUMMED[dtype])


def slice_of(count: int, item_bytes: int, rank: int, world: int) -> range:
    """The items of a bucket that `rank` reduces: whole cache lines, as even as they divide."""
    lines = round_up(count * item_bytes, CACHE_LINE) // CACHE_LINE
    items_per_line = CACHE_LINE // item_bytes
    first = lines * rank // world * items_per_line
    last = lines * (rank + 1) // world * items_per_line
    return range(min(first, count), min(last, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """Where one rank's time went: nanoseconds reducing, and nanoseconds waiting for each rank.

    While several ranks are late, the time counts for the first of them, so nothing is counted twice.
    """

    reducing_ns: int
    waiting_ns: tuple[int, ...]


class Bucket:
    """A vector that all ranks reduce together; `tensor` is this rank's part, shared with the others.

    Its owner fills `tensor`, launches the bucket and leaves it alone until `finish`. `parts` are those of all ranks,
    to be read between two barriers. `SharedGroup.bucket` makes it.
    """

    __slots__ = ("_block", "address", "group", "parts", "tensor")

    def __init__(self, parts: Sequence[torch.Tensor], block: np.ndarray, group: SharedGroup) -> None:
        self.parts = parts
        self.tensor = parts[group.rank]
        self.group = group
        self.address = block.ctypes.data
        self._block = block


class SharedGroupFiles(Closeable):
    """The memory of a group before its ranks exist: two descriptors that the children inherit.

    The parent keeps this while the group runs, to `abort` it. A context manager; `close` is idempotent.
    """

    def __init__(self, control: Segment, arena: int, world: int) -> None:
        self._control = control
        self.arena = arena
        """The descriptor of the arena, which rank 0 sizes in `allocate`."""
        self.world = world

    @classmethod
    def create(cls, world: int, *, first_operation: int = 1) -> Self:
        """Fresh memory for `world` ranks, whose operations are numbered from `first_operation`."""
        if world < 1:
            raise UserError(f"world={world}: a group has at least one rank")
        control = Segment.create(group_calls.word_offset(world, 0), "group control")
        before = first_operation - 1
        control.array(0, _HEADER, np.uint32)[:] = _MAGIC, _VERSION, world, before & 0xFFFFFFFF
        for rank in range(world):
            for phase in (group_calls.ARRIVED, group_calls.DONE):
                control.array(group_calls.word_offset(rank, phase), 1, np.uint32)[0] = before & 0xFFFFFFFF
        arena = os.memfd_create("manyhands:arena", os.MFD_CLOEXEC)
        return cls(control, arena, world)

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
    `Aborted`.
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
        """`roles` says by which number the launcher knows each rank, and errors name it, where that is not its rank."""
        if not 0 <= rank < world:
            raise UserError(f"rank={rank}: must be at least 0 and less than world={world}")
        self.rank = rank
        self.world = world
        self._roles = tuple(range(world) if roles is None else roles)
        os.set_inheritable(control, False)
        os.set_inheritable(arena, False)
        self._control = Segment.attach(control)
        self._arena_descriptor = arena
        self._arena: Segment | None = None
        self._common_bytes: int | None = None
        self._part_bytes = 0
        self._blocks: list[np.ndarray] = []  # compiled code holds their addresses
        self._scratch = np.zeros(reduction_kernels.SCRATCH_BYTES, np.uint8)
        self._state = self._new_block(group_calls.GROUP_WAITING_NS + 2 * world)
        self._address = self._state.ctypes.data
        magic, version, of_world, before = self._control.array(0, _HEADER, np.uint32).tolist()
        if (magic, version, of_world) != (_MAGIC, _VERSION, world):
            self.close()
            raise ManyhandsError(
                f"the control segment is not one of a group of {world} (it says {magic:#x}, version {version}, "
                f"world {of_world})"
            )
        for word, value in {
            group_calls.GROUP_CONTROL: self._control.address,
            group_calls.GROUP_RANK: rank,
            group_calls.GROUP_WORLD: world,
            group_calls.GROUP_SPINS: _PATIENCE * spins_for(world),
            group_calls.GROUP_PART_NS: 0 if world <= len(os.sched_getaffinity(0)) else _NEVER_NS,
            group_calls.GROUP_SCRATCH: self._scratch.ctypes.data,
            group_calls.GROUP_SIGN: sign_address(),
            group_calls.GROUP_LAUNCHED: before,
            group_calls.GROUP_FINISHED: before,
        }.items():
            self._state[word] = value
        self._state[group_calls.GROUP_WAITING_NS + world :] = self._roles
        self._barrier = self._new_block(group_calls.BUCKET_TABLE + world)
        self.timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        """How long each wait may take; starting processes may need more than running ones."""
        return float(self._state[group_calls.GROUP_TIMEOUT_NS] / 1e9)

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        if not 0 < timeout_s < 1e9:
            raise UserError(f"timeout_s={timeout_s}: must be more than 0 seconds and less than 1e9")
        self._state[group_calls.GROUP_TIMEOUT_NS] = int(timeout_s * 1e9)

    @property
    def abort_address(self) -> int:
        """Where compiled code sees that every wait is to end: a word that is zero while all is well."""
        return self._control.address + group_calls.ABORT_OFFSET

    def share(self, num_bytes: int, purpose: str) -> Segment:
        """Collective, once, before `allocate`: zeroed memory that all ranks see as one, and the caller closes.

        Rank 0 reserves it, as in `allocate`. Who writes where, and when, is the caller's business.
        """
        if self._common_bytes is not None or self._arena is not None or num_bytes < 0:
            raise UserError(
                f"share({num_bytes}): comes once, before allocate, with a number of bytes of at least 0"
            )
        self._common_bytes = round_up(num_bytes, PAGE)
        self._reserve(self._common_bytes, purpose, kept_bytes=0)
        common = Segment.attach(os.dup(self._arena_descriptor))
        try:
            self._require_equal(self._common_bytes, common.num_bytes, "in common")
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
            raise UserError(f"allocate({num_bytes}): comes once, with a number of bytes of at least 0")
        self._common_bytes = self._common_bytes or 0
        self._part_bytes = round_up(num_bytes, PAGE)
        end = self._common_bytes + self._part_bytes * self.world
        self._reserve(end, purpose, kept_bytes=self._common_bytes)
        self._arena = Segment.attach(self._arena_descriptor)
        reserved = (self._arena.num_bytes - self._common_bytes) // self.world
        self._require_equal(self._part_bytes, reserved, "per rank")

    def bucket(
        self, offset: int, count: int, dtype: torch.dtype, ranges: Sequence[range] | None = None
    ) -> Bucket:
        """The same call on every rank: a vector of `count` items, `offset` bytes into each rank's memory.

        `ranges` says which items each rank reduces, where even slices of whole cache lines will not do.
        """
        if self._arena is None:
            raise UserError("bucket: allocate comes first")
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
                raise UserError(
                    f"ranges={list(ranges)}: must be {self.world} ranges, one after the other from 0 to {count}"
                )
            mine = ranges[self.rank]
        block = self._new_block(group_calls.BUCKET_TABLE + self.world)
        block[group_calls.BUCKET_COUNT] = len(mine)
        block[group_calls.BUCKET_REDUCER] = reduction_kernels.reducer_address(SUMMED[dtype])
        begins = [(self._common_bytes or 0) + rank * self._part_bytes + offset for rank in range(self.world)]
        first = self._arena.address + mine.start * dtype.itemsize
        block[group_calls.BUCKET_TABLE :] = [first + begin for begin in begins]
        return Bucket([self._arena.tensor(begin, count, dtype) for begin in begins], block, self)

    def launch(self, bucket: Bucket, op: str = "sum", *, scatter: bool = False) -> None:
        """This rank's part is filled: say so and return at once; the order is the same on every rank.

        With `scatter`, each rank's own slice of its own `Bucket.tensor` will hold the result, the rest what it held.
        """
        operation = _operation(op) + scatter * group_calls.SCATTER
        self._advance(self._own(bucket), operation, group_calls.LAUNCH)

    def poll(self) -> bool:
        """Reduce my slice of every bucket that all ranks have launched; whether some are still to come."""
        self._advance(0, 0, group_calls.POLL)
        return bool(self._state[group_calls.GROUP_OLDEST])

    def is_done(self, bucket: Bucket) -> bool:
        """Whether every rank has reduced its slice of a bucket that was launched; never waits."""
        return bool(group_calls.all_done(self._address, bucket.address))

    def finish(self) -> None:
        """Wait until everything launched is complete: every rank's `Bucket.tensor` holds the result."""
        self._advance(0, 0, group_calls.FINISH)

    def all_reduce(self, bucket: Bucket, op: str = "sum") -> None:
        """Collective: `launch` and `finish` in one compiled call."""
        self._advance(self._own(bucket), _operation(op), group_calls.FINISH)

    def broadcast(self, bucket: Bucket, root: int = 0) -> None:
        """Collective: rank `root`'s part goes to all, byte by byte; finishes everything launched before."""
        if not 0 <= root < self.world:
            raise UserError(f"root={root}: must be at least 0 and less than world={self.world}")
        self._advance(self._own(bucket), reduction_kernels.COPY + root, group_calls.FINISH)

    def barrier(self) -> None:
        """Collective: wait until every rank is here; finishes everything launched before."""
        self._advance(self._barrier.ctypes.data, 0, group_calls.FINISH)

    def abort(self, rank_blamed: int | None = None) -> None:
        """End every wait in the group, on all ranks, with `Aborted`; the first to be blamed stays blamed."""
        _abort(self._control, self.world, rank_blamed)

    def take_stats(self) -> GroupStats:
        """Where this rank's time went since the last call."""
        waiting = self._state[group_calls.GROUP_WAITING_NS :][: self.world]
        stats = GroupStats(
            reducing_ns=int(self._state[group_calls.GROUP_REDUCING_NS]), waiting_ns=tuple(waiting.tolist())
        )
        self._state[group_calls.GROUP_REDUCING_NS] = 0
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

    def _reserve(self, num_bytes: int, purpose: str, kept_bytes: int) -> None:
        """Collective: rank 0 makes the arena `num_bytes` long, and all wait for that."""
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

    def _require_equal(self, asked: int, reserved: int, what: str) -> None:
        if asked != reserved:
            self.abort(self.rank)
            raise UserError(
                f"rank {self.rank} asks for {asked} bytes of shared memory {what} and rank 0 for {reserved}; all "
                "ranks must ask for the same"
            )

    def _own(self, bucket: Bucket) -> int:
        if bucket.group is not self:
            raise UserError("the bucket belongs to another group")
        return bucket.address

    def _advance(self, bucket_address: int, operation: int, until: int) -> None:
        status = group_calls.advance(self._address, bucket_address, operation, until)
        if status != REACHED:
            self._fail(status)

    def _new_block(self, words: int) -> np.ndarray:
        block = np.zeros(words, np.int64)
        self._blocks.append(block)
        return block

    def _fail(self, status: int) -> NoReturn:
        if status == group_calls.CLOSED:
            raise UserError("the group is closed")
        if status == group_calls.BUSY:
            raise UserError("this bucket is under way: finish comes before it is launched again")
        if status == TIMED_OUT:
            raise self._timeout()
        assert status == ABORTED
        word = int(self._control.array(group_calls.ABORT_OFFSET, 1, np.uint32)[0])
        reason = f"rank {self._roles[word - 2]} failed first" if word > 1 else "the run is being taken down"
        raise Aborted(f"rank {self._roles[self.rank]} stops its exchange: {reason}")

    def _timeout(self) -> PeerTimeout:
        """Who is late, and where they were last seen."""
        first, phase, number, waited_ns = self._state[
            group_calls.GROUP_LATE : group_calls.GROUP_LATE_NS + 1
        ].tolist()
        seen = {}  # the low 32 bits are shared, and nobody is 2^32 operations behind
        for rank in range(first, self.world):
            low = int(self._control.array(group_calls.word_offset(rank, phase), 1, np.uint32)[0])
            seen[rank] = number - ((number - low) & 0xFFFFFFFF)
        others = [f"rank {self._roles[rank]}" for rank, at in seen.items() if rank != first and at < number]
        deed = "arrive at" if phase == group_calls.ARRIVED else "reduce its slice of"
        return PeerTimeout(
            f"rank {self._roles[self.rank]} waited {waited_ns / 1e9:.1f} s for rank {self._roles[first]} to {deed} "
            f"operation {number} (last seen at operation {seen[first]}){'; also late: ' if others else ''}"
            f"{', '.join(others)}; see whether it still runs, or allow more than timeout_s={self.timeout_s:g}",
            self._roles[first],
        )


def _operation(op: str) -> int:
    code = _OPERATIONS.get(op)
    if code is None:
        raise UserError(f"op={op!r}: {nearest(op, _OPERATIONS)}")
    return code


def _abort(control: Segment, world: int, rank_blamed: int | None) -> None:
    """The abort word is 1 for nobody in particular and rank + 2 for a rank."""
    if rank_blamed is not None and not 0 <= rank_blamed < world:
        raise UserError(f"rank_blamed={rank_blamed}: must be at least 0 and less than world={world}")
    group_calls.abort_group(control.address, world, 1 if rank_blamed is None else rank_blamed + 2)
