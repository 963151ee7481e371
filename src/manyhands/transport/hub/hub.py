"""One process's end of all its connections to other processes: messages, payloads and membership.

    with Hub(Credentials(member=1, role="server", token=token, fingerprint=fingerprint), codec) as hub:
        address = hub.listen("unix")             # or "tcp"; tell others, who call hub.connect(1, address)
        for event in hub.poll(timeout_s=1.0):    # Joined, Arrived, Shared, Ready, Rejected, Lost
            ...
        hub.send(2, Read(...), payload=[gradient])

One thread uses a hub. Nothing it calls waits, except `poll` and `flush`, which have deadlines. A thread of the hub
sends heartbeats while the application computes. Whatever a peer does (garbage, a cut frame, a wrong token, missed
heartbeats) ends only that connection, with the reason in an event. Peers that have not proved the run's token have
a small capacity (see `pending_connections`), are told nothing, and nothing they send reaches the application as it
is.

Of two processes one connects to the other, never both; their roles decide which. It dials until it gets through
(see `dialing`). If a member connects anew, the older connection is lost.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from manyhands.errors import OutOfSharedMemory, UserError, printable
from manyhands.native.closeable import Closeable
from manyhands.native.segment import Segment
from manyhands.transport.hub import addresses
from manyhands.transport.hub.admission import Calls, Entrance
from manyhands.transport.hub.areas import Arenas
from manyhands.transport.hub.connection import Connection
from manyhands.transport.hub.frames import IN_ARENA, OF_TRANSPORT, FrameHeader, WholeFrame
from manyhands.transport.hub.handshake import (
    CONTROL,
    NO_PROOF,
    Credentials,
    Goodbye,
    Handshake,
    HandshakeRefused,
    Heartbeat,
    Knock,
    Proof,
    Refusal,
    ShareSegment,
)
from manyhands.transport.hub.hub_events import (
    Arrived,
    HubEvent,
    Joined,
    Lost,
    Ready,
    Settings,
    Shared,
)
from manyhands.transport.liveness import LivenessMonitor, forget_in_children
from manyhands.transport.messages import MessageCoder, ProtocolError
from manyhands.transport.tls import TlsRefused

__all__ = ["Hub"]

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_DEFECT: Final = "a defect of this library, met in a connection that had proved nothing"
_PATIENCE: Final = 4  # times `silence_s`: heartbeats prove that a process is alive that is too busy to read

Destination = Callable[[int, Any, int], memoryview | None]
"""(member, message, payload bytes) -> the destination of the payload, or None for new memory.

