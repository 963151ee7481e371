"""Point-to-point messages between the ranks of one process group: send, receive, receive from any source.

Between each two ranks there is a ring of bytes for each direction (see `transport.link.byte_ring`), in memory that is
reserved when the first message is sent. A rank that writes into a ring or reads from it wakes the other rank through
its wake-up word, on which a rank can wait for all others at once.

What fits into the ring is sent when `send` is called. The rest is sent whenever a thread of this process waits for a
message, or else by a background thread. Messages of one sender and one tag arrive in order. A message that no receive
matches yet is set aside only when it stands before another that a receive waits for.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed
from manyhands.interop.c10d.collective_calls import CallKind, CollectiveCall, Label, dtype_code
from manyhands.interop.c10d.shared_stage import CollectiveStage, StageReason
from manyhands.interop.c10d.works import PendingWork
from manyhands.native.segment import PAGE, Segment, reserve, round_up
from manyhands.native.waiting import REACHED, nudge, wait_until
from manyhands.transport.link import byte_ring

_SLICE_NS: Final = 250_000_000  # a waiter polls for failures this often
_GRACE_S: Final = 0.001  # most callers wait for their message at once; only then does the thread take over
_MOST_BYTES: Final = 16 << 20  # for all rings of a group, as long as each has its least
_LEAST_RING: Final = 16 << 10
_MOST_RING: Final = 1 << 20


def capacity_bytes(world: int) -> int:
    return max(_LEAST_RING, min(_MOST_RING, round_up(_MOST_BYTES // max(world * (world - 1), 1), PAGE)))


def ring_index(sender: int, receiver: int, world: int) -> int:
    return sender * (world - 1) + (receiver if receiver < sender else receiver - 1)


class PointToPoint:
    """One rank's end, for any thread; owns the descriptor, which has no size before the first message."""

    def __init__(self, descriptor: int, stage: CollectiveStage, name: str, label: Label = str) -> None:
        self._descriptor, self._stage, self._name, self._label = descriptor, stage, name, label
        self._rank, self._world = stage.rank, stage.world
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # a message ended, or no thread drives any more
        self._needed = threading.Condition(lock)  # the thread has work, or is to end
        self._asleep = False  # the thread will not poll again by itself
        self._segment: Segment | None = None
        self._rings: dict[int, int] = {}  # by peer: the address of the ring that leads to it
        self._outgoing: dict[int, deque[OutgoingMessage]] = {}
        self._requests: list[PendingReceive] = []
        self._inboxes: dict[int, Inbox] = {}
        self._driven = False  # a thread waits for the wake-up
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> PointToPointWork:
        """Send a contiguous tensor, which must not change until the work is complete."""
        work = PointToPointWork(CallKind.SEND, tensor, to, tag, self._drive)
        with self._changed:
            self._open(work, timeout_s)
            self._outgoing[to].append(OutgoingMessage(work, tensor))
            ended = self._advance()[1]
        return self._posted(work, ended)

    def receive(self, tensor: Tensor, source: int | None, tag: int, timeout_s: float) -> PointToPointWork:
        work = PointToPointWork(CallKind.RECV, tensor, source, tag, self._drive)
        request = PendingReceive(work, tensor)
        with self._changed:
            self._open(work, timeout_s)
            sources = self._inboxes if source is None else (source,)
            ended: Ended = []
            if not any(self._inboxes[one].take_aside(request, ended) for one in sources):
                self._requests.append(request)
                ended = self._advance()[1]
        return self._posted(work, ended)

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            closed = f"{self._name} was closed"
            ended = self._fail_all(lambda work: UserError(f"{work.describe(self._label)}: {closed}"))
            self._needed.notify_all()
            thread, self._thread = self._thread, None
        nudge(self._stage.wakeup_address(self._rank))  # for whoever of this process waits for it
        _complete(ended)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._driven)
            if self._segment is not None:
                self._segment.close()
                self._segment = None
            else:
                os.close(self._descriptor)

    def disown(self) -> None:
        """In a forked child: the messages belong to the parent, and the parent's threads do not exist here."""
        self._closed = True
        self._name += " of the parent process"
        self._changed = threading.Condition()

    def _open(self, work: PointToPointWork, timeout_s: float) -> None:
        if self._closed:
            raise UserError(f"{work.describe(self._label)}: {self._name} is closed")
        if self._stage.has_stopped:
            raise self._stage.stopped(work.describe(self._label))
        if work.tag < 0:
            raise UserError(f"tag={work.tag}: must be at least 0")
        if work.peer is not None and (not 0 <= work.peer < self._world or work.peer == self._rank):
            others = f"one of the {self._world} ranks other than this one ({self._rank})"
            raise UserError(f"rank={work.peer}: must be {others}")
        work.deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        if self._segment is not None:
            return
        # Every rank reserves, maps and prepares the rings when it first needs them, in the same way.
        world, one = self._world, round_up(byte_ring.CONTROL_BYTES + capacity_bytes(self._world), PAGE)
        reserve(self._descriptor, one * world * (world - 1), "messages between ranks")
        segment = self._segment = Segment.attach(self._descriptor)
        for peer in range(world):
            if peer != self._rank:
                outgoing = segment.address + ring_index(self._rank, peer, world) * one
                incoming = segment.address + ring_index(peer, self._rank, world) * one
                for address in (outgoing, incoming):
                    byte_ring.prepare(address, one - byte_ring.CONTROL_BYTES)
                self._rings[peer], self._outgoing[peer] = outgoing, deque()
                self._inboxes[peer] = Inbox(peer, incoming, self._label)

    def _posted(self, work: PointToPointWork, ended: Ended) -> PointToPointWork:
        _complete(ended)
        if not work.is_completed():
            with self._changed:
                if self._thread is None and not self._closed:
                    name = f"manyhands messages of {self._name}"
                    self._thread = threading.Thread(target=self._carry_on, name=name, daemon=True)
                    self._thread.start()
                if self._asleep:
                    self._needed.notify()
        return work

    def _pending(self) -> bool:
        return bool(self._requests) or any(self._outgoing.values())

    def _advance(self) -> tuple[bool, Ended]:
        """Move what can be moved now, with the lock held: whether anything did, and which messages ended."""
        moved, ended = False, Ended()
        for peer, outgoing in self._outgoing.items():
            gone = True
            while outgoing and gone:
                wrote, gone = outgoing[0].advance(self._rings[peer])
                if wrote:
                    moved = True
                    nudge(self._stage.wakeup_address(peer))
                if gone:
                    ended.append((outgoing.popleft().work, None))
        for source, inbox in self._inboxes.items():
            if inbox.advance(self._requests, ended):
                moved = True
                nudge(self._stage.wakeup_address(source))
        if ended:
            self._changed.notify_all()
        return moved, ended

    def _carry_on(self) -> None:
        """Run the background thread: it waits for the wake-up while no other thread does."""
        while True:
            with self._changed:
                if not self._pending():
                    self._asleep = True
                    self._needed.wait_for(lambda: self._closed or self._pending())
                    self._asleep = False
                self._needed.wait_for(lambda: self._closed, _GRACE_S)
                if self._closed:
                    return
                if self._driven or not self._pending():
                    continue
                self._driven = True
            self._wait_for_wakeup(lambda: not self._pending(), time.monotonic_ns() + _SLICE_NS)

    def _drive(self, work: PointToPointWork, timeout_s: float | None) -> None:
        until_ns = work.deadline_ns + _SLICE_NS
        if timeout_s is not None:
            until_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._stage.waiting_in(work.kind, -1 if work.peer is None else work.peer, work.tag)
        try:
            while not work.is_completed() and time.monotonic_ns() < until_ns:
                with self._changed:
                    if self._driven:
                        left_s = max((until_ns - time.monotonic_ns()) / 1e9, 0)
                        self._changed.wait_for(lambda: work.is_completed() or not self._driven, left_s)
                        continue
                    self._driven = True
                self._wait_for_wakeup(work.is_completed, min(until_ns, time.monotonic_ns() + _SLICE_NS))
        finally:
            self._stage.waiting_in(None)

    def _wait_for_wakeup(self, over: Callable[[], bool], until_ns: int) -> None:
        """Move messages and sleep alternately until `over` or `until_ns`; the caller has set `_driven`."""
        wakeup, stop = self._stage.wakeup_address(self._rank), self._stage.abort_address
        try:
            while not over():
                with self._changed:
                    if self._closed:
                        return
                    woken = ctypes.c_uint32.from_address(wakeup).value
                    moved, ended = self._advance()
                _complete(ended)
                if moved:
                    continue
                if time.monotonic_ns() >= until_ns:
                    break
                if wait_until(wakeup, woken + 1, stop, until_ns, self._stage.spins) != REACHED:
                    break
            with self._changed:  # messages that can no longer complete fail
                if self._closed:
                    return
                _, ended = self._advance()
                ended += self._fail_all(self._failure)
            _complete(ended)
        finally:
            with self._changed:
                self._driven = False
                self._changed.notify_all()

    def _failure(self, work: PointToPointWork) -> ManyhandsError | None:
        """Why it can no longer complete: the group has stopped, a peer has left, or the time is over."""
        what = work.describe(self._label)
        if self._stage.has_stopped:
            return self._stage.stopped(what)
        others = [rank for rank in range(self._world) if rank != self._rank]
        peers = others if work.peer is None else [work.peer]
        if all(self._stage.has_left(peer) for peer in peers):
            return WorkerFailed(f"{what}: rank {self._label(peers[0])} has left the group", peers[0])
        if time.monotonic_ns() < work.deadline_ns:
            return None
        where = "; ".join(f"rank {self._label(peer)} {self._stage.last_seen(peer)}" for peer in peers)
        deed = "received it" if work.kind is CallKind.SEND else "sent it"
        self._stage.abort(peers[0], StageReason.LATE)  # a cut message corrupts all that follow
        return PeerTimeout(f"{what}: no rank {deed} in time: {where}", peers[0])

    def _fail_all(self, failure: Callable[[PointToPointWork], ManyhandsError | None]) -> Ended:
        ended: Ended = []
        queues: list[Any] = [*self._outgoing.values(), self._requests]
        for pending in queues:
            for message in list(pending):
                if (error := failure(message.work)) is not None:
                    pending.remove(message)
                    ended.append((message.work, error))
        if ended:
            self._changed.notify_all()
        return ended


