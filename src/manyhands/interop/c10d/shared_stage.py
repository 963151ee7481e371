"""One rank's end of a process group's shared memory: runs calls, and says why one cannot continue.

A stage runs one call at a time. A call whose records differ between ranks is rejected on all of them and leaves the
group usable. Any other failure (a rank that died, left, failed, or did not come in time) stops the group permanently,
on all ranks, and every later call raises the same error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NoReturn

import numpy as np

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.interop.c10d import collective_calls as calls
from manyhands.interop.c10d import compiled_calls
from manyhands.interop.c10d.collective_calls import CallKind, CollectiveCall, Label
from manyhands.interop.c10d.compiled_calls import Chunk, Read, RoundReducer, exchange_words, most_words
from manyhands.native.segment import Segment
from manyhands.native.waiting import REACHED, TIMED_OUT, spins_for

_SLICE_NS: Final = 250_000_000  # a waiting call polls for failures, and Python for signals, this often
_PATIENCE: Final = 8  # times the usual spinning: a peer that runs Python needs 20 µs between two calls
_REASON_SHIFT: Final = 16  # of the abort word: below it the rank + 1, above it the reason


class StageReason(IntEnum):
    """Why a group stopped."""

    DIED = 1  # a rank's process ended without leaving the group
    LEFT = 2  # a rank closed the group while another waited for it
    LATE = 3  # a rank did not come in time
    FAILED = 4  # a rank raised, or was interrupted, in the middle of a call
    ENDED = 5  # the group was aborted on purpose


class ReductionPlan:
    """A prepared all-reduce, to be run repeatedly on tensors of the same kind."""

    def __init__(self, call: CollectiveCall, reducer: RoundReducer, world: int) -> None:
        self.call = call
        head = compiled_calls.call_head(call.words(), reducer)
        block = calls.block_items(call.items, reducer.item_bytes)
        # the address is set for each call, a word for each rank by the kernel
        self.words = np.array([*head, 0, call.items, block, *(0,) * world], np.int64)
        self.address = self.words.ctypes.data


def create_segment(world: int, *, first_round: int = 1) -> Segment:
    """The memory of a group of `world` ranks, whose rounds are numbered from `first_round`; for all of them."""
    where, before = calls.layout_of(world), (first_round - 1) & 0xFFFFFFFF
    segment = Segment.create(where.num_bytes, "a process group")
    segment.array(0, calls.HEADER_WORDS, np.uint32)[:] = calls.MAGIC, calls.VERSION, world, before
    for rank in range(world):
        for which in (calls.ARRIVED, calls.DONE):
            segment.array(calls.REGIONS + rank * where.region_bytes + which, 1, np.uint32)[0] = before
    return segment


class CollectiveStage:
    """One rank's end; calls are made by one thread at a time, `abort` and `close` by any.

    Owns the descriptor. `label` says how a rank is called in sentences; `spins` is how often a waiter looks before it
    sleeps.
    """

    def __init__(self, descriptor: int, rank: int, world: int, label: Label = str) -> None:
        self.rank, self.world, self._label = rank, world, label
        self.spins = _PATIENCE * spins_for(world)
        self._lock = threading.Lock()  # nobody unmaps what another thread is about to write
        self._closing = self._closed = False
        self._segment = Segment.attach(descriptor)
        where = calls.layout_of(world)
        header = self._u32(0, calls.HEADER_WORDS) if self._segment.num_bytes == where.num_bytes else []
        if header[:-1] != [calls.MAGIC, calls.VERSION, world]:
            self._segment.close()
            raise ManyhandsError(f"the shared memory does not belong to a process group of {world}")
        self._regions = [calls.REGIONS + one * where.region_bytes for one in range(world)]
        self._scratch = np.zeros(compiled_calls.SCRATCH_ROOM, np.uint8)
        control, scratch = self._segment.address, self._scratch.ctypes.data
        memory = [control, where.region_bytes, control + where.areas, calls.HALF_BYTES]
        # in the order of `compiled_calls.CONTROL` and what follows it
        self._stage = np.array([*memory, rank, world, self.spins, scratch, header[-1], 0], np.int64)
        self._address = self._stage.ctypes.data
        self._call = np.zeros(most_words(world), np.int64)  # the exchange under way
        self._call_address = self._call.ctypes.data

    def wakeup_address(self, rank: int) -> int:
        return self._segment.address + self._regions[rank] + calls.WAKEUP

    @property
    def abort_address(self) -> int:
        return self._segment.address + calls.ABORT_OFFSET

    def all_reduce(self, plan: ReductionPlan, number: int, address: int, timeout_s: float) -> None:
        """Collective: the items at `address` become those of all ranks, combined in rank order."""
        words = plan.words
        words[0], words[compiled_calls.PHASE] = number, compiled_calls.BEGIN
        words[compiled_calls.STEP], words[compiled_calls.ADDRESS] = 0, address
        self._run(compiled_calls.all_reduce, words, plan.address, plan.call, timeout_s)

    def exchange(
        self,
        call: CollectiveCall,
        chunks: Sequence[Chunk],
        reads: Sequence[Read],
        timeout_s: float,
        *,
        per_rank: bool = False,
        even: bool = True,
        reducer: RoundReducer | None = None,
    ) -> None:
        """Collective: lay out `chunks`, and read those of others.

        `per_rank` says that chunk i is for rank i, on the ranks that have chunks; else there is at most one, for all.
        Without `even`, what each rank brings for each is compared with what that one expects. With a `reducer`, all
        reads are of one chunk to one place, where this rank's own contribution lies.
        """
        room = calls.chunk_bytes(self.world if per_rank else 1)
        head = compiled_calls.call_head(call.words(), reducer)
        words = exchange_words(head, chunks, reads, even=even, chunk_bytes=room)
        self._call[: len(words)] = words
        self._run(compiled_calls.exchange, self._call, self._call_address, call, timeout_s)

    def waiting_in(self, kind: CallKind | None, peer: int = 0, tag: int = 0) -> None:
        """Show the others what this rank waits for outside collectives, or that it no longer does."""
        state = self._segment.array(self._regions[self.rank] + calls.STATE_WAIT, 3, np.int64)
        state[:] = kind or 0, peer, tag

    def abort(self, rank: int, reason: StageReason) -> None:
        """Stop the group because of `rank`, on all ranks; the first reason stands."""
        with self._lock:
            if not self._closed:
                compiled_calls.abort(self._address, rank + 1 | reason << _REASON_SHIFT)

    @property
    def has_stopped(self) -> bool:
        return self._u32(calls.ABORT_OFFSET, 1) != [0]

    def stopped(self, what: str) -> ManyhandsError:
        (word,) = self._u32(calls.ABORT_OFFSET, 1)
        rank, reason = (word & (1 << _REASON_SHIFT) - 1) - 1, StageReason(word >> _REASON_SHIFT)
        who = f"rank {self._label(rank)}"
        if reason is StageReason.DIED:
            return WorkerFailed(f"{what}: {who} died: its process ended without leaving the group", rank)
        if reason is StageReason.LEFT:
            return WorkerFailed(f"{what}: {who} left the group while others waited for it", rank)
        if reason is StageReason.LATE:
            return PeerTimeout(f"{what}: {who} did not arrive in time; it {self.last_seen(rank)}", rank)
        failed = "failed or was interrupted during a call"
        cause = failed if reason is StageReason.FAILED else "aborted the group"
        return Aborted(f"{what}: stopped because {who} {cause}")

    def has_left(self, rank: int) -> bool:
        return self._u32(self._regions[rank] + calls.STATE_LEFT, 1) != [0]

    def last_seen(self, rank: int) -> str:
        region = self._regions[rank]
        if self.has_left(rank):
            return "has left the group"
        kind, peer, tag = self._segment.array(region + calls.STATE_WAIT, 3, np.int64).tolist()
        if kind:
            whom = "any rank" if peer < 0 else f"rank {self._label(peer)}"
            way = "to" if kind == CallKind.SEND else "from"
            return f"waits in {CallKind(kind).name.lower()} {way} {whom} (tag {tag})"
        records = self._segment.array(region + calls.RECORDS, 2 * calls.RECORD_WORDS, np.int64).tolist()
        halves = records[: calls.RECORD_WORDS], records[calls.RECORD_WORDS :]
        last = max(map(CollectiveCall.from_words, halves))
        if not last.number:
            return "has made no call yet"
        arrived, done = (self._u32(region + at, 1) for at in (calls.ARRIVED, calls.DONE))
        return f"is in {'' if arrived != done else 'no call since '}{last} #{last.number}"

    def interrupt(self) -> None:
        """Have the call under way, if there is one, raise soon: the group is about to be closed."""
        self._closing = True

    def close(self) -> None:
        """Leave the group and release the memory; idempotent. No call may be under way."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._segment.array(self._regions[self.rank] + calls.STATE_LEFT, 1, np.uint32)[0] = 1
            self._segment.close()

    def _run(
        self,
        kernel: Callable[[int, int, int], int],
        words: np.ndarray,
        address: int,
        call: CollectiveCall,
        timeout_s: float,
    ) -> None:
        if self._closed:
            raise UserError(f"{call}: the process group is closed")
        began_ns = now_ns = time.monotonic_ns()
        deadline_ns = began_ns + int(timeout_s * 1e9)
        try:
            while True:
                status = kernel(self._address, address, min(deadline_ns, now_ns + _SLICE_NS))
                if status == REACHED:
                    return
                if status != TIMED_OUT:
                    break
                now_ns = time.monotonic_ns()
                self._check(words, call, began_ns, timeout_s if now_ns >= deadline_ns else None)
        except BaseException:
            self.abort(self.rank, StageReason.FAILED)  # an earlier reason stands
            raise
        call = call._replace(number=int(words[0]))
        if status == compiled_calls.MISMATCH:
            self._refuse(call, int(words[compiled_calls.ROUND]) & 1)
        error, late = self.stopped(f"{call} #{call.number}"), self._late(words)
        if isinstance(error, PeerTimeout) and late:  # that was for another call: who is late for this one
            error = PeerTimeout(self._lateness(call, began_ns, late), error.peer)
        raise error

    def _check(self, words: np.ndarray, call: CollectiveCall, began_ns: int, over_s: float | None) -> None:
        """Raise if a rank that is waited for has left, or if the call's time of `over_s` is over."""
        call = call._replace(number=int(words[0]))
        if self._closing:
            raise UserError(f"{call} #{call.number}: the process group was closed during the call")
        late = self._late(words)
        gone = [rank for rank in late if self.has_left(rank)]
        if gone:
            self.abort(gone[0], StageReason.LEFT)
            raise WorkerFailed(self._lateness(call, began_ns, gone), gone[0])
        if over_s is not None and late:
            text = self._lateness(call, began_ns, late)
            self.abort(late[0], StageReason.LATE)
            raise PeerTimeout(
                f"{text}; check that it still runs and makes the same calls, or set a timeout above {over_s:g} s",
                late[0],
            )

    def _late(self, words: np.ndarray) -> list[int]:
        phase, number = words[[compiled_calls.PHASE, compiled_calls.ROUND]].tolist()
        which = calls.DONE if phase == compiled_calls.REDUCED else calls.ARRIVED
        seen = [self._u32(self._regions[rank] + which, 1)[0] for rank in range(self.world)]
        return [rank for rank, word in enumerate(seen) if (word - number) & 0x80000000]

    def _lateness(self, call: CollectiveCall, began_ns: int, late: Sequence[int]) -> str:
        where = [(rank, self.last_seen(rank)) for rank in late]
        return calls.describe_lateness(call, (time.monotonic_ns() - began_ns) / 1e9, where, self._label)

    def _refuse(self, call: CollectiveCall, slot: int) -> NoReturn:
        made, tables = [], []
        for rank in range(self.world):
            region, size = self._regions[rank], 2 * self.world
            record = region + calls.RECORDS + slot * calls.RECORD_BYTES
            words = self._segment.array(record, calls.RECORD_WORDS, np.int64).tolist()
            made.append(CollectiveCall.from_words(words))
            table = region + calls.TABLES + slot * 8 * size
            tables.append(self._segment.array(table, size, np.int64).tolist())
        compiled_calls.leave_round(self._address)
        compared = slice(calls.COMPARED_WORDS)
        if any(other[compared] != call[compared] for other in made):
            raise UserError(calls.describe_mismatch(made, self._label))
        brought = [table[: self.world] for table in tables]
        expected = [table[self.world :] for table in tables]
        raise UserError(calls.describe_uneven(f"{call.name} #{call.number}", brought, expected, self._label))

    def _u32(self, offset: int, count: int) -> list[int]:
        words: list[int] = self._segment.array(offset, count, np.uint32).tolist()
        return words