Called while a message arrives, before the events that precede it are returned. A view must have exactly that many
bytes and stay untouched until the message is received. Raise ProtocolError to end the connection.
"""


class Hub(Closeable):
    """All connections of one process; a context manager, `close` is idempotent."""

    def __init__(
        self,
        credentials: Credentials,
        codec: MessageCoder,
        *,
        destination: Destination | None = None,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without connections; only `clock` decides when a peer has missed its heartbeats."""
        self.credentials = credentials
        self.settings = settings or Settings()
        self._codec = codec
        self._destination = destination
        self._clock = clock
        self._liveness: LivenessMonitor[int] = LivenessMonitor(self.settings.silence, clock())
        self._epoll = select.epoll()
        self._calls = Calls(self.settings.connect_s, random.Random())
        self._entrance: Entrance[Connection] = Entrance(self._epoll, self.settings.security)
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._members: dict[int, Connection] = {}
        self._registered: set[int] = set()
        self._holding = False
        self._held_back: set[Connection] = set()
        self._events: list[HubEvent] = []
        self._heartbeat_thread: threading.Thread | None = None
        self._stop_heartbeats = threading.Event()
        self._closed = False
        forget_in_children(self)

    # ── who is there ──────────────────────────────────────────────────────────────────────────────────────────────

    def listen(self, address: str = "unix") -> str:
        """Accept connections; return the address for the peers. UserError off loopback, unless `security` allows
        it.
        """
        return self._entrance.listen(address)

    def connect(self, member: int, address: str) -> None:
        """Connect to `member`, dialling as often as needed; Joined or Lost reports the outcome.

        Lost means that the member refused this end by name, or could not be reached for `connect_s`.
        """
        addresses.check(address, self.settings.security)
        if member in self._members or member in self._calls:
            raise UserError(f"member {member} is connected, or about to be")
        self._calls.begin(member, address, self._clock())
        self._dial()

    def hang_up(self, member: int) -> None:
        """Stop dialling `member`; an established connection stays, and no event follows."""
        self._calls.end(member)
        for connection in [c for c in self._connections.values() if c.is_call_to(member)]:
            self._forget(connection)

    def members(self) -> tuple[int, ...]:
        return tuple(self._members)

    @property
    def rejected(self) -> int:
        """How many connections were rejected so far, whether or not an event has reported them."""
        return self._entrance.rejections.total

    def disconnect(self, member: int, reason: str) -> None:
        """End the connection to a member and tell it the reason; no event follows."""
        connection = self._members.get(member)
        if connection is not None:
            connection.send_control(Refusal(field="member", reason=reason))
            self._forget(connection)

    def register(self, descriptor: int) -> None:
        """Let `poll` also wake up for a descriptor of the caller, as Ready."""
        self._epoll.register(descriptor, _IN)
        self._registered.add(descriptor)

    def unregister(self, descriptor: int) -> None:
        """Unregister a descriptor; call it before the descriptor is closed."""
        self._registered.remove(descriptor)
        self._epoll.unregister(descriptor)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, member: int, message: object, payload: Sequence[Any] = ()) -> bool:
        """Queue a message, or what the codec has made of it, with a payload of contiguous buffers; False if not taken.

        It is False if the member is not connected (see `members`) or its queue is full. Messages to one member
        arrive in order. A payload is not copied if that can be avoided: it must stay unchanged until `sent` or
        `flush` says so.
        """
        connection = self._members.get(member)
        if connection is None:
            return False
        kind, body = message if type(message) is tuple else self._codec.encode(message)
        views = [
            view.cast("B") for part in payload if (view := memoryview(part)).nbytes
        ]  # an empty view cannot be cast
        if not self._holding:
            return connection.send(kind, body, views)
        self._held_back.add(connection)
        return connection.send(kind, body, views, later=True)

    def hold_back(self) -> None:
        """Hold messages back until `send_off`, `poll` or `flush`: waking a peer costs more than sending.

        For messages that directly follow each other, such as a push and the read behind it.
        """
        self._holding = True

    def send_off(self) -> None:
        """Send what was held back: all messages for one member together."""
        self._holding = False
        for connection in self._held_back:
            connection.outbox.pump()
        self._held_back.clear()

    def share(self, member: int, segment: Segment, tag: int = 0) -> bool:
        """Let a member map `segment`, in order with messages; False if it was not taken. Unix connections only."""
        connection = self._members.get(member)
        if connection is None:
            return False
        if not connection.local:
            raise UserError(f"member {member} is connected by TCP, which cannot pass memory")
        return connection.send_control(ShareSegment(tag=tag), segment.descriptor)

    def sent(self, member: int) -> bool:
        """Whether everything for a member, except what is held back, was sent, so payloads may change; True if it
        left.
        """
        connection = self._members.get(member)
        return connection is None or connection.outbox.pending_bytes == 0

    def arrives(self, member: int) -> bool:
        """Whether what was sent to a member arrives even if this process is killed now; True if the member left."""
        connection = self._members.get(member)
        return connection is None or connection.outbox.pending_bytes + connection.untransmitted_bytes() == 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything for all members was sent; False at the deadline.

        What arrives meanwhile is kept for the next `poll`, so two hubs may flush to each other.
        """
        self.send_off()
        deadline_s = time.monotonic() + timeout_s
        while not all(map(self.sent, self._members)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._poll(left_s)
        return True

    def poll(self, timeout_s: float) -> list[HubEvent]:
        """Return what happened, in order per member; waits at most `timeout_s` for the first event."""
        if self._holding:
            self.send_off()
        deadline_s = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        left_s = 0.0 if self._events else timeout_s
        while True:
            self._poll(left_s)
            if self._events or left_s <= 0:
                break
            left_s = max(deadline_s - time.monotonic(), 0.0)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Say goodbye to every member and close; what is still queued is dropped (see `flush`)."""
        if self._closed:
            return
        self._closed = True
        self._stop_heartbeats.set()
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.join()
        for connection in self._members.values():
            connection.send_control(Goodbye())
        for connection in tuple(self._connections.values()):
            self._forget(connection)
        for event in self._events:
            if isinstance(event, Shared):
                event.segment.close()
        self._events.clear()
        self._entrance.close()
        self._epoll.close()

    # ── one look at everything ────────────────────────────────────────────────────────────────────────────────────

    def _poll(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for ready descriptors, and handle all of them."""
        poll, ready = self._epoll.poll, []
        if self.settings.spin_s and timeout_s > 0:
            until_s = time.perf_counter() + self.settings.spin_s
            while not (ready := poll(0)) and time.perf_counter() < until_s:
                pass
        if not ready:
            until_look_s = max(min(self._liveness.next_look_s, self._calls.next_s) - self._clock(), 0.0)
            ready = poll(min(timeout_s, until_look_s) if timeout_s > 0 else 0)
        now_s = self._clock()
        knocked_at: list[int] = []
        for descriptor, mask in ready:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._serve(connection, mask, now_s)
            elif descriptor in self._entrance:
                knocked_at.append(
                    descriptor
                )  # last: a new connection may reuse the descriptor of one that ended
            elif descriptor in self._registered:
                self._events.append(Ready(descriptor))
        for descriptor in knocked_at:
            for end in self._entrance.accept(descriptor, now_s):
                connection = self._new(end, expected=None)
                connection.origin = addresses.origin(end)
                self._show_out(self._entrance.newcomers.arrived(connection, now_s))
                self._serve(connection, _IN, now_s)  # usually a member's knock has already arrived
        if now_s >= self._liveness.next_look_s:
            for descriptor, reason in self._liveness.look(now_s):
                self._drop(self._connections[descriptor], reason)
            self._show_out(self._entrance.wake())
        if now_s >= self._calls.next_s:
            self._dial()
        rejections = self._entrance.rejections
        if rejections.total != rejections.reported and (away := rejections.due(now_s)) is not None:
            self._events.append(away)

    def _dial(self) -> None:
        now_s = self._clock()
        for member, address in self._calls.due(now_s):
            try:
                end = addresses.dial(address, self.settings.security)
            except OSError as error:
                self._failed(member, f"nobody can be reached at {address}: {error}")
                continue
            connection = self._new(end, expected=member)
            connection.connecting = True  # it sends its knock once the kernel reports the connection
            self._epoll.modify(end, _IN | _OUT)

    def _failed(self, member: int, reason: str) -> None:
        sentence = self._calls.failed(member, reason, self._clock())
        if sentence is not None:
            self._events.append(Lost(member, sentence))

    def _serve(self, connection: Connection, mask: int, now_s: float) -> None:
        if connection.connecting:
            connection.connecting = False
            failed = connection.end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                self._drop(connection, os.strerror(failed))
                return
            self._epoll.modify(connection.end, _IN)
            if not connection.shaking:
                connection.send_control(connection.handshake.knock())
        elif not connection.shaking and mask & _OUT:
            connection.outbox.pump()
        if not mask & ~_OUT and not connection.shaking:
            return
        if connection.member is not None:
            self._liveness.heard(connection.descriptor, now_s)
        try:
            if connection.shaking:  # the token is proved after the TLS handshake
                wanted = connection.shake()
                self._epoll.modify(connection.end, wanted or _IN)
                if wanted:
                    return
                if connection.handshake.outgoing:
                    connection.send_control(connection.handshake.knock())
            if not connection.receive(self._take):
                self._drop(connection, connection.why_ended(), final=connection.met_tls)
        except ProtocolError as error:
            trusted = connection.handshake.trusted
            connection.send_control(Refusal(field=error.field, reason=str(error)) if trusted else NO_PROOF)
            self._drop(connection, str(error), final=trusted or error.field == "token")
        except TlsRefused as refused:
            self._drop(connection, str(refused), final=True)
        except HandshakeRefused as refused:
            self._drop(
                connection, str(refused) if connection.handshake.outgoing else "it refused", final=True
            )
        except OSError as error:
            self._drop(connection, connection.farewell or f"the connection broke: {error}")
        except Exception as error:
            if connection.handshake.trusted:
                raise
            # An unauthenticated peer must never end a run, not even through a bug of ours, which is reported here.
            self._drop(connection, f"{_DEFECT}: {error!r}")

    def _show_out(self, connection: Connection | None) -> None:
        if connection is not None:
            self._drop(connection, "it had not proved who it is when too many others came")

    def _new(self, end: socket.socket, expected: int | None) -> Connection:
        addresses.tune(end, _PATIENCE * self.settings.silence.silence_s)
        epoll, descriptor = self._epoll, end.fileno()
        connection = Connection(
            self.settings.security.begin(end, server_side=expected is None),
            Handshake(self.credentials, expected),
            interpret=self._interpret,
            place=lambda message, num_bytes: self._place(connection, message, num_bytes),
            queue_bytes=self.settings.queue_bytes,
            on_pending=lambda pending: epoll.modify(descriptor, _IN | _OUT if pending else _IN),
        )
        self._connections[descriptor] = connection
        self._liveness.arrived(descriptor, self._clock(), waits=expected is not None)
        epoll.register(end, _IN)
        return connection

    def _drop(self, connection: Connection, reason: str, *, final: bool = False) -> None:
        """End a connection and report it; an outgoing one is dialled again unless this is `final`."""
        claimed, member = connection.handshake.claimed, connection.member
        reason = printable(reason)
        self._forget(connection)
        if member is not None:
            self._events.append(Lost(member, reason, connection.in_peace))
        elif connection.handshake.outgoing and claimed is not None:
            if final:
                self._calls.end(claimed)
            self._failed(claimed, reason)
        else:
            self._entrance.rejections.add(f"{connection.origin}{reason}", claimed)

    def _forget(self, connection: Connection) -> None:
        self._liveness.left(connection.descriptor)
        self._entrance.newcomers.left(connection)
        self._held_back.discard(connection)
        del self._connections[connection.descriptor]
        if connection.member is not None:
            del self._members[connection.member]
        connection.outbox.close()  # first: the heartbeat thread must not use it any more
        try:
            self._epoll.unregister(connection.descriptor)
        except OSError:
            pass  # already closed: the peer left before TLS could begin
        connection.close()

    # ── what arrives ──────────────────────────────────────────────────────────────────────────────────────────────

    def _interpret(self, header: FrameHeader, body: memoryview) -> Any:
        if not header.flags & OF_TRANSPORT:
            return self._codec.decode(header.kind, body)
        if header.payload_bytes:
            raise ProtocolError("payload_bytes", "a message of the transport has no payload")
        return CONTROL.decode(header.kind, body)

    def _place(self, connection: Connection, message: Any, num_bytes: int) -> memoryview | None:
        if self._destination is None or connection.member is None:
            return None
        return self._destination(connection.member, message, num_bytes)

    def _take(self, connection: Connection, frame: WholeFrame[Any]) -> None:
        header, message, payload = frame
        if header.flags & OF_TRANSPORT:
            self._control(connection, message)
            return
        member = connection.member
        if member is None:
            raise ProtocolError("handshake", f"{type(message).__name__} before the handshake")
        if not header.flags & IN_ARENA:
            self._events.append(Arrived(member, message, payload))
            return
        payload, reader = connection.payload_in_arena(header)
        wanted = self._place(connection, message, len(payload))
        if wanted is None:
            self._events.append(Arrived(member, message, payload, reader, header.position))
            return
        if wanted.nbytes != len(payload):
            raise ProtocolError("payload_bytes", f"{len(payload)} bytes where {wanted.nbytes} are expected")
        wanted.cast("B")[:] = payload
        reader.release(header.position)
        self._events.append(Arrived(member, message, wanted))

    def _control(self, connection: Connection, message: Any) -> None:
        if connection.member is None:
            self._shake_hands(connection, message)
            return
        match message:
            case Heartbeat():
                pass  # any input is a sign of life
            case ShareSegment():
                segment = connection.take_segment()
                self._events.append(Shared(connection.member, segment, message.tag))
            case Goodbye():
                connection.in_peace = True
                connection.farewell = "it closed its connection"
            case Refusal():
                connection.farewell = f"it ended the connection: {message.reason}"
            case _:
                raise ProtocolError("handshake", f"{type(message).__name__} comes out of turn")

    def _shake_hands(self, connection: Connection, message: Any) -> None:
        handshake = connection.handshake
        reply = handshake.handle(message)
        if isinstance(message, Knock):
            self._show_out(self._entrance.newcomers.knocked(connection, self._clock()))
        if isinstance(message, Proof) and message.arena:
            connection.use_arenas(connection.take_segment(), end=1)
        segment = None
        if isinstance(reply, Proof) and connection.local and self.settings.arena_bytes:
            try:
                segment = Arenas.create(self.settings.arena_bytes)
            except OutOfSharedMemory:
                pass  # payloads then travel in the stream
        if isinstance(reply, Proof) and segment is not None:
            connection.send_control(replace(reply, arena=True), segment.descriptor)
            connection.use_arenas(segment, end=0)
        elif reply is not None:
            connection.send_control(reply)
        peer = handshake.peer
        if peer is None:
            return
        self._entrance.newcomers.left(connection)
        self._calls.answered(peer.member, self._clock())
        if peer.member in self._members:
            self._drop(self._members[peer.member], "it connected anew")
        connection.admit(peer.member, self.settings.limits)
        self._members[peer.member] = connection
        self._liveness.heard(connection.descriptor, self._clock())
        self._events.append(Joined(peer.member, peer.role))
        if self._heartbeat_thread is None:
            self._heartbeat_thread = threading.Thread(
                target=self._send_heartbeats, name="manyhands hub heartbeat", daemon=True
            )
            self._heartbeat_thread.start()

    def let_go_in_child(self) -> None:
        if not self._closed:
            self._closed = True
            for connection in self._connections.values():
                connection.end.close()
            self._entrance.close()
            self._epoll.close()

    def _send_heartbeats(self) -> None:
        """The thread: keep idle connections alive and drain their queues while the application computes."""
        seen: dict[Connection, int] = {}
        while not self._stop_heartbeats.wait(self.settings.silence.heartbeat_s / 2):
            writes: dict[Connection, int] = {}
            for connection in tuple(self._members.values()):
                if connection.outbox.pending_bytes:
                    connection.outbox.pump()
                elif seen.get(connection) == connection.outbox.writes:
                    connection.send_control(Heartbeat())
                writes[connection] = connection.outbox.writes
            seen = writes