def _complete(ended: Ended) -> None:
    for work, error in ended:
        work.complete(error)


# Messages under way between two ranks, without their waiting: from here on nothing blocks, and everything is called
# with the lock of `PointToPoint` held.

HEADER_WORDS: Final = 8  # tag, bytes, dtype, number of dimensions, the first four sizes
HEADER_BYTES: Final = 8 * HEADER_WORDS
_SHOWN_DIMS: Final = 4


Drive: TypeAlias = "Callable[[PointToPointWork, float | None], None]"


class PointToPointWork(PendingWork):
    """A message under way; a thread that waits for it advances all messages."""

    def __init__(self, kind: CallKind, tensor: Tensor, peer: int | None, tag: int, drive: Drive) -> None:
        super().__init__([tensor])
        self.kind, self.peer, self.tag = kind, peer, tag
        self.deadline_ns = 0
        self.source = -1 if peer is None else peer
        self._drive = drive

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.is_completed():
            self._drive(self, timeout.total_seconds() or None)
        return super().wait(timeout)

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def describe(self, label: Label = str) -> str:
        whom = "any rank" if self.peer is None else f"rank {label(self.peer)}"
        way = "to" if self.kind is CallKind.SEND else "from"
        return f"{self.kind.name.lower()} of {_load(self.result()[0])} {way} {whom} (tag {self.tag})"


