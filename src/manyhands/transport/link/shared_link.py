"""The link of two roles on one host: a ring in shared memory for each direction, and a lifeline.

The lifeline is a socket pair on which nothing is ever sent: each process holds one end, so the kernel shows the other
that it is gone, however it went. A clean close is written into the ring first, which distinguishes the two.

Everything is made by the parent and travels by inheritance: `SharedLinkFiles` for one link, `mesh.SharedMesh` for the
links between all ranks of a group. `SharedLink.pair` has both ends in one process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, Self

import torch

from manyhands.errors import UserError
from manyhands.native.closeable import Closeable
from manyhands.native.segment import CACHE_LINE, PAGE, Segment, round_up
from manyhands.native.waiting import LEAVE_BYTES, leave_cores, on_my_core, spins_for
from manyhands.transport.link import byte_ring
from manyhands.transport.link.interface import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_QUEUE_BYTES,
    Closed,
    Header,
    Message,
    PeerDied,
    check_size,
)
from manyhands.transport.link.queued import SLICE_NS, Incoming, Outgoing, QueuedLink
from manyhands.transport.link.wire import Wire

DEFAULT_CAPACITY_BYTES: Final = (1 << 20) + PAGE  # a payload of 1 MiB, and its header
_PATIENCE: Final = 4  # times the usual spinning: a peer that runs Python takes 10 to 20 µs to answer


class LinkDescriptors(NamedTuple):
    """What one end needs: two descriptors of this process, inheritable by number (`pass_fds`)."""

    segment: int
    lifeline: int


class SharedLinkFiles(Closeable):
    """The shared memory and the lifelines of one link, in the process that makes it; a context manager.

    The maker must `close` its copies once both ends are held elsewhere: a lifeline it keeps hides a death.
    """

    def __init__(self, segment: Segment, lifelines: tuple[int, int]) -> None:
        """Own a segment and the two ends of a socket pair; use `create`."""
        self._segment = segment
        self._lifelines = lifelines

    @classmethod
    def create(cls, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> Self:
        """Reserve two rings of at least `capacity_bytes`, or raise OutOfSharedMemory."""
        if not PAGE <= capacity_bytes <= byte_ring.MAX_CAPACITY_BYTES:
            raise UserError(
                f"capacity_bytes={capacity_bytes} must be from {PAGE} to {byte_ring.MAX_CAPACITY_BYTES}"
            )
        one = round_up(byte_ring.CONTROL_BYTES + capacity_bytes, PAGE)
        segment = Segment.create(2 * one, "a link")
        try:
            first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            segment.close()
            raise
        for address in (segment.address, segment.address + one):
            byte_ring.prepare(address, capacity_bytes)
        return cls(segment, (first.detach(), second.detach()))

    def descriptors(self, end: int) -> LinkDescriptors:
        """The descriptors of end 0 or 1, for a child that inherits them; they stay this object's."""
        return LinkDescriptors(self._segment.descriptor, self._lifelines[end])

    def close(self) -> None:
        self._segment.close()
        for descriptor in self._lifelines:
            if descriptor >= 0:
                os.close(descriptor)
        self._lifelines = (-1, -1)


