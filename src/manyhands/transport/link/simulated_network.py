"""A network in one process, in virtual time, the same at every run: for tests, ours and yours.

Each role has a clock of its own (Lamport, 1978). A message leaves when the wire is free of the ones before it, is on
the wire for bytes ÷ bandwidth and arrives a latency (and a jitter) later; receiving it moves the receiver's clock to
that moment, and nothing ever sleeps. Losses and jitter are drawn from (seed, source, destination, number of the
message): they depend on what the roles do and never on how the threads that run them are scheduled.

`run` gives each role a thread; a receive then waits until its message is there, or until it is certain that none comes
in time. Without `run`, the caller is alone and drives all ends by itself.

Each direction of a link has a wire, and a buffer without bound at the receiver, so only the wire makes a send Full. An
end learns by receiving that its peer closed or died, one latency after that; a partition loses what is sent meanwhile.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

import torch

from manyhands.errors import ManyhandsError, UserError
from manyhands.transport.link.interface import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_QUEUE_BYTES,
    HEADER_BYTES,
    Closed,
    Flushed,
    FlushOutcome,
    Full,
    Header,
    Link,
    LinkCounters,
    Message,
    PeerDied,
    Queued,
    ReceiveOutcome,
    SendOutcome,
    TimedOut,
    check_size,
    hand_out,
)

T = TypeVar("T")

_PATIENCE_S: Final = 0.05


class RoleKilled(ManyhandsError):
    """Raised inside a role that was killed on purpose, so that nothing of its code runs on."""


@dataclass(slots=True)
class _RoleClock:
    """What the clock of `role` shows, which that role alone moves, and when it dies: infinity if it was not killed."""

    role: str
    now_s: float = 0.0
    dies_s: float = math.inf

    def move(self, to_s: float) -> None:
        """Put it forward; RoleKilled if its role does not live to see that."""
        self.now_s = max(self.now_s, min(to_s, self.dies_s))
        if self.now_s >= self.dies_s:
            raise RoleKilled(f"{self.role} was killed at {self.dies_s:g} s of virtual time")


class _VirtualTime:
    """The clocks of all roles, which run in threads of one process, who waits for what, and who dies when.

    A waiting role declares its deadline. Virtual time passes only when every running role waits: then the deadline of
    the role with the earliest one (ties go by name) has passed. Any other role wakes up later in virtual time and can
    send nothing into that one's past, so what a role sees does not depend on thread scheduling.

    The order in which threads run is therefore free to choose: a role that is woken continues once the one that woke it
    waits, instead of competing for the GIL at every message. A role that waits for something other than a link delays
    the others for `_PATIENCE_S` of real time, not longer.

    `changed` guards everything, also in the code that uses this class; methods that say so want it held. A clock is
    read without it. `stall_s` is the one real time here: how long to wait for a role that neither waits nor ends.
    """

    def __init__(self, stall_s: float) -> None:
        self.changed = threading.RLock()
        self._wakeups: dict[str, threading.Lock] = {}  # let go to ring it, taken to hear it
        self._stall_s = stall_s
        self._clocks: dict[str, _RoleClock] = {}
        self._running: set[str] = set()
        self._waiting: dict[str, float] = {}
        self._expired: set[str] = set()
        self._woken: deque[str] = deque()  # asleep, not waiting any more, in the order in which they continue
        self._awake = 0  # threads of roles that do not sleep

    def clock(self, role: str) -> _RoleClock:
        return self._clocks.get(role) or self._clocks.setdefault(role, _RoleClock(role))

    def kill(self, role: str, at_s: float) -> None:
        with self.changed:
            clock = self.clock(role)
            clock.dies_s = min(at_s, clock.dies_s)
            self.wake_all()

    def wait(self, role: str, until_s: Callable[[], float], ready: Callable[[], bool]) -> bool:
        """Wait until `ready` (True) or `until_s` in virtual time (False); `changed` is held. Wakers must `wake`."""
        if role in self._waiting:
            raise UserError(f"two threads act as {role!r} at once; use one thread for each role")
        try:
            while not ready():
                if role in self._expired:
                    return False
                self._waiting[role] = min(until_s(), self.clock(role).dies_s)
                self._expire_one(role)
                if role not in self._expired and not self._sleep(role):
                    raise ManyhandsError(
                        f"{role} waited {self._stall_s:g} s of real time for {sorted(self._busy())}, which "
                        "neither wait on a simulated link nor have ended"
                    )
            return True
        finally:
            self._waiting.pop(role, None)
            self._expired.discard(role)

    def wake(self, role: str) -> None:
        """`role` may be ready now: it counts as running until it waits again; `changed` is held."""
        if self._waiting.pop(role, None) is not None:
            self._woken.append(role)
            self._run_next()

    def wake_all(self) -> None:
        """Deadlines may have changed: everybody looks again before time passes; `changed` is held."""
        self._woken.extend(self._waiting)
        self._waiting.clear()
        self._run_next()

    def run(self, roles: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run each function in a thread as that role; the results of those that lived. The earliest error is raised."""
        results: dict[str, T] = {}
        errors: list[tuple[float, str, BaseException]] = []

        def act(role: str, function: Callable[[], T]) -> None:
            try:
                with self.changed:
                    if role in self._woken:
                        self._await_wakeup(role)
                    self._run_anyway(role)
                results[role] = function()
            except RoleKilled:
                pass
            except BaseException as error:
                died_s = self.clock(role).now_s
                errors.append((died_s, role, error))
                self.kill(role, died_s)
            finally:
                with self.changed:
                    self._running.discard(role)
                    self._awake -= 1
                    self._expire_one(role)
                    self._run_next()

        with self.changed:
            self._running |= set(roles)
            self._woken.extend(roles)
            self._run_next()
        threads = [
            threading.Thread(target=act, args=item, name=f"simulated {item[0]}", daemon=True)
            for item in roles.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda entry: entry[:2])[2]
        return results

    def _busy(self) -> set[str]:
        return self._running - self._waiting.keys()

    def _expire_one(self, awake: str) -> None:
        """If everybody waits, tell the role with the earliest deadline that it has passed; `awake` is not woken."""
        if self._waiting and not self._busy():
            role = min(self._waiting, key=lambda name: (self._waiting[name], name))
            del self._waiting[role]
            self._expired.add(role)
            if role != awake:
                self._woken.append(role)

    def _sleep(self, role: str) -> bool:
        """Let the next role continue, and sleep until `role` is woken; False if that takes more than `stall_s`."""
        self._awake -= role in self._running
        self._run_next()
        give_up_s = time.monotonic() + self._stall_s
        while role in self._waiting and time.monotonic() < give_up_s:
            self._await_wakeup(role)
        if role in self._waiting:
            self._awake += role in self._running
            return False
        self._run_anyway(role)
        return True

    def _run_anyway(self, role: str) -> None:
        """Count a role as running that continues before `_run_next` chose it: the patience is over."""
        if role in self._woken:
            self._woken.remove(role)
            self._awake += role in self._running

    def _await_wakeup(self, role: str) -> None:
        wakeup = self._wakeup(role)
        self.changed.release()
        wakeup.acquire(timeout=min(_PATIENCE_S, self._stall_s))
        self.changed.acquire()

    def _run_next(self) -> None:
        """If no role is running, let the next one in order continue."""
        if self._woken and not self._awake:
            role = self._woken.popleft()
            self._awake += role in self._running
            wakeup = self._wakeup(role)
            if wakeup.locked():
                wakeup.release()

    def _wakeup(self, role: str) -> threading.Lock:
        wakeup = self._wakeups.get(role)
        if wakeup is None:
            wakeup = self._wakeups[role] = threading.Lock()
            wakeup.acquire()
        return wakeup


