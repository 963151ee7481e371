"""Processes of a simulated run, and the world around them: each takes one item at a time from its inbox, and executes
its core's actions.

A paused process takes nothing and loses nothing; a killed one is gone with its state. `take` returns how long the
process was busy with an item; what it sends meanwhile leaves when that work is done.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from manyhands.errors import ManyhandsError
from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.models import Gradient, Store
from manyhands.foresight.simulate.simulated_run import Observer, SimulatedHappening, WorkerTimes
from manyhands.foresight.simulate.simulated_spec import NetworkModel, SimulationSpec
from manyhands.strategies.ps.actions import Ack, Action, Apply, Discard, Drop, Keep, Load, Log, SendMessage
from manyhands.strategies.ps.host_group import (
    GroupMessage,
)
from manyhands.strategies.ps.log_rows import Row
from manyhands.strategies.ps.member_events import Left, PsEvent
from manyhands.strategies.ps.ps_membership import PsMembership
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    Concluded,
    Forward,
    HostPush,
    Install,
    Installed,
    Message,
    Parameters,
    Push,
    ShardView,
    View,
    Work,
)
from manyhands.strategies.ps.shard_replica import ServerCore

__all__ = [
    *("Agenda", "Assignment", "ComputeDone", "Copy", "FlushDone", "Item", "Network", "Process", "Restore"),
    *("Retry", "ServerProcess", "ShardsToLeave", "SimulatedMessage", "SimulatedWorld"),
]

_CARRIERS = (Push, HostPush, Parameters, Forward, Install)  # messages with a gradient, or a payload as large


class SimulatedMessage(NamedTuple):
    """A message in transit with its payload; a tuple, because one is made per message and a tuple is faster."""

    source: int
    message: Message | GroupMessage
    payload: Any = None
    sent_s: float = 0.0


class Copy(NamedTuple):
    """One complete shard: the payload of an Install and the content of a snapshot."""

    store: Any
    held: dict[tuple[int, int], Gradient]
    rows: list[Row]
    core: str  # the core's own state, as JSON text


class Restore(NamedTuple):
    """The launcher tells a server to continue from this snapshot."""

    shard: int
    copy: Copy


class ShardsToLeave(NamedTuple):
    """The launcher tells a server that training is over: leave those of these shards that it serves."""

    shards: tuple[int, ...]


class Assignment(NamedTuple):
    """The launcher assigns a worker its identity and slot."""

    member: int
    slot: int


class ComputeDone(NamedTuple):
    """A worker's computation has ended; ignored if the worker was reassigned since."""

    member: int
    work: Work


class FlushDone(NamedTuple):
    """What a worker sent before its Flush of this number has arrived, and can no longer be lost with it."""

    member: int
    number: int


class Retry(NamedTuple):
    """A delay has passed: ask this shard again."""

    member: int
    shard: int


Item = SimulatedMessage | Restore | ShardsToLeave | Assignment | ComputeDone | FlushDone | Retry


class Network:
    """The state of all links at a moment of virtual time."""

    def __init__(self, model: NetworkModel, seed: int) -> None:
        self._model = model
        self._draw = random.Random(f"network {seed}")
        self._leaves_s: dict[int, float] = {}
        self._enters_s: dict[int, float] = {}
        self._last_s: dict[tuple[int, int], float] = {}
        self._slow: dict[int, tuple[float, float]] = {}

    def slow_down(self, member: int, until_s: float, factor: float) -> None:
        """Multiply the duration of everything to and from `member` by `factor`."""
        self._slow[member] = (until_s, factor)

    def arrival_s(self, source: int, to: int, num_bytes: int, now_s: float) -> float:
        model = self._model
        travel_s = model.latency_s
        if model.jitter_s:
            travel_s += model.jitter_s * self._draw.random()
        if self._slow:
            travel_s *= max(self._slowness(source, now_s), self._slowness(to, now_s))
        at_s = now_s + travel_s
        if num_bytes and model.bandwidth_bytes_per_s < math.inf:
            wire_s = num_bytes / model.bandwidth_bytes_per_s
            self._leaves_s[source] = left_s = max(now_s, self._leaves_s.get(source, 0.0)) + wire_s
            at_s = max(left_s + travel_s, self._enters_s.get(to, 0.0) + wire_s)
            self._enters_s[to] = at_s
        pair = (source, to)
        last_s = self._last_s.get(pair, 0.0)
        self._last_s[pair] = at_s = at_s if at_s > last_s else last_s
        return at_s

    def _slowness(self, member: int, now_s: float) -> float:
        until_s, factor = self._slow.get(member, (0.0, 1.0))
        return factor if now_s < until_s else 1.0


