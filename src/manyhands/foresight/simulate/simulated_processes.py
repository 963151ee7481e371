"""Processes of a simulated run: each takes one item at a time from its inbox, and executes its core's actions.

A paused process takes nothing and loses nothing; a killed one is gone with its state. `take` returns how long the
process was busy with an item; what it sends meanwhile leaves when that work is done.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from manyhands.errors import ManyhandsError
from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.models import Gradient, Store
from manyhands.foresight.simulate.simulated_spec import SimulationSpec
from manyhands.strategies.ps.actions import Ack, Action, Apply, Discard, Drop, Keep, Load, Log, SendMessage
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute, Flush, Leave, Wait
from manyhands.strategies.ps.log_rows import Row, StepRow
from manyhands.strategies.ps.ps_messages import (
    Forward,
    Install,
    Message,
    Parameters,
    Push,
    View,
    Work,
)
from manyhands.strategies.ps.server_core import ServerCore

__all__ = [
    "Assignment",
    "ComputeDone",
    "Copy",
    "FlushDone",
    "Process",
    "Restore",
    "Retry",
    "ServerProcess",
    "ShardsToLeave",
    "SimulatedMessage",
    "WorkerProcess",
]


class SimulatedMessage(NamedTuple):
    """A message in transit with its payload; a tuple, because one is made per message and a tuple is faster."""

    source: int
    message: Message
    payload: Any = None
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Copy:
    """One complete shard: the payload of an Install and the content of a snapshot."""

    store: Any
    held: dict[tuple[int, int], Gradient]
    rows: list[Row]
    core: str
    """The core's own state, as JSON text."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The launcher tells a server to continue from this snapshot."""

    shard: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class ShardsToLeave:
    """The launcher tells a server that training is over: leave those of these shards that it serves."""

    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The launcher assigns a worker its identity and slot."""

    member: int
    slot: int


@dataclass(frozen=True, slots=True)
class ComputeDone:
    """A worker's computation has ended; ignored if the worker was reassigned since."""

    member: int
    work: Work


@dataclass(frozen=True, slots=True)
class FlushDone:
    """What a worker sent has arrived, and can no longer be lost with it."""

    member: int


@dataclass(frozen=True, slots=True)
class Retry:
    """A delay has passed: ask this shard again."""

    member: int
    shard: int


Item = SimulatedMessage | Restore | ShardsToLeave | Assignment | ComputeDone | FlushDone | Retry


class SimulatedContext(Protocol):
    """The actions of a process on its environment."""

    def post(self, source: int, to: int, message: Message, payload: Any, after_s: float) -> float:
        """Send a message between members, this many seconds from now; return in how many seconds it arrives."""

    def later(self, process: Process, item: Item, after_s: float) -> None:
        """Put an item into the process's inbox, this many seconds from now."""

    def computes(self, worker: WorkerProcess, work: Work, read: list[Any]) -> float:
        """A worker begins to compute from what it has read; return how many seconds that takes."""

    def computed(self, worker: WorkerProcess, work: Work) -> None:
        """The worker has finished computing, and requests more."""

    def acknowledges(self, ack: Ack) -> None:
        """A server has made a push durable."""

    def steps(self, server: ServerProcess, row: StepRow, after_s: float) -> None:
        """A server has taken an optimizer step, this many seconds from now."""

    def left(self, worker: WorkerProcess, leave: Leave) -> None:
        """The worker has left its slot."""

    def serves(self, server: ServerProcess, shard: int) -> None:
        """A server has learned that it serves a shard from now on."""

    def leaves(self, server: ServerProcess, shards: tuple[int, ...], after_s: float) -> None:
        """The server leaves the final copies of its shards, which takes this many seconds."""


class Process(ABC):
    """The common part of servers and workers."""

    def __init__(self, member: int, role: FaultRole) -> None:
        self.member = member
        self.known_as = (
            member  # to the launcher; a worker that is given another number learns of it a little later
        )
        self.role = role
        self.joined = False
        self.alive = True
        self.paused = False
        self.busy = False  # it is busy, or a look at its inbox is scheduled
        self.inbox: deque[Item] = deque()

    @abstractmethod
    def take(self, item: Item) -> float:
        """Process one item; return how many seconds that takes."""


