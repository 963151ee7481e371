"""The leader's end of all control connections: membership, incoming events, and messages to the members.

    with ControlServer(place, terms, token) as server:
        address = server.listen("unix")                # and "tcp:…", for other hosts
        for event in server.poll(1.0):                 # a ControlEvent: Started, Said, Ended, …
            ...
        server.tell(2, {"begin": True})

It does for externally started processes what `places.local.supervisor.Supervisor` does for processes of this host:
it reports an end as an event, and the caller decides what it means. One thread polls, several times a second; any
thread may call `tell`, `ask_to_stop`, `give` and `break_off`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from manyhands.errors import UserError, printable
from manyhands.native.closeable import Closeable
from manyhands.observe.record.clocks import clock_id
from manyhands.observe.record.event_files import good_records
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import NOBODY, RECORD
from manyhands.places.external.control_messages import (
    CONTROL_CODER,
    CONTROL_FINGERPRINT,
    ControlEvents,
    ControlHello,
    ControlMarked,
    ControlOver,
    ControlPiece,
    ControlPing,
    ControlPong,
    ControlRefused,
    ControlWelcome,
    StoreCall,
    Term,
)
from manyhands.places.external.key_value_store import KeyValueStore
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.external.register import Register, clock_notice
from manyhands.places.external.send_queue import SendQueue, Wakeup, pieces
from manyhands.places.local.control import Failed, Finished, Note, Stop, encoded
from manyhands.places.local.failure import Failure, describe_status
from manyhands.places.local.host import host_identity
from manyhands.places.local.roster import Ended, Said, Started
from manyhands.places.local.status import StatusRow
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, HubEvent, Lost, Ready, Rejected, Settings, Shared
from manyhands.transport.messages import ProtocolError

__all__ = ["ControlEvent", "ControlServer", "Delivered", "ProcessRejected", "Warned", "hello_of"]

_MOST_LARGE: Final = 64  # large objects that one member may be sending at a time
_MOST_LOST: Final = 1 << 40  # events that one member may report as dropped at a time
_MOST_LARGE_BYTES: Final = 1 << 36


@dataclass(frozen=True, slots=True)
class ProcessRejected:
    """A process that has the run's token was rejected; it received the same sentence."""

    sentence: str
    field: str = ""
    """What did not match: `rank` if another process has it, or the name of a term."""


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning about a member for the user; the run continues."""

    member: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """A large object from a member's `ControlConnection.give`, in order with its messages."""

    member: int
    name: str
    data: bytearray


ControlEvent = Started | Said | Ended | ProcessRejected | Warned | Delivered


def hello_of(place: ProcessPlace, terms: Sequence[Term]) -> ControlHello:
    return ControlHello(
        rank=place.rank,
        world=place.world,
        role=place.role,
        name=place.name,
        host=host_identity(),
        pid=os.getpid(),
        unix_s=time.time(),
        terms=tuple(terms),
    )


@dataclass(slots=True)
class ControlMember:
    """A process that was admitted, with its connection and send queue."""

    hello: ControlHello
    connection: int
    """The hub's number for its connection."""
    queue: SendQueue
    seen: StatusRow
    """The status that it last reported, on this process's clock."""
    ended: bool = False
    connected: bool = True
    large: dict[str, bytearray] = field(default_factory=dict)
    """Large objects that are still arriving, by name."""

    @property
    def name(self) -> str:
        return f"{self.hello.name} (process {self.hello.pid})"

    def end(self, failure: Failure | None = None, payload: Mapping[str, Any] | None = None) -> Ended:
        self.ended = True
        short = self.hello.name.partition(" on ")[0]  # the name in the run's files
        return Ended(
            member=self.hello.rank,
            name=self.hello.name,
            status=None,
            last_words="",
            payload=payload,
            failure=replace(failure, name=short) if failure is not None else None,
        )


