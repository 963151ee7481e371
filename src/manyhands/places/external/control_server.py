"""The leader's end of all control connections: membership, incoming events, and messages to the members.

It is to externally started processes what `places.local.supervisor.Supervisor` is to those of this host: it reports
an end as an event, and the caller decides what it means. One thread polls, several times a second; any thread may call
`tell`, `ask_to_stop`, `give` and `break_off`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

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
    SendQueue,
    StoreCall,
    Term,
    Wakeup,
    pieces,
)
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.external.run_store import KeyValueStore
from manyhands.places.local.control import Failed, Finished, Note, Stop, encoded
from manyhands.places.local.failure import Failure, describe_status
from manyhands.places.local.host import host_identity
from manyhands.places.local.roster import Ended, Said, Started
from manyhands.places.local.status import StatusRow
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, HubEvent, Lost, Ready, Rejected, Settings, Shared
from manyhands.transport.messages import ProtocolError

_MOST_LARGE: Final = 64  # large objects that one member may be sending at a time
_MOST_LOST: Final = 1 << 40  # events that one member may report as dropped at a time
_MOST_LARGE_BYTES: Final = 1 << 36
_SHOWN: Final = 60
_CLOCKS_AGREE_S: Final = 60.0


class ProcessRejected(NamedTuple):
    """A process that has the run's token was rejected; it received the same sentence."""

    sentence: str
    field: str = ""  # what did not match: `rank` if another process has it, or the name of a term


class Warned(NamedTuple):
    """A warning about a member for the user; the run continues."""

    member: int
    sentence: str


class Delivered(NamedTuple):
    """A large object from a member's `ControlConnection.give`, in order with its messages."""

    member: int
    name: str
    data: bytearray


ControlEvent = Started | Said | Ended | ProcessRejected | Warned | Delivered


def terms_of(values: Mapping[str, Any]) -> tuple[Term, ...]:
    """The terms of a run as text; a long value is shortened to its beginning and a digest."""

    def shown(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}… ({digest})"

    return tuple(Term(name=name, value=shown(str(value))) for name, value in values.items())


def clock_notice(name: str, theirs_unix_s: float, ours_unix_s: float) -> str | None:
    """A warning if a process's wall clock is off by more than a minute; events are on the leader's clock anyway."""
    off_s = theirs_unix_s - ours_unix_s
    if abs(off_s) <= _CLOCKS_AGREE_S:
        return None
    much = f"{abs(off_s) / 3600:.1f} h" if abs(off_s) >= 3600 else f"{abs(off_s) / 60:.0f} min"
    way = "ahead of" if off_s > 0 else "behind"
    return (
        f"the clock of {name} is {much} {way} the leader's: set it, or dates in its own logs are wrong; "
        "the run's events use the leader's clock"
    )


class Register:
    """The ranks of one run; a rank is free until a process takes it, and again once that process has left."""

    def __init__(self, leader: ControlHello) -> None:
        self._leader = leader
        self._seats: dict[int, ControlHello] = {}
        self.rejected: list[str] = []  # one sentence for each process that was rejected

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(1, self._leader.world) if rank not in self._seats)

    def arrive(self, hello: ControlHello) -> ControlRefused | None:
        """Admit a process to its rank, or return why it does not belong to this run."""
        mismatch = self._mismatch(hello)
        if mismatch is None:
            self._seats[hello.rank] = hello
            return None
        self.rejected.append(mismatch[1])
        return ControlRefused(field=mismatch[0], reason=mismatch[1])

    def leave(self, rank: int) -> None:
        self._seats.pop(rank, None)

    def late(self, deed: str, waited_s: float, named: Callable[[int], str] = "rank {}".format) -> str:
        who = f"{', '.join(map(named, self.missing))} of {self._leader.world}"
        reasons = "".join(f"; {sentence}" for sentence in self.rejected[-3:])
        return f"{who} did not {deed} within {waited_s:.1f} s; check that it was started{reasons}"

    def _mismatch(self, hello: ControlHello) -> tuple[str, str] | None:
        mine = self._leader
        if hello.world != mine.world:
            return "world", (
                f"{hello.name} has world size {hello.world}, but the leader, {mine.name}, has {mine.world}; "
                "start all processes with one command"
            )
        if not 0 < hello.rank < mine.world:
            return "rank", (
                f"{_process(hello)} claims rank {hello.rank}; the ranks of this run are 0, which is "
                f"{_process(mine)}, to {mine.world - 1}"
            )
        other = self._seats.get(hello.rank)
        if other is not None:
            return "rank", (
                f"two processes have rank {hello.rank}: {_process(other)} and {_process(hello)}; give each its own "
                "rank, or each job its own port"
            )
        ours = {term.name: term.value for term in mine.terms}
        theirs = {term.name: term.value for term in hello.terms}
        for name in {**ours, **theirs}:
            here, there = ours.get(name, "nothing"), theirs.get(name, "nothing")
            if here != there:
                return name, (
                    f"{hello.name} has {name}={there}, but the leader, {mine.name}, has {name}={here}; start all "
                    "processes of a run with the same settings"
                )
        return None