class Agenda:
    """A virtual clock with scheduled calls; nothing sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_done = 0
        self._planned: list[tuple[float, int, Callable[..., None], tuple[Any, ...], bool]] = []
        self._number = 0
        self._num_in_earnest = 0

    def at(self, at_s: float, what: Callable[..., None], *arguments: Any, idly: bool = False) -> None:
        """Schedule `what(*arguments)`; an `idly` scheduled call runs only while other calls are scheduled."""
        self._number += 1
        self._num_in_earnest += not idly
        at_s = at_s if at_s > self.now_s else self.now_s
        heapq.heappush(self._planned, (at_s, self._number, what, arguments, idly))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any, idly: bool = False) -> None:
        self.at(self.now_s + seconds, what, *arguments, idly=idly)

    def next(self) -> bool:
        """Advance to the next scheduled call and run it; False if there is none."""
        if not self._num_in_earnest:
            return False
        self.now_s, _, what, arguments, idly = heapq.heappop(self._planned)
        self._num_in_earnest -= not idly
        self.num_done += 1
        what(*arguments)
        return True


class SimulatedWorld:
    """What the processes of a run share: time, the network, snapshots, and who is there."""

    def __init__(
        self,
        spec: SimulationSpec,
        observer: Observer,
        membership: PsMembership,
        report: Callable[[PsEvent], None],
    ) -> None:
        self.spec, self.observer = spec, observer
        self.report = report  # to the launcher, which has it at once
        self.agenda = Agenda()
        self.network = Network(spec.network, spec.seed)
        self.draw = random.Random(f"simulation {spec.seed}")
        self.processes: dict[int, Process] = {}  # by the number that the launcher knows
        self.serving: dict[int, ServerProcess] = {}  # by shard
        self.snapshots: dict[int, Copy] = {}  # by shard
        self.died_s: dict[int, float] = {}
        self.waiting_since_s: dict[int, float] = {}
        self.times: dict[int, WorkerTimes] = defaultdict(WorkerTimes)
        self.happenings: list[SimulatedHappening] = []
        self.gradients: dict[int, list[Gradient]] = {}  # by member, in memory that its host shares
        self.values: dict[int, list[Any]] = {}  # the same
        self._membership = membership
        self._cuts_s: dict[tuple[int, int], float] = {}
        self._payload_bytes = spec.gradient_bytes // spec.shards

    def post(
        self, source: int, to: int, message: Message | GroupMessage, payload: Any = None, after_s: float = 0
    ) -> float:
        """Send a message between members, this many seconds from now; return in how many seconds it arrives."""
        now_s = self.agenda.now_s
        self.observer.sends(source, to, message, now_s)
        at_s = self.network.arrival_s(source, to, self._bytes_beside(message), now_s + after_s)
        if to != LAUNCHER:
            self.agenda.at(at_s, self._arrive, to, SimulatedMessage(source, message, payload, now_s))
        elif isinstance(message, Installed | Concluded):
            self.agenda.at(at_s, self.report, message)
        return at_s - now_s

    def post_report(self, member: int, event: PsEvent) -> None:
        self.agenda.at(self.network.arrival_s(member, LAUNCHER, 0, self.agenda.now_s), self.report, event)

    def instruct(self, member: int, item: Item) -> None:
        """Send what the launcher has to say to a member."""
        at_s = self.network.arrival_s(LAUNCHER, member, 0, self.agenda.now_s)
        self.agenda.at(at_s, self._arrive, member, item)

    def note(self, what: str, member: int) -> None:
        slots = (place.slot for place in self._membership.view.slots if place.member == member)
        happening = SimulatedHappening(self.agenda.now_s, what, member, next(slots, -1))
        self.happenings.append(happening)
        self.observer.happens(happening)

    def _arrive(self, to: int, item: Item) -> None:
        process = self.processes.get(to)
        if process is None:
            return
        if isinstance(item, SimulatedMessage):
            died_s, pair = self.died_s.get(item.source), (item.source, to)
            if died_s is not None:
                # Any tail of what a dying process has sent may be lost with it.
                if pair not in self._cuts_s:
                    model = self.spec.network
                    self._cuts_s[pair] = died_s - 2 * (model.latency_s + model.jitter_s) * self.draw.random()
                if item.sent_s > self._cuts_s[pair]:
                    return
            num_bytes = self._bytes_beside(item.message)
            self.observer.arrives(item.source, to, item.message, num_bytes, self.agenda.now_s)
        process.put(item)

    def _bytes_beside(self, message: Message | GroupMessage) -> int:
        bare = isinstance(message, Parameters) and message.bare
        return self._payload_bytes if isinstance(message, _CARRIERS) and not bare else 0


class Process(ABC):
    """The common part of servers and workers."""

    def __init__(self, member: int, role: FaultRole, world: SimulatedWorld) -> None:
        self.member, self.role = member, role
        self.known_as = member  # to the launcher; a worker that gets another number learns of it later
        self.joined, self.alive, self.paused = False, True, False
        self.inbox: deque[Item] = deque()
        self._busy = False  # it is busy, or a look at its inbox is scheduled
        self._world, self._spec = world, world.spec

    @abstractmethod
    def take(self, item: Item) -> float:
        """Process one item; return how many seconds that takes."""

    def put(self, item: Item) -> None:
        if self.alive:
            self.inbox.append(item)
            self.look()

    def look(self, *, done: bool = False) -> None:
        """Empty the inbox, as far as that takes no time; `done` with what took some."""
        self._busy = self._busy and not done
        while self.inbox and self.alive and not self.paused and not self._busy:
            seconds = self.take(self.inbox.popleft())
            if seconds:
                self._busy = True
                self._world.agenda.after(seconds, partial(self.look, done=True))


class ServerProcess(Process):
    """A server: its core, and a store and the held gradients of every shard that it is a replica of."""

    def __init__(self, core: ServerCore, world: SimulatedWorld) -> None:
        super().__init__(core.member, FaultRole.SERVER, world)
        self.core = core
        self.stores: dict[int, Store] = {}
        self.held: dict[int, dict[tuple[int, int], Gradient]] = {}
        self.rows: dict[int, list[Row]] = {}  # including those that came with a copy
        self.written: dict[int, list[Row]] = {}  # by this server alone
        self._serving: set[int] = set()
        for shard in range(self._spec.shards):
            self.written[shard] = []
            self._empty(shard)

    def take(self, item: Item) -> float:
        match item:
            case SimulatedMessage(source=source, message=message, payload=payload):
                if isinstance(message, GroupMessage):
                    raise ManyhandsError(
                        f"server {self.member} received what workers tell each other: {message}"
                    )
                seconds = self._do(self.core.handle(message, source), payload)
                for place in message.shards if isinstance(message, View) else ():
                    self._see(place)
                return seconds
            case Restore(shard=shard, copy=copy):
                self._load(shard, copy)
                self.core.restore(shard, json.loads(copy.core))
                return 0.0
            case ShardsToLeave(shards=shards):
                seconds, own = self._spec.timing.leave_s, tuple(sorted(self._serving.intersection(shards)))
                self._world.agenda.after(seconds, self._leave, own)
                return seconds
            case _:
                raise ManyhandsError(
                    f"server {self.member} received {type(item).__name__}, a worker's message"
                )

    def _do(self, actions: list[Action], payload: Any) -> float:
        seconds = 0.0
        for action in actions:
            match action:
                case SendMessage(to=to, message=message):
                    self._world.post(self.member, to, message, self._payload(message, payload), seconds)
                case Keep(shard=shard, slot=slot, clock=clock, carried=carried):
                    self.held[shard][slot, clock] = [] if carried else payload
                case Apply(row=row):
                    held = self.held[row.shard]
                    summed = [(one.factor, held.pop((one.slot, one.clock))) for one in row.updates]
                    gradients = [(factor, gradient) for factor, terms in summed for gradient in terms]
                    self.stores[row.shard].apply(gradients, row.rate)
                    self._log(row)
                    took_s = self._spec.timing.apply_s
                    if self._world.serving.get(row.shard) is self:  # a backup repeats every step
                        begin_s = self._world.agenda.now_s + seconds
                        self._world.observer.steps(self.member, row, begin_s, took_s)
                    seconds += took_s
                case Ack():
                    self._world.observer.acknowledges(action)
                case Log(row=row):
                    self._log(row)
                case Drop(shard=shard, slot=slot, clock=clock):
                    del self.held[shard][slot, clock]
                case Load(shard=shard):
                    self._load(shard, payload)
                case Discard(shard=shard):
                    self._empty(shard)
        return seconds

    def _log(self, row: Row) -> None:
        self.rows[row.shard].append(row)
        self.written[row.shard].append(row)

    def _see(self, place: ShardView) -> None:
        """A view has come: report a shard of which this server has become the primary."""
        shard = place.shard
        if place.primary != self.member:
            self._serving.discard(shard)
        elif shard not in self._serving:
            self._serving.add(shard)
            self._world.serving[shard] = self
            store, held, now_s = self.stores[shard], self.held[shard], self._world.agenda.now_s
            self._world.observer.serves(shard, self.member, store, held, now_s)

    def _leave(self, shards: tuple[int, ...]) -> None:
        if self.alive:
            if self._world.snapshots:
                self._world.snapshots |= {shard: self.copy(shard) for shard in shards}
            self._world.post_report(self.member, Left(member=self.member, shards=shards))

    def first_copies(self) -> dict[int, Copy]:
        """Return the initial copies of all shards, which this server is made the primary of."""
        shards = range(self._spec.shards)
        places = tuple(ShardView(shard=shard, epoch=0, primary=self.member) for shard in shards)
        for action in self.core.view(View(epoch=0, shards=places, slots=())):
            if isinstance(action, Log):
                self.rows[action.row.shard].append(action.row)
        return {shard: self.copy(shard) for shard in shards}

    def copy(self, shard: int) -> Copy:
        replica = self.core.replicas[shard]
        waiting = replica.core.steps.waiting
        held = {name: gradient for name, gradient in self.held[shard].items() if name in waiting}
        return Copy(self.stores[shard].state(), held, list(self.rows[shard]), json.dumps(replica.state()))

    def _payload(self, message: Message, payload: Any) -> Any:
        match message:
            case Parameters(shard=shard, bare=False):
                return self.stores[shard].read()
            case Forward(entry=Push(shard=shard, slot=slot, clock=clock)):
                return self.held[shard].get((slot, clock), payload)
            case Forward(entry=HostPush(shard=shard, parts=parts)):
                return self.held[shard].get((parts[0].slot, parts[0].clock), payload)
            case Install(shard=shard):
                return self.copy(shard)
        return None

    def _empty(self, shard: int) -> None:
        self.stores[shard] = self._spec.model.store(shard, self._spec.shards)
        self.held[shard], self.rows[shard] = {}, []

    def _load(self, shard: int, copy: Copy) -> None:
        self.stores[shard].load(copy.store)
        self.held[shard], self.rows[shard] = dict(copy.held), list(copy.rows)