class ControlServer(Closeable):
    """All control connections of one run, at its leader; a context manager, `close` is idempotent."""

    def __init__(
        self, place: ProcessPlace, terms: Sequence[Term], token: bytes, *, settings: Settings | None = None
    ) -> None:
        """Start without a listener: nobody can connect before `listen`. `terms` must match on every process."""
        self.name = place.name
        self.world = place.world
        self.store = KeyValueStore()
        """The run's store, which the members reach as `ControlConnection.store`."""

        self.register = Register(hello_of(place, terms))
        self.known: dict[int, ControlMember] = {}
        """By rank, members that left included."""

        self._ranks: dict[int, int] = {}  # from the hub's number
        self._unreported: list[ControlEvent] = []
        self._closed = False
        self._shutting_down = False
        with ExitStack() as stack:
            self.rings: Mapping[int, EventRing] = {
                rank: stack.enter_context(EventRing.create(role=rank)) for rank in range(1, place.world)
            }
            """The events of each other rank, on this process's clock."""

            mine = Credentials(member=0, role=place.name, token=token, fingerprint=CONTROL_FINGERPRINT)
            self._hub = stack.enter_context(Hub(mine, CONTROL_CODER, settings=settings))
            self._wakeup = Wakeup()
            stack.callback(self._wakeup.close)
            self._hub.register(self._wakeup.fileno())
            self._stack = stack.pop_all()
        self.listen = self._hub.listen

    @contextmanager
    def recording_into(self, rings: Mapping[int, EventRing]) -> Iterator[None]:
        """While open, the other ranks' events go into these rings, by rank; the caller keeps ownership of the
        rings.
        """
        before, self.rings = self.rings, rings
        try:
            yield
        finally:
            self.rings = before

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(rank for rank, member in self.known.items() if not member.ended)

    def name_of(self, rank: int) -> str:
        """`worker 2 on hostB (process 4711)`; just the rank if it never joined."""
        member = self.known.get(rank)
        return member.name if member is not None else f"rank {rank}"

    def host_of(self, rank: int) -> str:
        """The identity of the host that a rank is on."""
        return self.known[rank].hello.host

    # ── what happens ──────────────────────────────────────────────────────────────────────────────────────────────

    def poll(self, timeout_s: float) -> list[ControlEvent]:
        """Return what happened, in order per member; waits at most `timeout_s` for the first event."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._send_queued()
            unreported, self._unreported = self._unreported, []
            left_s = 0.0 if unreported else max(0.0, deadline - time.monotonic())
            events = unreported + [one for event in self._hub.poll(left_s) for one in self._hear(event)]
            self._send_queued()
            if events or left_s == 0.0:
                return events

    # ── what they are told, by any thread ─────────────────────────────────────────────────────────────────────────

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON to a member, which its `received` returns; in order, without waiting. A no-op if it has left."""
        self._queue(member).put(encoded(Note(payload=payload), CONTROL_CODER))

    def ask_to_stop(self, member: int) -> None:
        """Ask the member to stop; a no-op if it has left."""
        self._queue(member).put(encoded(Stop(), CONTROL_CODER))

    def give(self, member: int, name: str, chunks: Iterable[Any]) -> None:
        """Send a large object, which the member's `take(name)` returns; chunks are buffers, produced lazily.

        The chunks are produced in the polling thread.
        """
        self._queue(member).put_all(pieces(name, chunks))

    def break_off(self, rank: int, sentence: str) -> None:
        """Tell every member that the run has failed because of `rank`: their waits end with this sentence."""
        for member in tuple(self.known.values()):
            member.queue.put(ControlOver(rank=rank, sentence=sentence))

    def dismiss(self, member: int, sentence: str) -> None:
        """Disconnect a member and tell it why; `poll` then reports its end. Call from the polling thread."""
        found = self.known.get(member)
        if found is None or not found.connected:
            return
        self._hub.send(found.connection, ControlOver(rank=member, sentence=sentence))
        self._hub.disconnect(found.connection, sentence)
        self._unreported += self._lost(found.connection, sentence, False)

    def shutdown(self, timeout_s: float) -> tuple[int, ...]:
        """Send everything and wait until all members have left; return the ranks that have not. Replaces `poll`."""
        deadline = time.monotonic() + timeout_s
        self._shutting_down = True
        while True:
            left = tuple(rank for rank, member in self.known.items() if member.connected)
            if not left or time.monotonic() >= deadline:
                return left
            self.poll(0.05)

    def close(self) -> None:
        """Say goodbye to every member and close; what is still queued is dropped (see `shutdown`)."""
        if self._closed:
            return
        self._closed = True
        for member in self.known.values():
            member.queue.close()
        self._stack.close()

    def _queue(self, rank: int) -> SendQueue:
        member = self.known.get(rank)
        if member is None:
            raise UserError(f"member={rank} never came")
        return member.queue

    def _send_queued(self) -> None:
        """Pass queued messages to the hub, as far as it accepts them."""
        for member in self.known.values():
            if member.connected:
                connection = member.connection
                member.queue.empty(lambda m, p, to=connection: self._hub.send(to, m, p))  # type: ignore[misc]

    # ── what they say ─────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, event: HubEvent) -> list[ControlEvent]:
        match event:
            case Arrived(connection, ControlHello() as hello):
                return self._greet(connection, hello)
            case Arrived(connection) if connection not in self._ranks:
                event.release()
                self._hub.disconnect(connection, "it says something before it says who it is")
            case Arrived(connection, message, payload):
                member = self.known[self._ranks[connection]]
                member.seen = replace(member.seen, heartbeat_ns=time.monotonic_ns())
                try:
                    return self._said(member.hello.rank, member, message, payload)
                except ProtocolError as error:
                    self._hub.disconnect(connection, str(error))
                    return self._lost(connection, f"it broke the protocol: {printable(str(error))}", False)
                finally:
                    event.release()
            case Lost(connection, reason, in_peace):
                return self._lost(connection, reason, in_peace)
            case Rejected(reason, claimed) if claimed is not None:  # else an unknown peer, without the token
                return [
                    ProcessRejected(f"a process that has this run's token was rejected: {printable(reason)}")
                ]
            case Ready():
                self._wakeup.clear()
            case Shared():
                raise AssertionError(f"nobody shares memory over a control connection: {event}")
        return []  # Joined: connected, but its hello has not arrived yet

    def _said(
        self, rank: int, member: ControlMember, message: object, payload: memoryview
    ) -> list[ControlEvent]:
        match message:
            case Note() | Finished() | Failed() if member.ended:
                pass  # its end was reported: nothing may follow it
            case Note(payload=note):
                return [Said(rank, note)]
            case Finished(payload=result):
                self.register.leave(rank)
                return [member.end(payload=result)]
            case Failed():
                sentence = f"{member.name} raised {message.error} at step {message.step}: {printable(message.message)}"
                self.register.leave(rank)
                return [member.end(Failure(rank=rank, sentence=sentence, reported=message))]
            case ControlPing(sent_ns=sent_ns):
                self._hub.send(member.connection, ControlPong(sent_ns=sent_ns, leader_ns=time.monotonic_ns()))
            case ControlMarked():
                now_ns = time.monotonic_ns()
                member.seen = StatusRow(
                    pid=member.hello.pid,
                    heartbeat_ns=now_ns,
                    marked_ns=now_ns,
                    step=message.step,
                    state=message.state,
                    waiting_for=message.waiting_for,
                    place=(message.stage, message.microbatch) if message.stage != NOBODY else None,
                )
            case ControlEvents(lost=lost):
                if len(payload) % RECORD.itemsize or not 0 <= lost < _MOST_LOST:
                    raise ProtocolError("events", f"{len(payload)} bytes of records, {lost} lost")
                records = np.frombuffer(payload, RECORD)
                if not good_records(records).all():
                    raise ProtocolError("events", "a record that no role makes")
                self.rings[rank].append(records, lost)
            case ControlPiece(name=name, last=last):
                data = member.large.setdefault(name, bytearray())
                if len(data) + len(payload) > _MOST_LARGE_BYTES or len(member.large) > _MOST_LARGE:
                    raise ProtocolError("piece", f"more of {name[:80]!r} than anybody sends")
                data += payload
                if last:
                    return [Delivered(rank, name, member.large.pop(name))]
            case StoreCall():
                member.queue.put(self.store.answer(message))
            case _:
                raise ProtocolError("kind", f"a {type(message).__name__} is for members, not for the leader")
        return []

    def _greet(self, connection: int, hello: ControlHello) -> list[ControlEvent]:
        if connection in self._ranks:
            self._hub.disconnect(connection, "it says twice who it is")
            return self._lost(connection, "it says twice who it is", False)
        refused = self.register.arrive(hello)
        if refused is None and self._shutting_down:
            # The run is over: free the rank that `arrive` has just taken, and reject the process.
            self.register.leave(hello.rank)
            refused = ControlRefused(field="over", reason=f"{hello.name} comes too late: the run is over")
        if refused is not None:
            self._hub.send(connection, refused)
            return [ProcessRejected(refused.reason, refused.field)]
        self._ranks[connection] = hello.rank
        self.known[hello.rank] = ControlMember(
            hello, connection, SendQueue(self._wakeup.ring), StatusRow(pid=hello.pid)
        )
        self._hub.send(connection, ControlWelcome(leader=self.name, clock=str(clock_id())))
        notice = clock_notice(hello.name, hello.unix_s, time.time())
        warnings = [Warned(hello.rank, notice)] if notice is not None else []
        return [Started(hello.rank, hello.pid), *warnings]

    def _lost(self, connection: int, reason: str, in_peace: bool) -> list[ControlEvent]:
        rank = self._ranks.pop(connection, None)
        if rank is None:
            return []
        member = self.known[rank]
        member.connected = False
        member.queue.close()
        if member.ended:
            return []  # its result or failure was reported before the connection closed
        how = "left before it had a result" if in_peace else f"is lost: {reason}"
        sentence = f"{member.name} {how}; {describe_status(member.seen, time.monotonic_ns())}"
        self.register.leave(rank)
        return [member.end(Failure(rank=rank, sentence=sentence))]
