"""One connection of a hub: its socket, both directions, and the memory that both ends share.

Frames are sent in order from a bounded queue, without ever waiting: what the kernel accepts is sent at once; the rest
is kept as references until `Outbox.pump` can send it. Two threads may use an outbox: the application's, and the one
that sends heartbeats while the application is busy.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any, Final

from manyhands.errors import UserError, format_bytes
from manyhands.native.segment import Segment
from manyhands.transport.frames import (
    IN_ARENA,
    OF_TRANSPORT,
    FrameDecoder,
    FrameHeader,
    Limits,
    WholeFrame,
    encode_header,
)
from manyhands.transport.hub.arenas import Arenas
from manyhands.transport.hub.handshake import BEFORE_HANDSHAKE, CONTROL, Handshake
from manyhands.transport.messages import ProtocolError
from manyhands.transport.tls import End, SecureSocket

_PARTS_PER_CALL: Final = 512  # the kernel's limit is 1024
Part = bytes | memoryview


class _Passed(bytes):
    """The first bytes of a frame that passes a descriptor; owns the descriptor until it is sent."""

    descriptor: int


class Outbox:
    """The sending side of one socket; `on_pending` is called when its queue becomes non-empty or empty."""

    def __init__(self, end: End, capacity_bytes: int, on_pending: Callable[[bool], None]) -> None:
        self._end = end
        self._capacity_bytes = capacity_bytes
        self._on_pending = on_pending
        self._lock = threading.Lock()
        self._queue: deque[Part] = deque()
        self._later: list[Part] = []
        self._later_bytes = 0
        self._closed = False
        self._reported_pending = False
        self.pending_bytes = 0
        self.writes = 0
        """How often bytes have left: no change since the last heartbeat means that the connection is idle."""

    def offer(self, parts: list[Part], num_bytes: int, descriptor: int = -1, *, later: bool = False) -> bool:
        """Send or queue one frame of `num_bytes`; False, with nothing taken, if there is no capacity or no peer.

        An empty queue takes a frame of any size. A `descriptor` is duplicated and sent with the first part. With
        `later` a frame is held back, and queued together with the next ones or by `pump`.
        """
        with self._lock:
            waiting_bytes = self.pending_bytes + self._later_bytes
            if self._closed or (waiting_bytes and waiting_bytes + num_bytes > self._capacity_bytes):
                return False
            if later and descriptor < 0:
                self._later += parts
                self._later_bytes += num_bytes
                return True
            self._take_in_later()
            at_once = not self._queue and descriptor < 0 and len(parts) <= _PARTS_PER_CALL
            sent = self._write(parts) if at_once else 0
            if sent == num_bytes:
                return True
            if sent < 0:
                return False
            if descriptor >= 0:
                first = _Passed(parts[0])
                first.descriptor = os.dup(descriptor)
                parts = [first, *parts[1:]]
            self._queue.extend(parts)
            self.pending_bytes += num_bytes
            self._drop(sent)
            if not at_once and not self._reported_pending:
                self._pump()
            self._report_pending()
            return True

    def pump(self) -> None:
        with self._lock:
            self._take_in_later()
            if self._queue and not self._closed:
                self._pump()
                self._report_pending()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _take_in_later(self) -> None:
        if self._later:
            self._queue.extend(self._later)
            self.pending_bytes += self._later_bytes
            self._later, self._later_bytes = [], 0

    def _report_pending(self) -> None:
        if bool(self._queue) is not self._reported_pending:
            self._reported_pending = not self._reported_pending
            self._on_pending(self._reported_pending)

    def _pump(self) -> None:
        while self._queue and not self._closed:
            first = self._queue[0]
            if isinstance(first, _Passed):
                sent = self._write([first], first.descriptor)
                if sent > 0:
                    os.close(first.descriptor)
                    self._queue[0] = bytes(first)
            else:
                next_parts = islice(self._queue, _PARTS_PER_CALL)
                sent = self._write([*takewhile(lambda part: not isinstance(part, _Passed), next_parts)])
            if sent <= 0:
                return
            self._drop(sent)

    def _write(self, parts: Sequence[Part], descriptor: int = -1) -> int:
        """How many bytes the kernel accepted; -1 if the peer is gone. A `descriptor` is passed along."""
        try:
            if descriptor < 0:
                sent = self._end.sendmsg(parts)
            else:
                assert isinstance(self._end, socket.socket), "descriptors travel over Unix sockets"
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
                sent = self._end.sendmsg(parts, passed)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the receiving side reports the reason, after it has read what arrived before
            self._close()
            return -1
        self.writes += 1
        return sent

    def _drop(self, sent: int) -> None:
        self.pending_bytes -= sent
        queue = self._queue
        while sent:
            first = queue[0]
            if len(first) > sent:
                queue[0] = memoryview(first)[sent:]
                return
            sent -= len(first)
            queue.popleft()

    def _close(self) -> None:
        self._closed = True
        for part in self._queue:
            if isinstance(part, _Passed):
                os.close(part.descriptor)
        self._queue.clear()
        self._later.clear()
        self.pending_bytes = self._later_bytes = 0


_READ_PER_POLL_BYTES: Final = 4 << 20  # then the other connections are served
_DESCRIPTORS_AT_ONCE: Final = 4
_ARENA_FROM_BYTES: Final = 4096  # the kernel copies smaller payloads faster, together with the header
_SIOCOUTQNSD: Final = 0x894B  # linux/sockios.h: how many written bytes have never been sent
_TLS_ALERT: Final = b"\x15\x03"
_INT_BYTES: Final = array("i").itemsize
# Plain integers: these are tested with every message, and enumerations are slow.
_SOL_SOCKET, _SCM_RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
_CLOSE_ON_EXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DESCRIPTORS_AT_ONCE * _INT_BYTES)


class Connection:
    """A socket and its two directions; `member` is set once the peer has proved its identity."""

    def __init__(
        self,
        end: End,
        handshake: Handshake,
        *,
        interpret: Callable[[FrameHeader, memoryview], Any],
        place: Callable[[Any, int], memoryview | None],
        queue_bytes: int,
        on_pending: Callable[[bool], None],
    ) -> None:
        self.end = end
        self.descriptor = end.fileno()
        self.handshake = handshake
        self.member: int | None = None
        self.connecting = self.in_peace = False
        self.farewell = ""  # why the peer said that it leaves
        self.origin = ""  # who is there as far as the network shows, until it has proved more
        self.outbox = Outbox(end, queue_bytes, on_pending)
        self.limits = BEFORE_HANDSHAKE
        self._decoder: FrameDecoder[Any] = FrameDecoder(BEFORE_HANDSHAKE, interpret, place)
        self.local = end.family == socket.AF_UNIX  # then descriptors can be passed
        self._secure = end if isinstance(end, SecureSocket) else None
        self.shaking = self._secure is not None  # the TLS handshake comes before anything is sent or received
        self._passed: deque[int] = deque()
        self._reported: tuple[Any, int] = (None, 0)
        self.arenas: Arenas | None = None

    def untransmitted_bytes(self) -> int:
        """Bytes that the kernel has accepted but would lose if this process ended now.

        TCP drops what it has not transmitted if the process ends with unread input, such as a heartbeat. A Unix socket
        puts all into the peer's queue at once.
        """
        answer = bytes(4) if self.local else fcntl.ioctl(self.descriptor, _SIOCOUTQNSD, bytes(4))
        return int(struct.unpack("i", answer)[0])

    def shake(self) -> int:
        """Continue the TLS handshake; 0 once it is done, else the socket event to wait for."""
        assert self._secure is not None, "only while `shaking`"
        wanted = self._secure.shake()
        self.shaking = wanted != 0
        return wanted

    def admit(self, member: int, limits: Limits) -> None:
        self.member, self._decoder.limits, self.limits = member, limits, limits

    def send_control(self, message: object, descriptor: int = -1) -> bool:
        kind, body = CONTROL.encode(message)
        frame = encode_header(kind, OF_TRANSPORT, len(body), 0) + body
        return self.outbox.offer([frame], len(frame), descriptor)

    def send(self, kind: int, body: bytes, parts: list[memoryview], *, later: bool = False) -> bool:
        """Queue a message, its payload in the arena if there is space; with `later`, `outbox.pump` sends it."""
        num_bytes = sum(map(len, parts))
        limits = self.limits
        if len(body) > limits.body_bytes or num_bytes > limits.payload_bytes:
            raise UserError(
                f"a message of {format_bytes(len(body))} with {format_bytes(num_bytes)} of payload exceeds the limits "
                f"of {format_bytes(limits.body_bytes)} and {format_bytes(limits.payload_bytes)}"
            )
        if num_bytes >= _ARENA_FROM_BYTES and self.arenas is not None:
            position = self.arenas.writer.put(parts, num_bytes)
            if position >= 0:
                head = encode_header(kind, IN_ARENA, len(body), num_bytes, position) + body
                if self.outbox.offer([head], len(head), later=later):
                    return True
                self.arenas.writer.take_back()
                return False
        head = encode_header(kind, 0, len(body), num_bytes) + body
        return self.outbox.offer([head, *parts], len(head) + num_bytes, later=later)

    def receive(self, take: Callable[[Connection, WholeFrame[Any]], None]) -> bool:
        """Read what has arrived, up to a fair share, and `take` each frame; False at the end of the stream.

        What TLS has decrypted is read completely: the kernel would not report it again. ProtocolError and
        TlsRefused if the peer breaks the protocol, OSError if the connection broke.
        """
        read, decoder, local = 0, self._decoder, self.local
        while read < _READ_PER_POLL_BYTES or (self._secure is not None and self._secure.pending()):
            room = decoder.room()
            try:
                num_bytes = self._receive_with_descriptors(room) if local else self.end.recv_into(room)
            except (BlockingIOError, InterruptedError):
                break
            if num_bytes == 0:
                return False
            decoder.advance(num_bytes)
            while (frame := decoder.next_frame()) is not None:
                take(self, frame)
            if num_bytes < len(room):
                break
            read += num_bytes
        return True

    def progress(self, num_bytes: int) -> tuple[Any, int] | None:
        """The message in hand and how much of its payload is here; None unless that is `num_bytes` more than before."""
        message, filled = self._decoder.partial
        if message is not self._reported[0]:
            self._reported = (message, 0)
        if message is None or filled - self._reported[1] < num_bytes:
            return None
        self._reported = (message, filled)
        return self._reported

    def take_segment(self) -> Segment:
        if not self._passed:
            raise ProtocolError("descriptor", "a shared segment was announced but not passed")
        descriptor = self._passed.popleft()
        try:
            if os.fstat(descriptor).st_size == 0:
                raise ValueError("it is empty, or not memory")
            return Segment.attach(descriptor)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise ProtocolError("descriptor", f"the descriptor cannot be mapped: {error}") from error

    @property
    def met_tls(self) -> bool:
        """Whether the last input, at an end without TLS, was a TLS alert: the peer expects TLS."""
        return self._secure is None and self._decoder.unfinished(len(_TLS_ALERT)) == _TLS_ALERT

    def why_ended(self) -> str:
        if self.farewell:
            return self.farewell
        if self.met_tls:
            return "it uses TLS; give this process --tls DIR too"
        if self._decoder.between_frames:
            return "the connection ended without a goodbye"
        return "the connection was cut in the middle of a message"

    def close(self) -> None:
        self.outbox.close()
        self.end.close()
        while self._passed:
            os.close(self._passed.popleft())
        if self.arenas is not None:
            self.arenas.close()
            self.arenas = None

    def _receive_with_descriptors(self, room: memoryview) -> int:
        assert isinstance(self.end, socket.socket), "descriptors travel over Unix sockets"
        num_bytes, ancillary, flags, _ = self.end.recvmsg_into([room], _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        for level, kind, data in ancillary:
            if level == _SOL_SOCKET and kind == _SCM_RIGHTS:
                numbers = array("i")
                numbers.frombytes(data[: len(data) - len(data) % _INT_BYTES])
                self._passed.extend(numbers)
        if flags & _TRUNCATED or len(self._passed) > _DESCRIPTORS_AT_ONCE:
            raise ProtocolError("descriptor", "more descriptors were passed than announced")
        return num_bytes
