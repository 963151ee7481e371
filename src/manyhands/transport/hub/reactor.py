"""What a hub does when the kernel reports something: accept, dial, authenticate, receive, and give up silent peers.

Whatever a peer does ends only its own connection. Peers that have not proved the run's token have a small capacity (see
`admission`), learn nothing, and nothing they send reaches the application as it is.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from manyhands.errors import OutOfSharedMemory, printable
from manyhands.transport.frames import IN_ARENA, OF_TRANSPORT, FrameHeader, WholeFrame
from manyhands.transport.hub.admission import Dialer, HubListener, dial, origin, tune
from manyhands.transport.hub.arenas import Arenas
from manyhands.transport.hub.connection import Connection
from manyhands.transport.hub.handshake import (
    CONTROL,
    NO_PROOF,
    Credentials,
    Goodbye,
    Handshake,
    HandshakeHello,
    HandshakeRefused,
    Heartbeat,
    Proof,
    Refusal,
    ShareSegment,
)
from manyhands.transport.hub.hub_events import (
    Arrived,
    Arriving,
    Drained,
    HubEvent,
    Joined,
    Lost,
    Ready,
    Settings,
    Shared,
)
from manyhands.transport.liveness import LivenessMonitor
from manyhands.transport.messages import MessageCoder, ProtocolError
from manyhands.transport.tls import TlsRefused

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_DEFECT: Final = "a defect of this library, in an unauthenticated connection"
_CROWDED: Final = "it was not authenticated before too many others connected"
_PATIENCE: Final = 4  # times `silence_s`: heartbeats prove that a process is alive that is too busy to read

Destination = Callable[[int, Any, int], memoryview | None]
"""(member, message, payload bytes) -> the destination of the payload, or None for new memory.

