"""A process's control connection to the leader of its run: the worker context of one host, over the network.

A thread of the connection owns the socket. It sends the queued messages, receives from the leader, drains the event
ring, whose events reach the leader on the leader's clock, and compares clocks. If the leader dies, misses its
heartbeats or reports that the run has failed, waits end through `on_over`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, printable
from manyhands.native.closeable import Closeable
from manyhands.observe.record.clocks import Bracket, Offset, clock_id, offset_from
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.control_messages import (
    CONTROL_CODER,
    CONTROL_FINGERPRINT,
    ControlEvents,
    ControlMarked,
    ControlOver,
    ControlPiece,
    ControlPing,
    ControlPong,
    ControlRefused,
    ControlWelcome,
    SendQueue,
    StoreAnswer,
    StoreCall,
    Term,
    Wakeup,
    pieces,
)
from manyhands.places.external.control_server import hello_of
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.external.run_store import absent
from manyhands.places.local.control import Finished, Note, Stop, encoded
from manyhands.places.local.failure import report
from manyhands.places.local.status import NOBODY, StagePlace, State
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, HubEvent, Joined, Lost, Ready, Settings

_LEADER: Final = 0
_TICK_S: Final = 0.05
_PING_S: Final = 2.0
_FIRST_PINGS: Final = 5
_KEPT_BRACKETS: Final = 32
_SEND_TIMEOUT_S: Final = 60.0
_STORE_TIMEOUT_S: Final = 30.0
_FLUSH_S: Final = 10.0
_LEAST_NUMBER, _MOST_NUMBER = 1 << 20, 1 << 62


class Broken(NamedTuple):
    """Why a run ended early: the rank at fault, and a sentence that explains it."""

    rank: int
    sentence: str
    is_lost: bool = False
    """Whether the connection to the leader was lost: the run may continue without this process, which may rejoin."""


class RunEnding(ManyhandsError):
    """The run there is ending, or its leader does not answer: the next run may begin at the same address."""


def open_control_connection(
    place: ProcessPlace,
    leader: str,
    address: str,
    token: bytes,
    terms: Sequence[Term],
    *,
    timeout_s: float,
    settings: Settings | None = None,
) -> ControlConnection:
    """Join the run that `leader`, as errors call it, leads at an address of the hub's, by the secret `token`.

    UserError if one of the two rejects the other, PeerTimeout if the leader does not answer, RunEnding if another
    attempt may succeed.
    """
    settings = replace(settings or Settings(), connect_s=timeout_s)
    # A random hub member number for each process, not its rank: if two processes claim one rank, both must get as
    # far as the hello, so that the second can be told why it is rejected.
    number = _LEAST_NUMBER + secrets.randbelow(_MOST_NUMBER)
    mine = Credentials(member=number, role=place.name, token=token, fingerprint=CONTROL_FINGERPRINT)
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(mine, CONTROL_CODER, settings=settings))
        hub.connect(_LEADER, address)
        welcome, rest = _introduce(hub, place, leader, address, terms, timeout_s)
        connection = ControlConnection(place, hub, welcome)
        stack.pop_all()
    connection.begin(rest)
    return connection


def _introduce(
    hub: Hub, place: ProcessPlace, leader: str, address: str, terms: Sequence[Term], timeout_s: float
) -> tuple[ControlWelcome, list[HubEvent]]:
    who, deadline = f"{place.name} (rank {place.rank})", time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PeerTimeout(
                f"{who}: the leader, {leader}, did not answer at {address} within {timeout_s:.0f} s", _LEADER
            )
        events = hub.poll(left_s)
        for number, event in enumerate(events, 1):
            match event:
                case Joined():
                    hub.send(_LEADER, hello_of(place, terms))
                case Arrived(_, ControlWelcome() as welcome):
                    return welcome, events[number:]
                case Arrived(_, ControlRefused(reason=reason, field=field)):
                    raise (RunEnding if field == "over" else UserError)(printable(reason, 1000))
                case Lost(reason=reason, final=final):
                    # A rejected token or certificate is rejected next time as well.
                    kind = UserError if final else RunEnding
                    raise kind(f"{who} cannot join the run of {leader}: {reason}")
                case _:
                    raise ManyhandsError(f"the leader, {leader}, sent a message before its welcome")


class ControlConnection(Closeable):
    """One process's end of the control connection; a context manager, `close` is idempotent. Thread-safe."""

    def __init__(self, place: ProcessPlace, hub: Hub, welcome: ControlWelcome) -> None:
        """Take ownership of the hub; called by `open_control_connection`."""
        self.name, self.rank, self.world = place.name, place.rank, place.world
        self.leader = welcome.leader
        self.step = 0
        self._hub = hub
        self._post = partial(hub.send, _LEADER)
        self._same_clock = welcome.clock == str(clock_id())
        self._brackets: deque[Bracket] = deque(maxlen=_KEPT_BRACKETS)
        self._marked: ControlMarked | None = None
        self._notes: deque[Mapping[str, Any]] = deque()
        self._stop_requested = False
        self.over: Broken | None = None  # why the run ended early, or None
        self._on_over: list[Callable[[Broken], None]] = []
        self.changed = threading.Condition()
        """Notified when something has come from the leader, or the run is over."""
        self._large: dict[str, bytearray] = {}
        self._complete: set[str] = set()
        self._dropped = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        with ExitStack() as stack:
            stack.callback(hub.close)
            self.ring = stack.enter_context(EventRing.create(role=place.rank))
            """The events of this process; all of them reach the leader."""
            self._wakeup = Wakeup()
            stack.callback(self._wakeup.close)
            hub.register(self._wakeup.fileno())
            self.queue = SendQueue(self._wakeup.ring)
            self._readable = Wakeup()
            stack.callback(self._readable.close)
            self._stack = stack.pop_all()
        self.store = ControlStore(self)
        self.control_fileno = self._readable.fileno
        """A descriptor that is readable when `received` has messages, or when the leader asked to stop."""

    def send(self, payload: Mapping[str, Any]) -> None:
        """Send JSON to the leader; messages arrive in order, and all of them before the result."""
        note = encoded(Note(payload=payload), CONTROL_CODER)  # now: the caller may change it
        self.queue.put_when_room(note, _SEND_TIMEOUT_S, self.leader)

    def mark(self, step: int, state: State, waiting_for: int = NOBODY, *, place: StagePlace = None) -> None:
        """Report what this process is doing; cheap, because only the newest mark is sent, a few times a second."""
        self.step = step
        self._marked = ControlMarked(step, state, waiting_for, *(place or (NOBODY, NOBODY)))

    def received(self, timeout_s: float = 0.0) -> list[Mapping[str, Any]]:
        """Return the leader's messages since the last call, in order; waits at most `timeout_s` for the first."""
        self._readable.clear()
        if timeout_s > 0:
            with self.changed:
                self.changed.wait_for(lambda: self._notes or self.over is not None, timeout_s)
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def stop_requested(self) -> bool:
        return self._stop_requested or self.over is not None

    @property
    def stopping(self) -> bool:
        return self.stop_requested()

    def give(self, name: str, chunks: Iterable[Any]) -> None:
        """Send the leader a large object, in order with the messages; the connection's thread produces the chunks."""
        self.queue.put_all(pieces(name, chunks))

    def end(self, payload: Mapping[str, Any]) -> None:
        """Report the result of this process; the connection stays open for what the leader gives."""
        result = encoded(Finished(payload=payload), CONTROL_CODER)
        self.queue.put_when_room(result, _SEND_TIMEOUT_S, self.leader)

    def fail(self, error: BaseException) -> None:
        self.queue.put(encoded(report(error, self.step), CONTROL_CODER))

    def wait_over(self, timeout_s: float) -> Broken | None:
        """Wait at most `timeout_s` for the run to end early; return the reason, or None."""
        with self.changed:
            self.changed.wait_for(lambda: self.over is not None, timeout_s)
            return self.over

    def on_over(self, act: Callable[[Broken], None]) -> None:
        """Call `act` in the connection's thread if the run ends early, at once if it already has: to end waits."""
        with self.changed:
            over = self.over
            if over is None:
                self._on_over.append(act)
        if over is not None:
            act(over)

    def take(self, name: str, timeout_s: float) -> bytearray:
        """Receive a large object of the leader's; PeerTimeout if no more of it comes for `timeout_s`."""
        seen, deadline = -1, 0.0
        with self.changed:
            while name not in self._complete:
                self.require_going()
                here = len(self._large.get(name, b""))
                if here != seen:
                    seen, deadline = here, time.monotonic() + timeout_s
                elif time.monotonic() >= deadline:
                    silence = f"{self.leader} sent no more of {name} for {timeout_s:.0f} s"
                    raise PeerTimeout(f"{self.name}: {silence}", _LEADER)
                self.changed.wait(min(1.0, timeout_s))
            self._complete.discard(name)
            return self._large.pop(name)

    def offset(self) -> Offset:
        """The clock offset: add its `ns` to this process's clock to get the leader's."""
        if self._same_clock or not self._brackets:
            return Offset(ns=0, error_ns=0)
        return offset_from(tuple(self._brackets))

    def require_going(self) -> None:
        if self.over is not None:
            raise Aborted(self.over.sentence)
        if self._closed:
            raise Aborted(f"{self.name} has closed its connection to {self.leader}")

    def begin(self, events: Sequence[HubEvent] = ()) -> None:
        self._take(events)
        for _ in range(0 if self._same_clock else _FIRST_PINGS):
            self._post(ControlPing(sent_ns=time.monotonic_ns()))
            before, deadline = len(self._brackets), time.monotonic() + 1.0
            while len(self._brackets) == before and time.monotonic() < deadline and self.over is None:
                self._take(self._hub.poll(0.1))
        self._thread = threading.Thread(target=self._run, name="manyhands control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, say goodbye and close; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._wakeup.ring()
            self._thread.join()
        self.queue.close()
        self._stack.close()

    def _run(self) -> None:
        """The thread: an exception here ends all waits and is reported to the leader, or it would be lost."""
        try:
            pinged_s = time.monotonic()
            while not self._closed and self.over is None:
                self.queue.empty(self._post)
                self._take(self._hub.poll(_TICK_S))
                self._send_signs()
                if not self._same_clock and time.monotonic() - pinged_s >= _PING_S:
                    pinged_s = time.monotonic()
                    self._post(ControlPing(sent_ns=time.monotonic_ns()))
            deadline = time.monotonic() + _FLUSH_S
            while self.over is None and time.monotonic() < deadline:
                self._send_signs()
                if self.queue.empty(self._post):
                    self._hub.flush(max(0.0, deadline - time.monotonic()))
                    return
                self._take(self._hub.poll(_TICK_S))
            if self.over is not None and self._hub.members():  # the leader is alive and may want the reason
                self._send_signs()
                self.queue.empty(self._post)
                self._hub.flush(1.0)
        except BaseException as error:
            sentence = f"{self.name}: its connection to {self.leader} failed: {error!r}"
            self._end_waits(Broken(self.rank, sentence))
            self._post(report(error, self.step))
            self._hub.flush(1.0)

    def _take(self, events: Sequence[HubEvent]) -> None:
        for event in events:
            match event:
                case Arrived(_, ControlPong(sent_ns=sent_ns, leader_ns=leader_ns)):
                    now_ns = time.monotonic_ns()
                    self._brackets.append(Bracket(before_ns=sent_ns, theirs_ns=leader_ns, after_ns=now_ns))
                case Arrived(_, Note(payload=payload)):
                    with self.changed:
                        self._notes.append(payload)
                        self.changed.notify_all()
                    self._readable.ring()
                case Arrived(_, Stop()):
                    self._stop_requested = True
                    self._readable.ring()
                case Arrived(_, StoreAnswer() as answer):
                    with self.changed:
                        if answer.number in self.store.answers:  # else its call has timed out
                            self.store.answers[answer.number] = answer
                            self.changed.notify_all()
                case Arrived(_, ControlPiece(name=name, last=last), payload):
                    with self.changed:
                        self._large.setdefault(name, bytearray()).extend(payload)
                        if last:
                            self._complete.add(name)
                        self.changed.notify_all()
                    event.release()
                case Arrived(_, ControlOver(rank=rank, sentence=sentence)):
                    self._end_waits(Broken(rank, sentence))
                case Lost(_, reason, in_peace):
                    how = "left" if in_peace else f"is lost: {reason}"
                    sentence = f"the leader of the run, {self.leader}, {how}"
                    self._end_waits(Broken(_LEADER, sentence, is_lost=not in_peace))
                case Ready():
                    self._wakeup.clear()
                case Arrived(_, other):
                    event.release()
                    sentence = f"the leader sent a {type(other).__name__} out of order"
                    self._end_waits(Broken(_LEADER, sentence))
                case _:
                    raise AssertionError(f"nobody else is at this connection: {event}")

    def _send_signs(self) -> None:
        """Send the newest mark and the new events, on the leader's clock; what exceeds the capacity stays queued."""
        if not self.queue.empty(self._post):
            return
        marked, self._marked = self._marked, None
        if marked is not None:
            self._post(marked)
        records = self.ring.drain()
        dropped = self.ring.dropped
        if not len(records) and dropped == self._dropped:
            return
        records["start_ns"] += self.offset().ns
        lost, self._dropped = dropped - self._dropped, dropped
        self.queue.put(ControlEvents(lost=lost), [records.tobytes()])
        self.queue.empty(self._post)

    def _end_waits(self, broken: Broken) -> None:
        with self.changed:
            if self.over is not None:
                return
            self.over = broken
            acts, self._on_over = self._on_over, []
            self.changed.notify_all()
        self._readable.ring()
        for act in acts:
            act(broken)


class ControlStore:
    """The leader's key-value store over the control connection, with the calls that `rendezvous.meet` makes."""

    def __init__(self, connection: ControlConnection) -> None:
        self._connection = connection
        self.answers: dict[int, StoreAnswer | None] = {}
        """By the number of the call; None until it is answered."""
        self._last_call = 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.ask("compare_set", [key], [expected, desired]).values[0].encode()

    def check(self, keys: Sequence[str]) -> bool:
        return self.ask("check", keys).found

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        answer = self.ask("get", keys)
        if not answer.found:
            raise UserError(absent(keys))
        return [value.encode() for value in answer.values]

    def set(self, key: str, value: str) -> None:
        self.ask("set", [key], [value])

    def add(self, key: str, amount: int) -> int:
        return int(self.ask("add", [key], [str(amount)]).values[0])

    def delete_key(self, key: str) -> bool:
        return self.ask("delete_key", [key]).found

    def ask(self, call: str, keys: Sequence[str], values: Sequence[str] = ()) -> StoreAnswer:
        """Make one call; PeerTimeout if no answer comes, Aborted if the run is over."""
        connection, changed = self._connection, self._connection.changed
        with changed:
            connection.require_going()
            number = self._last_call = self._last_call + 1
            self.answers[number] = None
        connection.queue.put(StoreCall(number=number, call=call, keys=tuple(keys), values=tuple(values)))
        deadline = time.monotonic() + _STORE_TIMEOUT_S
        with changed:
            try:
                while (answer := self.answers[number]) is None:
                    connection.require_going()
                    if not changed.wait(deadline - time.monotonic()):
                        silence = f"{connection.leader} did not answer for {_STORE_TIMEOUT_S:.0f} s"
                        raise PeerTimeout(f"{connection.name}: {silence}", _LEADER)
            finally:
                del self.answers[number]
        return answer
