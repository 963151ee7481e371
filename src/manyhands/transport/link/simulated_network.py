"""A network in one process, in virtual time, the same at every run: for tests, ours and yours.

Each role has a clock of its own (Lamport, 1978). A message leaves when the wire is free of the ones before
it, is on the wire for bytes ÷ bandwidth and arrives a latency (and a jitter) later; receiving it moves the
receiver's clock to that moment, and nothing ever sleeps. Losses and jitter are drawn from (seed, source,
destination, number of the message): they depend on what the roles do and never on how the threads that run
them are scheduled.

`run` gives each role a thread; a receive then waits until its message is there, or until it is certain that
none comes in time (see `virtual`). Without `run`, the caller is alone and drives all ends by itself.

The model: each direction of a link has a wire, and a buffer without bound at the receiver, so only the wire
makes a send Full. An end learns by receiving that its peer closed or died, one latency after that; a
partition loses what is sent meanwhile and tells nobody.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from manyhands.errors import UserError
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
from manyhands.transport.link.virtual import RoleClock, VirtualTime

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class TraceEvent:
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
_Seen = tuple[float, str, str, int, int]
"""A TraceEvent without its role."""


@dataclass(slots=True)
class _Wire:
    """One direction of a link, from the role with the first clock to the one with the second."""

    source: RoleClock
    destination: RoleClock
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

    `loss` is the probability that a message never arrives, `jitter_s` the most that is added to its latency
    (order is kept), `queue_bytes` what a send may leave waiting for the wire, `stall_s` the real seconds
    after which a role of `run` that neither waits nor ends is reported.
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
                raise UserError(f"{name}={value}: must be finite and not negative")
        for name, value in (("bandwidth_bytes_per_s", bandwidth_bytes_per_s), ("stall_s", stall_s)):
            if not value > 0:
                raise UserError(f"{name}={value}: must be positive")
        if not 0 <= loss <= 1:
            raise UserError(f"loss={loss}: is a probability, from 0 to 1")
        self.seed = seed
        self.latency_s = latency_s
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.jitter_s = jitter_s
        self.loss = loss
        self.queue_bytes = queue_bytes
        self.time = VirtualTime(stall_s)
        self._links: dict[tuple[str, str], SimulatedLink] = {}
        self._wires: dict[tuple[str, str], _Wire] = {}
        self._partitions: dict[frozenset[str], list[tuple[float, float]]] = {}
        self._events: dict[str, list[_Seen]] = {}

    def link(self, role: str, peer: str) -> SimulatedLink:
        """The end that `role` has of its one link with `peer`."""
        if role == peer:
            raise UserError(f"link({role!r}, {peer!r}): a link joins two roles")
        with self.time.changed:
            for pair in ((role, peer), (peer, role)):
                if pair not in self._wires:
                    self._wires[pair] = _Wire(self.time.clock(pair[0]), self.time.clock(pair[1]))
            if (role, peer) not in self._links:
                self._links[role, peer] = SimulatedLink(self, role, peer)
            return self._links[role, peer]

    def run(self, roles: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run each function in a thread as that role; return what those that lived to the end returned.

        A role that raises dies at that moment for its peers; of several errors, the earliest is raised.
        """
        return self.time.run(roles)

    def clock_s(self, role: str) -> float:
        return self.time.clock(role).now_s

    def spend(self, role: str, seconds: float) -> None:
        """Let `role` compute for this long; called by the role itself."""
        if not 0 <= seconds < math.inf:
            raise UserError(f"seconds={seconds}: must be finite and not negative")
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
        """End a partition at this moment (default: the later of the two clocks)."""
        end_s = max(self.clock_s(a), self.clock_s(b)) if at_s is None else at_s
        with self.time.changed:
            spans = self._partitions.get(frozenset((a, b)), [])
            spans[:] = [(start, min(end, end_s)) for start, end in spans if start < end_s]
            self.time.wake_all()

    def trace(self) -> tuple[TraceEvent, ...]:
        """Everything the roles saw, by time, role and order: the same for the same seed and roles."""
        with self.time.changed:
            ordered = sorted(
                (seen[0], role, index, seen)
                for role, events in self._events.items()
                for index, seen in enumerate(events)
            )
        return tuple(TraceEvent(time_s, role, *seen[1:]) for time_s, role, _, seen in ordered)

    def _transmit(self, wire: _Wire, header: Header, payload: torch.Tensor | None) -> bool:
        total, source = HEADER_BYTES + header.payload_bytes, wire.source
        left_s = max(source.now_s, wire.free_s) + total / self.bandwidth_bytes_per_s
        wire.free_s = left_s
        wire.leaving.append((left_s, total))
        wire.leaving_bytes += total
        lost = late = 0.0
        if self.loss or self.jitter_s:  # two numbers from 0 to 1 that belong to this message
            place = (self.seed, wire.source.role, wire.destination.role, wire.sent)
            digest = hashlib.blake2b(repr(place).encode(), digest_size=16).digest()
            lost, late = (int.from_bytes(half) / 2**64 for half in (digest[:8], digest[8:]))
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
        self.role = role
        self.peer = peer
        self.counters = LinkCounters()
        self._network = network
        self._time = network.time
        self._clock = network.time.clock(role)
        self._out, self._in = network._wires[role, peer], network._wires[peer, role]
        self._seen = network._events.setdefault(role, [])
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
            raise UserError(f"timeout_s={timeout_s}: must be finite and not negative")
        with self._time.changed:
            deadline_s = self._now_s() + timeout_s
            ended = self._ended()
            if ended is not None:
                return ended

            def until_s() -> float:
                """When nothing can arrive any more."""
                return min(deadline_s, self._network._death_noticed_s(self._in))

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
                wire, network = self._out, self._network
                at_s = network._reaches_s(wire, max(wire.source.now_s, wire.free_s)) + network.latency_s
                if self._clock.now_s < self._clock.dies_s and at_s < math.inf:
                    wire.arrivals.append(_Arrival(max(at_s, wire.last_arrival_s), None, None))
                    self._time.wake(wire.destination.role)

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
        self._seen.append((self._clock.now_s, self.peer, what, number, num_bytes))