class TraceEvent(NamedTuple):
    """Something a role met: at `time_s` of its clock, message `number` to or from `peer` was `what`."""

    time_s: float
    role: str
    peer: str
    what: str
    number: int
    num_bytes: int


class _Arrival(NamedTuple):
    """A message that will be, or is, at the receiver's; no header: the goodbye."""

    at_s: float
    header: Header | None
    payload: torch.Tensor | None


_FLUSHED = Flushed()


@dataclass(slots=True)
class _Wire:
    """One direction of a link, from the role with the first clock to the one with the second."""

    source: _RoleClock
    destination: _RoleClock
    sent: int = 0
    free_s: float = 0.0  # when the last byte of the last message has left
    last_arrival_s: float = 0.0
    leaving: deque[tuple[float, int]] = field(default_factory=deque)  # when it has left, how many bytes
    leaving_bytes: int = 0
    arrivals: deque[_Arrival] = field(default_factory=deque)

    def pending_bytes(self, now_s: float) -> int:
        while self.leaving and self.leaving[0][0] <= now_s:
            self.leaving_bytes -= self.leaving.popleft()[1]
        return self.leaving_bytes


class SimulatedNetwork:
    """Roles, and a link between any two of them, all alike: latency, bandwidth, jitter and loss.

    `loss` is the probability that a message never arrives, `jitter_s` the most that is added to its latency (order is
    kept), `queue_bytes` what a send may leave waiting for the wire, `stall_s` the real seconds after which a role of
    `run` that neither waits nor ends is reported.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float = math.inf,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        stall_s: float = 60.0,
    ) -> None:
        for name, value in (("latency_s", latency_s), ("jitter_s", jitter_s)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name}={value} must be finite and at least 0")
        for name, value in (("bandwidth_bytes_per_s", bandwidth_bytes_per_s), ("stall_s", stall_s)):
            if not value > 0:
                raise UserError(f"{name}={value} must be above 0")
        if not 0 <= loss <= 1:
            raise UserError(f"loss={loss} must be a probability from 0 to 1")
        self.seed, self.latency_s, self.jitter_s, self.loss = seed, latency_s, jitter_s, loss
        self.bandwidth_bytes_per_s, self.queue_bytes = bandwidth_bytes_per_s, queue_bytes
        self.time = _VirtualTime(stall_s)
        self.run = self.time.run
        self._links: dict[tuple[str, str], SimulatedLink] = {}
        self._wires: dict[tuple[str, str], _Wire] = {}
        self._partitions: dict[frozenset[str], list[tuple[float, float]]] = {}
        self._events: dict[str, list[TraceEvent]] = {}

    def link(self, role: str, peer: str) -> SimulatedLink:
        if role == peer:
            raise UserError(f"link({role!r}, {peer!r}): a link joins two roles")
        with self.time.changed:
            for pair in ((role, peer), (peer, role)):
                if pair not in self._wires:
                    self._wires[pair] = _Wire(self.time.clock(pair[0]), self.time.clock(pair[1]))
            if (role, peer) not in self._links:
                self._links[role, peer] = SimulatedLink(self, role, peer)
            return self._links[role, peer]

    def clock_s(self, role: str) -> float:
        return self.time.clock(role).now_s

    def spend(self, role: str, seconds: float) -> None:
        """Let `role` compute for this long; called by the role itself."""
        if not 0 <= seconds < math.inf:
            raise UserError(f"seconds={seconds} must be finite and at least 0")
        with self.time.changed:
            clock = self.time.clock(role)
            clock.move(clock.now_s + seconds)

    def kill(self, role: str, at_s: float | None = None) -> None:
        """End `role` at this moment of its clock (default: now); its calls raise RoleKilled from then on."""
        self.time.kill(role, self.clock_s(role) if at_s is None else at_s)

    def partition(self, a: str, b: str, at_s: float | None = None) -> None:
        """Lose everything sent between two roles from this moment on (default: the later of their clocks)."""
        start_s = max(self.clock_s(a), self.clock_s(b)) if at_s is None else at_s
        with self.time.changed:
            self._partitions.setdefault(frozenset((a, b)), []).append((start_s, math.inf))
            self.time.wake_all()

    def heal(self, a: str, b: str, at_s: float | None = None) -> None:
        end_s = max(self.clock_s(a), self.clock_s(b)) if at_s is None else at_s
        with self.time.changed:
            spans = self._partitions.get(frozenset((a, b)), [])
            spans[:] = [(start, min(end, end_s)) for start, end in spans if start < end_s]
            self.time.wake_all()

    def trace(self) -> tuple[TraceEvent, ...]:
        """Everything the roles saw, by time, role and order: the same for the same seed and roles."""
        with self.time.changed:
            events = [event for role in sorted(self._events) for event in self._events[role]]
        return tuple(sorted(events, key=lambda event: (event.time_s, event.role)))

    def _transmit(self, wire: _Wire, header: Header, payload: torch.Tensor | None) -> bool:
        total, source = HEADER_BYTES + header.payload_bytes, wire.source
        left_s = max(source.now_s, wire.free_s) + total / self.bandwidth_bytes_per_s
        wire.free_s = left_s
        wire.leaving.append((left_s, total))
        wire.leaving_bytes += total
        lost = late = 0.0  # two numbers from 0 to 1 that belong to this message, where they are needed
        if self.loss or self.jitter_s:
            place = (self.seed, source.role, wire.destination.role, wire.sent)
            digest = hashlib.blake2b(repr(place).encode(), digest_size=16).digest()
            lost, late = int.from_bytes(digest[:8]) / 2**64, int.from_bytes(digest[8:]) / 2**64
        wire.sent += 1
        if lost < self.loss or self._reaches_s(wire, left_s) > left_s or left_s > source.dies_s:
            return False
        wire.last_arrival_s = max(left_s + self.latency_s + self.jitter_s * late, wire.last_arrival_s)
        wire.arrivals.append(_Arrival(wire.last_arrival_s, header, payload))
        self.time.wake(wire.destination.role)
        return True

    def _death_noticed_s(self, wire: _Wire) -> float:
        return self._reaches_s(wire, wire.source.dies_s) + self.latency_s

    def _reaches_s(self, wire: _Wire, at_s: float) -> float:
        """The first moment from `at_s` on without a partition between the two."""
        if not self._partitions:
            return at_s
        pair = frozenset((wire.source.role, wire.destination.role))
        for start_s, end_s in sorted(self._partitions.get(pair, [])):
            if start_s <= at_s < end_s:
                at_s = end_s
        return at_s


class SimulatedLink(Link):
    """One end of a simulated link; made by `SimulatedNetwork.link`."""

    def __init__(self, network: SimulatedNetwork, role: str, peer: str) -> None:
        self.role, self.peer, self.counters = role, peer, LinkCounters()
        self._network = network
        self._time = network.time
        self._clock = network.time.clock(role)
        self._out, self._in = network._wires[role, peer], network._wires[peer, role]
        self._events = network._events.setdefault(role, [])
        self._closed = False
        self._end: Closed | PeerDied | None = None

    def send(self, message: Message) -> SendOutcome:
        num_bytes = message.payload_bytes
        check_size(num_bytes, DEFAULT_MAX_PAYLOAD_BYTES, self.peer)
        with self._time.changed:
            now_s = self._now_s()
            ended = self._ended()
            if ended is not None:
                return ended
            pending, number = self._out.pending_bytes(now_s), self.counters.messages_sent
            if pending and pending + HEADER_BYTES + num_bytes > self._network.queue_bytes:
                self.counters.full_count += 1
                self._note("full", number, num_bytes)
                return Full(pending, self._network.queue_bytes)
            payload = message.payload
            if payload is not None:
                payload = payload.detach().clone() if payload.requires_grad else payload.clone()
            arrives = self._network._transmit(self._out, Header.of(message, number), payload)
            self.counters.messages_sent += 1
            self.counters.bytes_sent += num_bytes
            self._note("sent" if arrives else "lost", number, num_bytes)
            return Queued(self._out.pending_bytes(now_s))

    def receive(self, timeout_s: float, into: torch.Tensor | None = None) -> ReceiveOutcome:
        if not 0 <= timeout_s < math.inf:
            raise UserError(f"timeout_s={timeout_s} must be finite and at least 0")
        with self._time.changed:
            deadline_s = self._now_s() + timeout_s
            ended = self._ended()
            if ended is not None:
                return ended

            def until_s() -> float:
                return min(deadline_s, self._network._death_noticed_s(self._in))

            # until something arrives or this end is closed, or until nothing can any more
            arrives = bool(self._in.arrivals) or self._time.wait(
                self.role, until_s, lambda: self._closed or bool(self._in.arrivals)
            )
            ended = self._ended()
            if ended is not None:
                return ended
            if arrives and self._in.arrivals[0].at_s <= deadline_s:
                return self._take(self._in.arrivals[0], into)
            noticed_s = self._network._death_noticed_s(self._in)
            if not arrives and noticed_s <= deadline_s:
                self._clock.move(noticed_s)
                self._end = PeerDied(f"{self.peer} died at {self._in.source.dies_s:g} s of virtual time")
                self._note("died", self.counters.messages_received)
                return self._end
            self._clock.move(deadline_s)
            self._note("timed out", self.counters.messages_received)
            return TimedOut(timeout_s)

    def flush(self, timeout_s: float) -> FlushOutcome:
        with self._time.changed:
            now_s = self._now_s()
            if self._out.pending_bytes(now_s) == 0:
                return _FLUSHED
            ended = self._ended()
            if ended is not None:
                return ended
            self._clock.move(min(self._out.free_s, now_s + timeout_s))
            return Flushed() if self._out.free_s <= now_s + timeout_s else TimedOut(timeout_s)

    def close(self) -> None:
        with self._time.changed:
            if not self._closed:
                self._closed = True
                self._time.wake(self.role)
                network, wire = self._network, self._out
                at_s = network._reaches_s(wire, max(self._clock.now_s, wire.free_s)) + network.latency_s
                if self._clock.now_s < self._clock.dies_s and at_s < math.inf:
                    wire.arrivals.append(_Arrival(max(at_s, wire.last_arrival_s), None, None))
                    self._time.wake(self.peer)

    def _take(self, arrival: _Arrival, into: torch.Tensor | None) -> ReceiveOutcome:
        self._clock.move(arrival.at_s)
        if arrival.header is None:
            self._in.arrivals.popleft()
            self._end = Closed()
            self._note("closed", self.counters.messages_received)
            return self._end
        header = arrival.header
        received = hand_out(header, arrival.payload, into, self.peer)
        self._in.arrivals.popleft()
        self.counters.messages_received += 1
        self.counters.bytes_received += header.payload_bytes
        self._note("received", header.sequence, header.payload_bytes)
        return received

    def _ended(self) -> Closed | PeerDied | None:
        return Closed() if self._closed else self._end

    def _now_s(self) -> float:
        """This role's clock; RoleKilled if it is dead."""
        clock = self._clock
        if clock.now_s >= clock.dies_s:
            clock.move(clock.now_s)  # which raises
        return clock.now_s

    def _note(self, what: str, number: int, num_bytes: int = 0) -> None:
        self._events.append(TraceEvent(self._clock.now_s, self.role, self.peer, what, number, num_bytes))