Ended = list[tuple[PointToPointWork, BaseException | None]]
"""Works that have ended, and how; completed once the lock is released."""


class OutgoingMessage:
    """A message sent through one ring; `tensor` is contiguous and must not change meanwhile."""

    def __init__(self, work: PointToPointWork, tensor: Tensor) -> None:
        self.work, self._tensor = work, tensor
        sizes = [*tensor.shape[:_SHOWN_DIMS], 0, 0, 0, 0][:_SHOWN_DIMS]
        words = [work.tag, tensor.nbytes, dtype_code(tensor.dtype), tensor.dim(), *sizes]
        self._header = np.array(words, np.int64)
        self._done = 0

    def advance(self, address: int) -> tuple[bool, bool]:
        """Write what fits into the ring at `address`: whether anything moved, and whether all has left."""
        tensor, before = self._tensor, self._done
        header, data = (self._header.ctypes.data, HEADER_BYTES), (tensor.data_ptr(), tensor.nbytes)
        self._done = byte_ring.write(address, *header, *data, before, 0, 0)
        return self._done > before, self._done == HEADER_BYTES + tensor.nbytes


class PendingReceive:
    """A receive: where a message of one tag goes, from one rank or from any; `tensor` is contiguous."""

    def __init__(self, work: PointToPointWork, tensor: Tensor) -> None:
        self.work, self.tensor = work, tensor
        self.begun = False  # its message is being read

    def takes(self, source: int, tag: int | None = None) -> bool:
        """Whether this receive may still match a message of `source`, with this tag if it is known."""
        return not self.begun and self.work.peer in (None, source) and tag in (None, self.work.tag)

    def refusal(self, header: Sequence[int], source: str) -> UserError | None:
        tag, num_bytes, dtype = header[:3]
        if num_bytes == self.tensor.nbytes and dtype == dtype_code(self.tensor.dtype):
            return None
        shown = min(header[3], _SHOWN_DIMS)
        shape = tuple(header[4 : 4 + shown])
        sent = CollectiveCall(0, CallKind.SEND, dtype, dims=header[3], tensors=1, shape=shape)
        return UserError(
            f"recv: rank {source} sends {sent.load} (tag {tag}), but the receiver expects {_load(self.tensor)}; both "
            "sides must agree on shape and dtype"
        )