class SharedLink(QueuedLink):
    """One end of a link through shared memory; made by `attach` or `pair`.

    `roles` says how many processes of this host wait for each other, `queue_bytes` bounds what waits for room in the
    ring, `max_payload_bytes` what the peer may announce. A wait looks every 50 ms whether the peer's process is there.
    """

    wire = Wire.SHARED

    def __init__(
        self,
        segment: Segment,
        lifeline: socket.socket,
        *,
        end: int,
        peer: str,
        roles: int = 2,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        super().__init__(peer, max_payload_bytes)
        self._segment = segment
        self._lifeline = lifeline
        one = segment.num_bytes // 2
        out_address, in_address = segment.address + end * one, segment.address + (1 - end) * one
        self._own_lines = ((out_address, out_address), (in_address, in_address + CACHE_LINE))
        self._peer_line = in_address  # where the peer says how it leaves
        self._looked_ns = 0
        self.rings = out_address, in_address
        self.spins = spins = _PATIENCE * spins_for(roles)
        room_to_part = roles <= len(os.sched_getaffinity(0))
        self._outgoing = Outgoing(
            partial(byte_ring.write, out_address),
            queue_bytes,
            self._peer_end,
            f"manyhands link to {peer}",
            spins,
        )
        self._incoming = Incoming(
            partial(byte_ring.read, in_address),
            max_payload_bytes,
            self._peer_end,
            peer,
            spins,
            _leaver(in_address) if room_to_part else None,
        )

    @classmethod
    def attach(cls, descriptors: LinkDescriptors, *, end: int, peer: str, **bounds: int) -> Self:
        """Take one end, in the process that inherited its descriptors; the link owns and closes them."""
        if end not in (0, 1):
            raise UserError(f"end={end} must be 0 or 1")
        segment, lifeline = Segment.attach(descriptors.segment), socket.socket(fileno=descriptors.lifeline)
        return cls(segment, lifeline, end=end, peer=peer, **bounds)

    @classmethod
    def pair(
        cls,
        names: tuple[str, str] = ("end 0", "end 1"),
        *,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        **bounds: int,
    ) -> tuple[Self, Self]:
        """Both ends in one process, for threads; `names[i]` holds the i-th."""
        with SharedLinkFiles.create(capacity_bytes) as files:
            own = [LinkDescriptors(*map(os.dup, files.descriptors(end))) for end in (0, 1)]
        first, second = (cls.attach(own[end], end=end, peer=names[1 - end], **bounds) for end in (0, 1))
        return first, second

    # For `SharedExchange`, which carries by itself what both ends are to send and receive.
    @property
    def is_between(self) -> bool:
        """Whether nothing is queued and nothing half received."""
        return not self._closed and self._outgoing.is_free and self._incoming.is_between

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def header_address(self) -> int:
        return self._incoming.header_address

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the link is not closed, and its memory stays."""
        with self._receiving, self._outgoing.lock:
            yield

    def begin_send(self, message: Message) -> int:
        """The address of the header with which the message is to be written."""
        check_size(message.payload_bytes, self._max_payload_bytes, self.peer)
        return self._outgoing.begin(Header.of(message, self.counters.messages_sent).encode())

    def end_send(self, message: Message, done: int) -> None:
        self._outgoing.end(message.payload, message.payload_bytes, done)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += message.payload_bytes

    def announced(self, into: torch.Tensor) -> tuple[int, int] | None:
        """Where the payload goes of the header that was read, and how long it is; None for a goodbye."""
        header = self._incoming.announced(into)
        return None if header is None else (into.data_ptr(), header.payload_bytes)

    def end_receive(self, into: torch.Tensor, done: int) -> Message | None:
        message = self._incoming.end(into, done)
        if message is not None:
            self.counters.messages_received += 1
            self.counters.bytes_received += message.payload_bytes
        return message

    def peer_end(self) -> Closed | PeerDied | None:
        return self._peer_end()

    def _say_goodbye(self, complete: bool) -> None:
        for address, line in self._own_lines:
            byte_ring.end(address, line, byte_ring.CLOSED if complete else byte_ring.CUT)

    def _let_go(self, *, in_child: bool = False) -> None:
        if not in_child:
            self._segment.close()
        self._lifeline.close()

    def _peer_end(self) -> Closed | PeerDied | None:
        """How the peer left, or None; what the ring says is always looked at, the lifeline every 50 ms."""
        if self._closed:
            return Closed()
        if self._gone is None:
            self._gone = self._look()
        return self._gone

    def _look(self) -> Closed | PeerDied | None:
        how = byte_ring.state(self._peer_line)
        if how == byte_ring.OPEN:
            now_ns = time.monotonic_ns()
            if now_ns - self._looked_ns < SLICE_NS // 2:
                return None
            self._looked_ns = now_ns
            try:
                if self._lifeline.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b"":
                    return None
            except BlockingIOError:  # nothing to read: its process holds the other end
                return None
            except ConnectionError:
                pass
            how = byte_ring.state(self._peer_line)  # it may have closed, and then gone, since the first look
        if how == byte_ring.CLOSED:
            return Closed()
        if how == byte_ring.CUT:
            return PeerDied(f"{self.peer} closed the link with messages still queued, which are lost")
        return PeerDied(f"{self.peer} is gone: its process ended without closing the link")


def _leaver(address: int) -> Callable[[], bool]:
    room = (ctypes.c_char * LEAVE_BYTES)()

    def leave() -> bool:
        if not on_my_core(address):
            return False
        leave_cores(address, 1, 0, ctypes.addressof(room))
        return True

    return leave