def _process(hello: ControlHello) -> str:
    return f"process {hello.pid} ({hello.name})"


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
    connection: int  # the hub's number
    queue: SendQueue
    seen: StatusRow  # on this process's clock
    ended: bool = False
    connected: bool = True
    large: dict[str, bytearray] = field(default_factory=dict)  # objects that are still arriving, by name

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
        """Start without a listener: no process can connect before `listen`. `terms` must match on every one."""
        self.name = place.name
        self.world = place.world
        self.store = KeyValueStore()  # the run's store, which the members reach as `ControlConnection.store`
        self.register = Register(hello_of(place, terms))
        self.known: dict[int, ControlMember] = {}  # by rank, members that left included
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
        """While open, the other ranks' events go into these rings, by rank, which stay the caller's."""
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
        return self.known[rank].hello.host

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

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON to a member, which its `received` returns; in order, without waiting. A no-op if it has left."""
        self._queue(member).put(encoded(Note(payload=payload), CONTROL_CODER))

    def ask_to_stop(self, member: int) -> None:
        self._queue(member).put(encoded(Stop(), CONTROL_CODER))

    def give(self, member: int, name: str, chunks: Iterable[Any]) -> None:
        """Send a large object, which the member's `take(name)` returns; the polling thread produces the chunks."""
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
            raise UserError(f"member={rank} never connected")
        return member.queue

    def _send_queued(self) -> None:
        for member in self.known.values():
            if member.connected:
                connection = member.connection
                member.queue.empty(lambda m, p, to=connection: self._hub.send(to, m, p))  # type: ignore[misc]

    def _hear(self, event: HubEvent) -> list[ControlEvent]:
        match event:
            case Arrived(connection, ControlHello() as hello):
                return self._greet(connection, hello)
            case Arrived(connection) if connection not in self._ranks:
                event.release()
                self._hub.disconnect(connection, "it sent a message before its hello")
            case Arrived(connection, message, payload):
                member = self.known[self._ranks[connection]]
                member.seen = replace(member.seen, heartbeat_ns=time.monotonic_ns())
                try:
                    return self._said(member.hello.rank, member, message, payload)
                except ProtocolError as error:
                    self._hub.disconnect(connection, str(error))
                    return self._lost(connection, f"it violated the protocol: {printable(str(error))}", False)
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
                    raise ProtocolError("events", f"invalid: {len(payload)} bytes of records, {lost} lost")
                records = np.frombuffer(payload, RECORD)
                if not good_records(records).all():
                    raise ProtocolError("events", "an event record is invalid")
                self.rings[rank].append(records, lost)
            case ControlPiece(name=name, last=last):
                data = member.large.setdefault(name, bytearray())
                if len(data) + len(payload) > _MOST_LARGE_BYTES or len(member.large) > _MOST_LARGE:
                    raise ProtocolError("piece", f"{name[:80]!r} is too large")
                data += payload
                if last:
                    return [Delivered(rank, name, member.large.pop(name))]
            case StoreCall():
                member.queue.put(self.store.answer(message))
            case _:
                raise ProtocolError("kind", f"the leader does not accept a {type(message).__name__}")
        return []

    def _greet(self, connection: int, hello: ControlHello) -> list[ControlEvent]:
        if connection in self._ranks:
            self._hub.disconnect(connection, "it sent a second hello")
            return self._lost(connection, "it sent a second hello", False)
        refused = self.register.arrive(hello)
        if refused is None and self._shutting_down:
            # The run is over: free the rank that `arrive` has just taken, and reject the process.
            self.register.leave(hello.rank)
            refused = ControlRefused(field="over", reason=f"{hello.name} is too late: the run is over")
        if refused is not None:
            self._hub.send(connection, refused)
            return [ProcessRejected(refused.reason, refused.field)]
        self._ranks[connection] = hello.rank
        self.known[hello.rank] = ControlMember(
            hello, connection, SendQueue(self._wakeup.ring), StatusRow(pid=hello.pid)
        )
        self._hub.send(connection, ControlWelcome(leader=self.name, clock=str(clock_id())))
        notice = clock_notice(hello.name, hello.unix_s, time.time())
        return [Started(hello.rank, hello.pid), *([Warned(hello.rank, notice)] if notice is not None else [])]

    def _lost(self, connection: int, reason: str, in_peace: bool) -> list[ControlEvent]:
        rank = self._ranks.pop(connection, None)
        if rank is None:
            return []
        member = self.known[rank]
        member.connected = False
        member.queue.close()
        if member.ended:
            return []  # its result or failure was reported before the connection closed
        how = "left before it reported a result" if in_peace else f"is lost: {reason}"
        sentence = f"{member.name} {how}; {describe_status(member.seen, time.monotonic_ns())}"
        self.register.leave(rank)
        return [member.end(Failure(rank=rank, sentence=sentence))]