class _Aside(NamedTuple):
    """A message that came before a receive for it."""

    header: Sequence[int]
    bytes: Tensor


class Inbox:
    """What comes in from one rank: the message being read, and those set aside."""

    def __init__(self, source: int, address: int, label: Label) -> None:
        self.source, self._ring, self._label = source, address, label
        self._header = np.zeros(HEADER_WORDS, np.int64)
        self._header_address = self._header.ctypes.data
        self._read = 0  # bytes of the header, and then of the payload
        self._target: PendingReceive | _Aside | None = None
        self._aside: deque[_Aside] = deque()

    def take_aside(self, request: PendingReceive, ended: Ended) -> bool:
        for message in self._aside:
            if request.takes(self.source, message.header[0]):
                self._aside.remove(message)
                refusal = request.refusal(message.header, self._label(self.source))
                if refusal is None:
                    request.tensor.view(-1).view(torch.uint8).copy_(message.bytes)
                request.work.source = self.source
                ended.append((request.work, refusal))
                return True
        return False

    def advance(self, requests: list[PendingReceive], ended: Ended) -> bool:
        """Read what is there while it may serve a receive; those served leave `requests`. Whether anything moved."""
        moved = False
        while self._target is not None or any(request.takes(self.source) for request in requests):
            if self._target is None:
                before, self._read = self._read, self._take(self._header_address, HEADER_BYTES)
                moved |= self._read > before
                if self._read < HEADER_BYTES:
                    break
                self._read, self._target = 0, self._receiver(requests, ended)
            target = self._target
            payload = target.tensor if isinstance(target, PendingReceive) else target.bytes
            before, self._read = self._read, self._take(payload.data_ptr(), payload.nbytes)
            moved |= self._read > before
            if self._read < payload.nbytes:
                break
            self._read, self._target = 0, None
            if isinstance(target, PendingReceive):
                requests.remove(target)
                ended.append((target.work, None))
            elif target.header[0] >= 0:
                self._aside.append(target)
        return moved

    def _take(self, address: int, num_bytes: int) -> int:
        return int(byte_ring.read(self._ring, address, num_bytes, self._read, 0, 0)) if num_bytes else 0

    def _receiver(self, requests: list[PendingReceive], ended: Ended) -> PendingReceive | _Aside:
        header = self._header.tolist()
        request = next((one for one in requests if one.takes(self.source, header[0])), None)
        if request is not None:
            request.work.source = self.source
            refusal = request.refusal(header, self._label(self.source))
            if refusal is None:
                request.begun = True
                return request
            requests.remove(request)
            ended.append((request.work, refusal))
            header[0] = -1  # read to its end, and dropped
        return _Aside(header, torch.empty(header[1], dtype=torch.uint8))


def _load(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