Called while a message arrives, before the events that precede it are returned. A view must have exactly that many
bytes and stay untouched until the message is received. Raise ProtocolError to end the connection.
"""


class Reactor:
    """The connections of one hub; `events` are what happened, in order with each member."""

    def __init__(
        self,
        credentials: Credentials,
        codec: MessageCoder,
        destination: Destination | None,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.epoll = select.epoll()
        self.dialer = Dialer(settings.connect_s, random.Random())
        self.listeners: HubListener[Connection] = HubListener(self.epoll, settings.security)
        self.connections: dict[int, Connection] = {}  # by descriptor
        self.members: dict[int, Connection] = {}
        self.held_back: set[Connection] = set()
        self.events: list[HubEvent] = []
        self._credentials = credentials
        self._codec = codec
        self._destination = destination
        self._liveness: LivenessMonitor[int] = LivenessMonitor(settings.liveness, clock())
        self._registered: set[int] = set()
        self._heartbeat_thread: threading.Thread | None = None
        self._stop_heartbeats = threading.Event()

    def watch(self, descriptor: int, *, watched: bool = True) -> None:
        if watched:
            self.epoll.register(descriptor, _IN)
            self._registered.add(descriptor)
        else:
            self._registered.remove(descriptor)
            self.epoll.unregister(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for ready descriptors, and handle all of them."""
        poll, ready = self.epoll.poll, []
        if self.settings.spin_s and timeout_s > 0:
            until_s = time.perf_counter() + self.settings.spin_s
            while not (ready := poll(0)) and time.perf_counter() < until_s:
                pass
        if not ready:
            until_look_s = max(min(self._liveness.next_look_s, self.dialer.next_s) - self.clock(), 0.0)
            ready = poll(min(timeout_s, until_look_s) if timeout_s > 0 else 0)
        now_s = self.clock()
        accepting: list[int] = []
        for descriptor, mask in ready:
            connection = self.connections.get(descriptor)
            if connection is not None:
                self._serve(connection, mask, now_s)
            elif descriptor in self._registered:
                self.events.append(Ready(descriptor))
            elif descriptor in self.listeners:  # last: a new one may reuse the descriptor of one that ended
                accepting.append(descriptor)
        for descriptor in accepting:
            for end in self.listeners.accept(descriptor, now_s):
                connection = self._new(end, expected=None)
                connection.origin = origin(end)
                self._drop(self.listeners.pending.arrived(connection, now_s), _CROWDED)
                self._serve(connection, _IN, now_s)  # usually a member's hello has already arrived
        if now_s >= self._liveness.next_look_s:
            for descriptor, reason in self._liveness.look(now_s):
                self._drop(self.connections[descriptor], reason)
            self._drop(self.listeners.wake(), _CROWDED)
        if now_s >= self.dialer.next_s:
            self.dial()
        if self.listeners.rejections.unreported:
            rejected = self.listeners.rejections.due(now_s)
            if rejected is not None:
                self.events.append(rejected)

    def dial(self) -> None:
        for member, address in self.dialer.due(self.clock()):
            try:
                end = dial(address, self.settings.security)
            except OSError as error:
                self._failed(member, f"no process can be reached at {address}: {error}")
                continue
            connection = self._new(end, expected=member)
            connection.connecting = True  # it sends its hello once the kernel reports the connection
            self.epoll.modify(end, _IN | _OUT)

    def _failed(self, member: int, reason: str, *, final: bool = False) -> None:
        if final:
            self.dialer.end(member)
        sentence = self.dialer.failed(member, reason, self.clock())
        if sentence is not None:
            self.events.append(Lost(member, sentence, final=final))

    def _serve(self, connection: Connection, mask: int, now_s: float) -> None:
        if connection.connecting:
            connection.connecting = False
            failed = connection.end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                self._drop(connection, os.strerror(failed))
                return
            self.epoll.modify(connection.end, _IN)
            if not connection.shaking:
                connection.send_control(connection.handshake.hello())
        elif not connection.shaking and mask & _OUT:
            connection.outbox.pump()
            if (
                self.settings.unsent_bytes
                and connection.member is not None
                and not connection.outbox.pending_bytes
            ):
                self.events.append(Drained(connection.member))
        if not mask & ~_OUT and not connection.shaking:
            return
        if connection.member is not None:
            self._liveness.heard(connection.descriptor, now_s)
        handshake = connection.handshake
        try:
            if connection.shaking:  # the token is proved after the TLS handshake
                wanted = connection.shake()
                self.epoll.modify(connection.end, wanted or _IN)
                if wanted:
                    return
                if handshake.outgoing:
                    connection.send_control(handshake.hello())
            if not connection.receive(self._take):
                self._drop(connection, connection.why_ended(), final=connection.met_tls)
            elif self.settings.progress_bytes and connection.member is not None:
                progress = connection.progress(self.settings.progress_bytes)
                if progress is not None:
                    self.events.append(Arriving(connection.member, *progress))
        except ProtocolError as error:
            trusted = handshake.trusted
            connection.send_control(Refusal(field=error.field, reason=str(error)) if trusted else NO_PROOF)
            self._drop(connection, str(error), final=trusted or error.field == "token")
        except TlsRefused as refused:
            self._drop(connection, str(refused), final=True)
        except HandshakeRefused as refused:
            self._drop(connection, str(refused) if handshake.outgoing else "it refused", final=True)
        except OSError as error:
            self._drop(connection, connection.farewell or f"the connection broke: {error}")
        except Exception as error:
            if handshake.trusted:
                raise
            # An unauthenticated peer must never end a run, not even through a bug of ours, which is reported here.
            self._drop(connection, f"{_DEFECT}: {error!r}")

    def _new(self, end: socket.socket, expected: int | None) -> Connection:
        tune(end, _PATIENCE * self.settings.liveness.silence_s, self.settings.unsent_bytes)
        epoll, descriptor = self.epoll, end.fileno()
        connection = Connection(
            self.settings.security.begin(end, server_side=expected is None),
            Handshake(self._credentials, expected),
            interpret=self._interpret,
            place=lambda message, num_bytes: self._place(connection, message, num_bytes),
            queue_bytes=self.settings.queue_bytes,
            on_pending=lambda pending: epoll.modify(descriptor, _IN | _OUT if pending else _IN),
        )
        self.connections[descriptor] = connection
        self._liveness.arrived(descriptor, self.clock(), waits=expected is not None)
        epoll.register(end, _IN)
        return connection

    def _drop(self, connection: Connection | None, reason: str, *, final: bool = False) -> None:
        """End a connection, if there is one, and report it; an outgoing one is dialled again unless `final`."""
        if connection is None:
            return
        claimed, member = connection.handshake.claimed, connection.member
        reason = printable(reason)
        self.forget(connection)
        if member is not None:
            self.events.append(Lost(member, reason, connection.in_peace))
        elif connection.handshake.outgoing and claimed is not None:
            self._failed(claimed, reason, final=final)
        else:
            self.listeners.rejections.add(f"{connection.origin}{reason}", claimed)

    def forget(self, connection: Connection) -> None:
        """End a connection, without an event."""
        self._liveness.left(connection.descriptor)
        self.listeners.pending.left(connection)
        self.held_back.discard(connection)
        del self.connections[connection.descriptor]
        if connection.member is not None:
            del self.members[connection.member]
        connection.outbox.close()  # first: the heartbeat thread must not use it any more
        with suppress(OSError):  # already closed: the peer left before TLS could begin
            self.epoll.unregister(connection.descriptor)
        connection.close()

    def _interpret(self, header: FrameHeader, body: memoryview) -> Any:
        if not header.flags & OF_TRANSPORT:
            return self._codec.decode(header.kind, body)
        if header.payload_bytes:
            raise ProtocolError("payload_bytes", "a transport message must not have a payload")
        return CONTROL.decode(header.kind, body)

    def _place(self, connection: Connection, message: Any, num_bytes: int) -> memoryview | None:
        if self._destination is None or connection.member is None:
            return None
        return self._destination(connection.member, message, num_bytes)

    def _take(self, connection: Connection, frame: WholeFrame[Any]) -> None:
        header, message, payload = frame
        member = connection.member
        if header.flags & OF_TRANSPORT:
            if member is None:
                self._shake_hands(connection, message)
            else:
                self._control(connection, member, message)
            return
        if member is None:
            raise ProtocolError("handshake", f"{type(message).__name__} arrived before the handshake")
        if not header.flags & IN_ARENA:
            self.events.append(Arrived(member, message, payload))
            return
        if connection.arenas is None:
            raise ProtocolError("flags", "the payload is in shared memory, but no memory is shared")
        reader = connection.arenas.reader
        payload = reader.take(header.position, header.payload_bytes)
        wanted = self._place(connection, message, len(payload))
        if wanted is None:
            self.events.append(Arrived(member, message, payload, reader, header.position))
            return
        if wanted.nbytes != len(payload):
            raise ProtocolError("payload_bytes", f"{len(payload)} bytes arrived, {wanted.nbytes} expected")
        wanted.cast("B")[:] = payload
        reader.release(header.position)
        self.events.append(Arrived(member, message, wanted))

    def _control(self, connection: Connection, member: int, message: Any) -> None:
        match message:
            case Heartbeat():
                pass  # any input is a sign of life
            case ShareSegment():
                self.events.append(Shared(member, connection.take_segment(), message.tag))
            case Goodbye():
                connection.in_peace = True
                connection.farewell = "it closed its connection"
            case Refusal():
                connection.farewell = f"it ended the connection: {message.reason}"
            case _:
                raise ProtocolError("handshake", f"{type(message).__name__} arrived out of order")

    def _shake_hands(self, connection: Connection, message: Any) -> None:
        handshake = connection.handshake
        reply = handshake.handle(message)
        if isinstance(message, HandshakeHello):
            self._drop(self.listeners.pending.arrived(connection, self.clock(), sealed=True), _CROWDED)
        if isinstance(message, Proof) and message.arena:
            connection.arenas = Arenas(connection.take_segment(), end=1)
        segment = None
        if isinstance(reply, Proof) and connection.local and self.settings.arena_bytes:
            with suppress(OutOfSharedMemory):  # payloads then travel in the stream
                segment = Arenas.create(self.settings.arena_bytes)
        if isinstance(reply, Proof) and segment is not None:
            connection.send_control(reply._replace(arena=True), segment.descriptor)
            connection.arenas = Arenas(segment, end=0)
        elif reply is not None:
            connection.send_control(reply)
        peer = handshake.peer
        if peer is None:
            return
        self.listeners.pending.left(connection)
        self.dialer.answered(peer.member, self.clock())
        self._drop(self.members.get(peer.member), "it connected again")
        connection.admit(peer.member, self.settings.limits)
        self.members[peer.member] = connection
        self._liveness.heard(connection.descriptor, self.clock())
        self.events.append(Joined(peer.member, peer.role))
        if self._heartbeat_thread is None:
            self._heartbeat_thread = threading.Thread(
                target=self._send_heartbeats, name="manyhands hub heartbeat", daemon=True
            )
            self._heartbeat_thread.start()

    def _send_heartbeats(self) -> None:
        """The thread: keep idle connections alive and drain their queues while the application computes."""
        seen: dict[Connection, int] = {}
        while not self._stop_heartbeats.wait(self.settings.liveness.heartbeat_s / 2):
            writes: dict[Connection, int] = {}
            for connection in tuple(self.members.values()):
                if connection.outbox.pending_bytes:
                    connection.outbox.pump()
                elif seen.get(connection) == connection.outbox.writes:
                    connection.send_control(Heartbeat())
                writes[connection] = connection.outbox.writes
            seen = writes

    def close(self) -> None:
        self._stop_heartbeats.set()
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.join()
        for member in self.members.values():
            member.send_control(Goodbye())
        for connection in tuple(self.connections.values()):
            self.forget(connection)
        for event in self.events:
            if isinstance(event, Shared):
                event.segment.close()
        self.events.clear()
        self.listeners.close()
        self.epoll.close()