class ServerProcess(Process):
    """A server: its core, and a store and the held gradients of every shard that it is a replica of."""

    def __init__(self, core: ServerCore, spec: SimulationSpec, world: SimulatedContext) -> None:
        super().__init__(core.member, FaultRole.SERVER)
        self.core = core
        self.stores: dict[int, Store] = {}
        self.held: dict[int, dict[tuple[int, int], Gradient]] = {}
        self.rows: dict[int, list[Row]] = {}  # including those that came with a copy
        self.written: dict[int, list[Row]] = {
            shard: [] for shard in range(spec.shards)
        }  # by this server alone
        self._spec, self._world = spec, world
        self._serving: set[int] = set()
        for shard in range(spec.shards):
            self._empty(shard)

    def take(self, item: Item) -> float:
        """Let the core decide, then execute its actions in order."""
        match item:
            case SimulatedMessage(source=source, message=message, payload=payload):
                seconds = self._do(self.core.handle(message, source), payload)
                if isinstance(message, View):
                    self._look_around(message)
                return seconds
            case Restore(shard=shard, copy=copy):
                self._load(shard, copy)
                self.core.restore(shard, json.loads(copy.core))
                return 0.0
            case ShardsToLeave(shards=shards):
                seconds = self._spec.timing.leave_s
                self._world.leaves(self, tuple(sorted(self._serving.intersection(shards))), seconds)
                return seconds
            case _:
                raise ManyhandsError(f"server {self.member} got {type(item).__name__}, which is for workers")

    def _do(self, actions: list[Action], payload: Any) -> float:
        seconds = 0.0
        for action in actions:
            match action:
                case SendMessage(to=to, message=message):
                    self._world.post(self.member, to, message, self._payload(message, payload), seconds)
                case Keep(shard=shard, slot=slot, clock=clock):
                    self.held[shard][slot, clock] = payload
                case Apply(row=row):
                    held = self.held[row.shard]
                    gradients = [(one.factor, held.pop((one.slot, one.clock))) for one in row.updates]
                    self.stores[row.shard].apply(gradients, row.rate)
                    seconds += self._spec.timing.apply_s
                    self._log(row)
                    self._world.steps(self, row, seconds)
                case Ack():
                    self._world.acknowledges(action)
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

    def _look_around(self, view: View) -> None:
        """Report the shards of which this server has become the primary."""
        for place in view.shards:
            if place.primary != self.member:
                self._serving.discard(place.shard)
            elif place.shard not in self._serving:
                self._serving.add(place.shard)
                self._world.serves(self, place.shard)

    def first_copies(self, view: View) -> dict[int, Copy]:
        """Return the initial copy of every shard of which this view makes this server the first primary."""
        for action in self.core.view(view):
            if isinstance(action, Log):
                self.rows[action.row.shard].append(action.row)
        return {place.shard: self.copy(place.shard) for place in view.shards}

    def copy(self, shard: int) -> Copy:
        """Return the current state of the shard."""
        replica = self.core.replicas[shard]
        waiting = replica.core.steps.waiting
        held = {name: gradient for name, gradient in self.held[shard].items() if name in waiting}
        return Copy(self.stores[shard].state(), held, list(self.rows[shard]), json.dumps(replica.state()))

    def _payload(self, message: Message, payload: Any) -> Any:
        match message:
            case Parameters(shard=shard):
                return self.stores[shard].read()
            case Forward(entry=Push(shard=shard, slot=slot, clock=clock)):
                return self.held[shard].get((slot, clock), payload)
            case Install(shard=shard):
                return self.copy(shard)
        return None

    def _empty(self, shard: int) -> None:
        self.stores[shard] = self._spec.model.store(shard, self._spec.shards)
        self.held[shard], self.rows[shard] = {}, []

    def _load(self, shard: int, copy: Copy) -> None:
        self.stores[shard].load(copy.store)
        self.held[shard], self.rows[shard] = dict(copy.held), list(copy.rows)


class WorkerProcess(Process):
    """A worker; it has no core while it has no slot."""

    def __init__(self, member: int, spec: SimulationSpec, world: SimulatedContext) -> None:
        super().__init__(member, FaultRole.WORKER)
        self.core: ClientCore | None = None
        self.slot = -1
        self.waited_for = -1
        """Whose update the shard that answered last had waited for."""
        self._spec, self._world = spec, world
        self._values: list[Any] = [None] * spec.shards
        self._gradients: list[Gradient] = [None] * spec.shards

    def take(self, item: Item) -> float:
        """Let the core decide, then execute its actions in order."""
        if isinstance(item, Assignment):
            self.member, self.slot = item.member, item.slot
            self.core = ClientCore(
                slot=item.slot,
                member=item.member,
                num_shards=self._spec.shards,
                confirms=self._spec.policy.lockstep and self._spec.shards > 1,
            )
            return 0.0
        core = self.core
        if core is None:
            return 0.0  # it is a spare
        match item:
            case SimulatedMessage(message=View() as view):
                self._do(core.view(view))
            case SimulatedMessage(source=source, message=message, payload=payload):
                if isinstance(message, Parameters) and core.awaits(message, source):
                    self._values[message.shard] = payload
                    self.waited_for = message.waited_for
                self._do(core.handle(message, source))
            case ComputeDone(member=member, work=work) if member == self.member:
                self._gradients, weight = self._spec.model.gradient(self.slot, work, self._values)
                self._world.computed(self, work)
                self._do(core.computed(weight=weight))
            case FlushDone(member=member) if member == self.member:
                self._do(core.flushed())
            case Retry(member=member, shard=shard) if member == self.member:
                self._do(core.again(shard))
        return 0.0

    def _do(self, actions: list[ClientAction]) -> None:
        arrives_s = 0.0
        for action in actions:
            match action:
                case SendMessage(to=to, message=message):
                    payload = self._gradients[message.shard] if isinstance(message, Push) else None
                    taken_s = self._world.post(self.member, to, message, payload, 0.0)
                    arrives_s = max(arrives_s, taken_s)
                case Flush():
                    # The kernel has what was sent at once; here a network has it, from which the dead may take it.
                    self._world.later(self, FlushDone(self.member), arrives_s if self._spec.faults else 0.0)
                case Compute(work=work):
                    seconds = self._world.computes(self, work, list(self._values))
                    self._world.later(self, ComputeDone(self.member, work), seconds)
                case Wait(shard=shard):
                    self._world.later(self, Retry(self.member, shard), self._spec.timing.retry_s)
                case Leave():
                    self.core = None
                    self._world.left(self, action)
