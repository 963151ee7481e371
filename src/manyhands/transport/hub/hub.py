"""One process's end of all its connections to other processes: messages, payloads and membership.

    with Hub(Credentials(member=1, role="server", token=token, fingerprint=fingerprint), codec) as hub:
        address = hub.listen("unix")             # or "tcp"; tell others, who call hub.connect(1, address)
        for event in hub.poll(timeout_s=1.0):    # Joined, Arrived, Shared, Ready, Rejected, Lost
            ...
        hub.send(2, Read(...), payload=[gradient])

One thread uses a hub. Nothing it calls waits, except `poll` and `flush`, which have deadlines. A thread of the hub
sends heartbeats while the application computes. Whatever a peer does (garbage, a cut frame, a wrong token, missed
heartbeats) ends only that connection, with the reason in an event (see `reactor`).

Of two processes one connects to the other, as their roles decide. If a member connects anew, the older connection is
lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.errors import UserError
from manyhands.native.closeable import Closeable
from manyhands.native.segment import Segment
from manyhands.transport.hub.admission import check_address
from manyhands.transport.hub.handshake import Credentials, Refusal, ShareSegment
from manyhands.transport.hub.hub_events import HubEvent, Settings
from manyhands.transport.hub.reactor import Destination, Reactor
from manyhands.transport.liveness import forget_in_children
from manyhands.transport.messages import MessageCoder


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
        self._codec = codec
        self._reactor = Reactor(credentials, codec, destination, settings or Settings(), clock)
        self._members = self._reactor.members
        self._holding = False
        self._closed = False
        forget_in_children(self)

    def listen(self, address: str = "unix") -> str:
        """Accept connections; return the address for the peers. UserError off loopback, unless `security` allows it."""
        return self._reactor.listeners.listen(address)

    def connect(self, member: int, address: str) -> None:
        """Dial `member` until Joined, or Lost: it refused this end by name, or could not be reached for `connect_s`."""
        reactor = self._reactor
        check_address(address, reactor.settings.security)
        if member in self._members or member in reactor.dialer:
            raise UserError(f"member {member} is already connected or connecting")
        reactor.dialer.begin(member, address, reactor.clock())
        reactor.dial()

    def hang_up(self, member: int) -> None:
        """Stop dialling `member`; an established connection stays, and no event follows."""
        self._reactor.dialer.end(member)
        for connection in tuple(self._reactor.connections.values()):
            handshake = connection.handshake
            if connection.member is None and handshake.outgoing and handshake.claimed == member:
                self._reactor.forget(connection)

    def members(self) -> tuple[int, ...]:
        return tuple(self._members)

    @property
    def rejected(self) -> int:
        return self._reactor.listeners.rejections.total

    def disconnect(self, member: int, reason: str) -> None:
        """End the connection to a member and tell it the reason; no event follows."""
        connection = self._members.get(member)
        if connection is not None:
            connection.send_control(Refusal(field="member", reason=reason))
            self._reactor.forget(connection)

    def register(self, descriptor: int) -> None:
        """Let `poll` also wake up for a descriptor of the caller, as Ready."""
        self._reactor.watch(descriptor)

    def unregister(self, descriptor: int) -> None:
        """Unregister a descriptor; call it before the descriptor is closed."""
        self._reactor.watch(descriptor, watched=False)

    def send(self, member: int, message: object, payload: Sequence[Any] = ()) -> bool:
        """Queue a message, or what the codec has made of it, with a payload of contiguous buffers.

        False if the member is not connected or its queue is full. Messages to one member arrive in order. A payload is
        not copied if that can be avoided: it must stay unchanged until `sent` or `flush` says so.
        """
        connection = self._members.get(member)
        if connection is None:
            return False
        kind, body = message if type(message) is tuple else self._codec.encode(message)
        # An empty view cannot be cast.
        views = [view.cast("B") for part in payload if (view := memoryview(part)).nbytes]
        if not self._holding:
            return connection.send(kind, body, views)
        self._reactor.held_back.add(connection)
        return connection.send(kind, body, views, later=True)

    def hold_back(self) -> None:
        """Hold messages that follow each other back until `send_off`, `poll` or `flush`: waking a peer is dear."""
        self._holding = True

    def send_off(self) -> None:
        """Send what was held back: all messages for one member together."""
        self._holding = False
        for connection in self._reactor.held_back:
            connection.outbox.pump()
        self._reactor.held_back.clear()

    def share(self, member: int, segment: Segment, tag: int = 0) -> bool:
        """Let a member map `segment`, in order with messages; False if it was not taken. Unix connections only."""
        connection = self._members.get(member)
        if connection is None:
            return False
        if not connection.local:
            raise UserError(f"member {member} is connected by TCP, which cannot share memory")
        return connection.send_control(ShareSegment(tag=tag), segment.descriptor)

    def sent(self, member: int) -> bool:
        """Whether everything for a member was sent, but for what is held back, or it left: payloads may change."""
        connection = self._members.get(member)
        return connection is None or connection.outbox.pending_bytes == 0

    def arrives(self, member: int) -> bool:
        """Whether what was sent to a member arrives even if this process is killed now; True if the member left."""
        connection = self._members.get(member)
        return connection is None or connection.outbox.pending_bytes + connection.untransmitted_bytes() == 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything was sent; False at the deadline. What arrives meanwhile is kept for the next `poll`."""
        self.send_off()
        deadline_s = time.monotonic() + timeout_s
        while not all(map(self.sent, self._members)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._reactor.wait(left_s)
        return True

    def poll(self, timeout_s: float) -> list[HubEvent]:
        """Return what happened, in order per member; waits at most `timeout_s` for the first event."""
        if self._holding:
            self.send_off()
        reactor = self._reactor
        deadline_s = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        left_s = 0.0 if reactor.events else timeout_s
        while True:
            reactor.wait(left_s)
            if reactor.events or left_s <= 0:
                break
            left_s = max(deadline_s - time.monotonic(), 0.0)
        events, reactor.events = reactor.events, []
        return events

    def close(self) -> None:
        """Say goodbye to every member and close; what is still queued is dropped (see `flush`)."""
        if self._closed:
            return
        self._closed = True
        self._reactor.close()

    def let_go_in_child(self) -> None:
        if not self._closed:
            self._closed = True
            for connection in self._reactor.connections.values():
                connection.end.close()
            self._reactor.listeners.close()
            self._reactor.epoll.close()
