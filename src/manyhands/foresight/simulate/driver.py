"""Drives the parameter server's cores in virtual time, deterministically for a given seed.

The launcher's membership, the servers' cores and the workers' cores are those of a live run. Simulated are the
durations of computing, optimizer steps, messages and process starts, and the faults.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from manyhands.errors import ManyhandsError, UserError
from manyhands.foresight.simulate.faults import (
    Fault,
    FaultRole,
    Kill,
    Pause,
    SlowLink,
    WorkerComes,
    WorkerGoes,
)
from manyhands.foresight.simulate.models import Store
from manyhands.foresight.simulate.network import Agenda, Network
from manyhands.foresight.simulate.simulated_processes import (
    Assignment,
    Copy,
    Item,
    Process,
    Restore,
    ServerProcess,
    ShardsToLeave,
    SimulatedMessage,
    WorkerProcess,
)
from manyhands.foresight.simulate.simulated_run import Observer, SimulatedHappening, SimulatedRun, WorkerTimes
from manyhands.foresight.simulate.simulated_spec import SimulationSpec
from manyhands.places.run_commands import AddWorker, RemoveWorker
from manyhands.strategies.common.membership import (
    Died,
    Fail,
    KillMember,
    MemberJoined,
    MemberSilent,
    StartWorker,
)
from manyhands.strategies.ps.actions import Ack
from manyhands.strategies.ps.client_core import Leave, Reason
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.member_events import (
    Assign,
    Left,
    Over,
    Progressed,
    PsAction,
    PsEvent,
    Publish,
    Recovered,
    Rejoin,
    ShardLost,
    SlotFinished,
    StartServer,
)
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_membership import MembershipPlan, PsMembership
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    Concluded,
    Forward,
    Install,
    Installed,
    Message,
    Parameters,
    Push,
    ShardView,
    View,
    Work,
)
from manyhands.strategies.ps.server_core import ServerCore

__all__ = ["new_server", "simulate"]

_CARRIERS = (Push, Parameters, Forward, Install)  # messages with a gradient, or a payload as large


def new_server(member: int, spec: SimulationSpec) -> ServerCore:
    """Return the core of a server process, as in a live run."""
    slots = tuple(range(spec.workers))
    config = ShardConfig(shard=0, num_shards=spec.shards, policy=spec.policy, steps=spec.steps, slots=slots)
    return ServerCore(config, member)


def simulate(
    spec: SimulationSpec,
    *,
    make_server: Callable[[int, SimulationSpec], ServerCore] = new_server,
    observer: Observer | None = None,
) -> SimulatedRun:
    """Run `spec` to its end.

    Raises ManyhandsError for a run that fails, that exceeds `spec.timing.limit_s`, or that has no events left before
    it has ended. `make_server` makes the core of a server process; tests pass broken ones.
    """
    return _Simulation(spec, make_server, observer or Observer()).run()


class _Simulation:
    """One run; also the `SimulatedContext` of its processes."""

    def __init__(
        self,
        spec: SimulationSpec,
        make_server: Callable[[int, SimulationSpec], ServerCore],
        observer: Observer,
    ) -> None:
        self._spec, self._make_server, self._observer = spec, make_server, observer
        self._agenda = Agenda()
        self._network = Network(spec.network, spec.seed)
        self._draw = random.Random(f"simulation {spec.seed}")
        plan = MembershipPlan(
            num_shards=spec.shards,
            num_workers=spec.workers,
            replicas=spec.replicas,
            can_restore=spec.can_restore,
        )
        self._membership = PsMembership(plan)
        self._view: View | None = None
        self._processes: dict[int, Process] = {}
        self._servers: list[ServerProcess] = []  # including dead ones, whose logs are kept
        self._serving: dict[int, ServerProcess] = {}
        self._snapshots: dict[int, Copy] = {}
        self._waiting_since_s: dict[int, float] = {}
        self._computes_since_s: dict[int, float] = {}  # by slot
        self._times: dict[int, WorkerTimes] = defaultdict(WorkerTimes)
        self._happenings: list[SimulatedHappening] = []
        self._wounds: set[str] = set()
        self._deferred: deque[Fault] = deque()
        self._died_s: dict[int, float] = {}
        self._cuts_s: dict[tuple[int, int], float] = {}
        self._copies: set[tuple[int, int, int]] = (
            set()
        )  # shard, epoch and server of every copy that was reported
        self._left: set[int] = set()  # shards whose final copy has been left
        self._over_s: float | None = None  # when the run was first over
        self._began_s = 0.0
        self._payload_bytes = spec.gradient_bytes // spec.shards

    def run(self) -> SimulatedRun:
        """Run everything, from the first process to the last."""
        self._obey(self._membership.begin())
        while len(self._left) < self._spec.shards:
            if not self._agenda.next() or self._agenda.now_s > self._spec.timing.limit_s:
                raise ManyhandsError(f"the simulated run did not end: {self._describe()}")
        shards = range(self._spec.shards)
        return SimulatedRun(
            began_s=self._began_s,
            seconds=self._agenda.now_s if self._over_s is None else self._over_s,
            logs=tuple(tuple(self._serving[shard].rows[shard]) for shard in shards),
            written={shard: tuple(tuple(s.written[shard]) for s in self._servers) for shard in shards},
            stores=tuple(self._serving[shard].stores[shard] for shard in shards),
            backups=tuple(map(self._backup, shards)),
            held=tuple(frozenset(self._serving[shard].held[shard]) for shard in shards),
            times=dict(sorted(self._times.items())),
            happenings=tuple(self._happenings),
            num_events=self._agenda.num_done,
        )

    def _backup(self, shard: int) -> Store | None:
        """Return the store of a shard's backup, once the launcher knows of it."""
        place = self._view.shards[shard] if self._view is not None else None
        if place is None or (shard, place.epoch, place.backup) not in self._copies:
            return None
        server = self._processes.get(place.backup)
        return server.stores[shard] if isinstance(server, ServerProcess) and server.alive else None

    def _describe(self) -> str:
        waiting = [
            f"worker {process.slot} (member {process.member}) at clock {process.core.clock} waits for shards "
            f"{list(process.core.waiting_for)}"
            for process in self._processes.values()
            if isinstance(process, WorkerProcess) and process.core is not None and process.core.waiting_for
        ]
        return f"at {self._agenda.now_s:g} s, {'; '.join(waiting[:8]) or 'nobody waits for a shard'}"

    # ── what processes do ─────────────────────────────────────────────────────────────────────────────────────────────

    def post(self, source: int, to: int, message: Message, payload: Any, after_s: float) -> float:
        """Send a message between members, this many seconds from now; return in how many seconds it arrives."""
        now_s = self._agenda.now_s
        self._observer.sends(source, to, message, now_s)
        num_bytes = self._bytes_beside(message) if self._payload_bytes else 0
        at_s = self._network.arrival_s(source, to, num_bytes, now_s + after_s)
        if to != LAUNCHER:
            self._agenda.at(at_s, self._arrive, to, SimulatedMessage(source, message, payload, now_s))
        elif isinstance(message, Installed):
            self._agenda.at(at_s, self._installed, message)
        elif isinstance(message, Concluded):
            self._agenda.at(at_s, self._tell, message)
        return at_s - now_s

    def _bytes_beside(self, message: Message) -> int:
        return self._payload_bytes if isinstance(message, _CARRIERS) else 0

    def later(self, process: Process, item: Item, after_s: float) -> None:
        """Put an item into the process's inbox, this many seconds from now."""
        self._agenda.at(self._agenda.now_s + after_s, self._put, process, item)

    def computes(self, worker: WorkerProcess, work: Work, read: list[Any]) -> float:
        """A worker begins to compute from what it has read; return how many seconds that takes."""
        now_s = self._computes_since_s[worker.slot] = self._agenda.now_s
        since_s = self._waiting_since_s.pop(worker.member, now_s)
        self._observer.waited(worker.slot, work, worker.waited_for, since_s, now_s)
        self._observer.computes(worker.slot, work, read, now_s)
        self._tell(Progressed(member=worker.member, clock=work.clock))
        times = self._times[worker.slot]
        seconds = self._spec.compute.seconds(worker.slot, work, self._draw, self._spec.seed)
        times.waiting_s += now_s - since_s
        times.computing_s += seconds
        times.num_computed += 1
        return seconds

    def computed(self, worker: WorkerProcess, work: Work) -> None:
        """A worker has finished computing, and requests more."""
        now_s = self._waiting_since_s[worker.member] = self._agenda.now_s
        self._observer.computed(worker.slot, work, self._computes_since_s[worker.slot], now_s)

    def acknowledges(self, ack: Ack) -> None:
        """A server has made a push durable."""
        self._observer.acknowledges(ack)

    def steps(self, server: ServerProcess, row: StepRow, after_s: float) -> None:
        """A server has taken an optimizer step, this many seconds from now."""
        if self._serving.get(row.shard) is server:  # a backup repeats every step
            took_s = self._spec.timing.apply_s
            self._observer.steps(server.member, row, self._agenda.now_s + after_s - took_s, took_s)

    def left(self, worker: WorkerProcess, leave: Leave) -> None:
        """A worker has left its slot: tell the launcher."""
        event: PsEvent
        match leave.reason:
            case Reason.FENCED:
                event = Rejoin(member=worker.member)
            case Reason.FINISHED | Reason.RETIRED:
                event = SlotFinished(member=worker.member, reason=leave.reason)
            case Reason.REFUSED:
                raise ManyhandsError(leave.sentence)
        self._note(f"left: {leave.sentence}", worker.member)
        self._agenda.at(
            self._network.arrival_s(worker.member, LAUNCHER, 0, self._agenda.now_s), self._tell, event
        )

    def serves(self, server: ServerProcess, shard: int) -> None:
        """A server has learned that it serves a shard from now on."""
        self._serving[shard] = server
        self._observer.serves(shard, server, self._agenda.now_s)

    def leaves(self, server: ServerProcess, shards: tuple[int, ...], after_s: float) -> None:
        """A server leaves the final copies of its shards, and reports when that is done."""
        self._agenda.at(self._agenda.now_s + after_s, self._leave, server, shards)

    def _leave(self, server: ServerProcess, shards: tuple[int, ...]) -> None:
        if server.alive:
            self._snapshots.update({shard: server.copy(shard) for shard in shards} if self._snapshots else {})
            at_s = self._network.arrival_s(server.member, LAUNCHER, 0, self._agenda.now_s)
            self._agenda.at(at_s, self._has_left, server.member, shards)

    def _has_left(self, member: int, shards: tuple[int, ...]) -> None:
        if member in self._processes:  # a report of a removed member does not count
            self._left.update(shards)
            self._tell(Left(member=member, shards=shards))

    def _arrive(self, to: int, item: Item) -> None:
        process = self._processes.get(to)
        if process is None:
            return
        if isinstance(item, SimulatedMessage):
            if self._died_s and self._cut_off(to, item):
                return
            num_bytes = self._bytes_beside(item.message) if self._payload_bytes else 0
            self._observer.arrives(item.source, to, item.message, num_bytes, self._agenda.now_s)
        self._put(process, item)

    def _cut_off(self, to: int, letter: SimulatedMessage) -> bool:
        """Return whether a message is lost with its sender: any tail of a dying process's messages may be missing."""
        died_s = self._died_s.get(letter.source)
        if died_s is None:
            return False
        pair = (letter.source, to)
        if pair not in self._cuts_s:
            model = self._spec.network
            self._cuts_s[pair] = died_s - 2 * (model.latency_s + model.jitter_s) * self._draw.random()
        return letter.sent_s > self._cuts_s[pair]

    def _put(self, process: Process, item: Item) -> None:
        if process.alive:
            process.inbox.append(item)
            if not process.busy and not process.paused:
                self._work(process)

    def _work(self, process: Process) -> None:
        """Let a process empty its inbox, as far as that takes no time."""
        process.busy = False
        while process.inbox and process.alive and not process.paused:
            seconds = process.take(process.inbox.popleft())
            if seconds:
                process.busy = True
                self._agenda.at(self._agenda.now_s + seconds, self._work, process)
                return

    # ── what the launcher does ────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, event: PsEvent) -> None:
        self._obey(self._membership.handle(event))

    def _installed(self, message: Installed) -> None:
        self._copies.add((message.shard, message.epoch, message.member))
        self._tell(message)
        first = f"first copy of shard {message.shard}"
        if first in self._wounds and sum(wound.startswith("first copy") for wound in self._wounds) == 1:
            self._observer.happens(SimulatedHappening(self._agenda.now_s, "first copies", message.member))
        self._heal(first)

    def _obey(self, actions: list[PsAction]) -> None:
        for action in actions:
            match action:
                case StartServer(member=member):
                    server = ServerProcess(self._make_server(member, self._spec), self._spec, self)
                    self._servers.append(server)
                    self._start(server)
                case StartWorker(member=member):
                    self._start(WorkerProcess(member, self._spec, self))
                case Publish(view=view):
                    self._publish(view)
                case Assign(member=member, as_member=as_member, slot=slot):
                    self._assign(member, as_member, slot)
                case KillMember(member=member):
                    self._kill(self._processes[member])
                case ShardLost(shard=shard, member=member):
                    copy = self._snapshots[shard]
                    self._note(f"shard {shard} restored", member)
                    self._observer.restores(shard, copy, self._agenda.now_s)
                    self._instruct(member, Restore(shard, copy))
                case Recovered(what=what, member=member):
                    self._note(f"recovered {what}", member)
                    self._heal(what)
                case Fail(sentence=sentence):
                    raise ManyhandsError(sentence)
                case Over(shards=shards):
                    self._over_s = self._agenda.now_s if self._over_s is None else self._over_s
                    self._left.difference_update(shards)
                    self._observe_end(shards)
                    for server in self._servers:
                        if server.alive and server.joined:
                            self._instruct(server.member, ShardsToLeave(shards))

    def _observe_end(self, shards: tuple[int, ...]) -> None:
        for place in self._view.shards if self._view is not None else ():
            server = self._processes.get(place.primary)
            if place.shard in shards and isinstance(server, ServerProcess):
                self._observer.over(place.shard, server)

    def _start(self, process: Process) -> None:
        self._processes[process.member] = process
        self._observer.starts(process.member, process.role)
        seconds = self._spec.timing.start_s * (0.9 + 0.2 * self._draw.random())
        self._agenda.at(self._agenda.now_s + seconds, self._join, process)

    def _join(self, process: Process) -> None:
        if process.alive:
            process.joined = True
            self._tell(MemberJoined(member=process.known_as))

    def _instruct(self, member: int, item: Item) -> None:
        at_s = self._network.arrival_s(LAUNCHER, member, 0, self._agenda.now_s)
        self._agenda.at(at_s, self._arrive, member, item)

    def _assign(self, member: int, as_member: int, slot: int) -> None:
        process = self._processes.pop(member)
        process.known_as = as_member
        self._processes[as_member] = process
        self._waiting_since_s[as_member] = self._agenda.now_s
        self._instruct(as_member, Assignment(as_member, slot))

    def _publish(self, view: View) -> None:
        if self._view is None:
            self._begin()
        self._view = view
        for member, process in self._processes.items():
            if process.joined and process.alive:
                self._instruct(member, SimulatedMessage(LAUNCHER, view))

    def _begin(self) -> None:
        """Publish the first view: training begins, and fault times count from here."""
        self._began_s = now_s = self._agenda.now_s
        self._waiting_since_s = dict.fromkeys(self._waiting_since_s, now_s)
        for fault in self._spec.faults:
            self._agenda.at(now_s + fault.at_s, self._strike, fault)
        if self._spec.faults and self._spec.can_restore:
            self._snapshots = self._first_snapshots()
            self._agenda.at(now_s + self._spec.timing.snapshot_every_s, self._snapshot, idly=True)
        if self._spec.replicas:
            self._wounds.update(f"first copy of shard {shard}" for shard in range(self._spec.shards))

    def _first_snapshots(self) -> dict[int, Copy]:
        """Make the initial snapshot of every shard, on a temporary server."""
        server = ServerProcess(self._make_server(1, self._spec), self._spec, self)
        shards = tuple(ShardView(shard=shard, epoch=0, primary=1) for shard in range(self._spec.shards))
        return server.first_copies(View(epoch=0, shards=shards, slots=()))

    def _snapshot(self) -> None:
        for shard, server in self._serving.items():
            if server.alive and not server.paused:
                self._snapshots[shard] = server.copy(shard)
        self._agenda.at(self._agenda.now_s + self._spec.timing.snapshot_every_s, self._snapshot, idly=True)

    # ── what goes wrong ───────────────────────────────────────────────────────────────────────────────────────────────

    def _strike(self, fault: Fault) -> None:
        if self._spec.one_at_a_time and self._wounds and isinstance(fault, Kill | Pause):
            self._deferred.append(fault)
            return
        if isinstance(fault, WorkerComes):
            self._note("one more worker", LAUNCHER)
            self._tell(AddWorker())
        elif isinstance(fault, WorkerGoes):
            self._remove(fault.pick)
        else:
            members = sorted(
                member
                for member, p in self._processes.items()
                if p.role is fault.role and p.joined and p.alive
            )
            if members:
                self._strike_process(fault, self._processes[members[fault.pick % len(members)]])

    def _remove(self, pick: int) -> None:
        slots = [place.slot for place in self._membership.view.slots]
        try:
            self._tell(RemoveWorker(slot=slots[pick % len(slots)]))
        except UserError as error:  # this was the last one
            self._note(f"refused: {error}", LAUNCHER)
        else:
            self._note(f"slot {slots[pick % len(slots)]} removed", LAUNCHER)

    def _strike_process(self, fault: Kill | Pause | SlowLink, process: Process) -> None:
        now_s = self._agenda.now_s
        match fault:
            case Kill():
                self._kill(process)
            case Pause(seconds=seconds):
                self._pause(process, seconds)
            case SlowLink(seconds=seconds, factor=factor):
                self._network.slow_down(process.known_as, now_s + seconds, factor)

    def _kill(self, process: Process) -> None:
        self._note(f"{process.role.value} killed", process.known_as)
        process.alive = False
        self._died_s[process.member] = self._agenda.now_s
        if process.role is FaultRole.SERVER:
            self._wounds.add("every shard")
        held = (p.slot for p in self._membership.view.slots if p.member == process.known_as)
        self._wounds.update(f"slot {slot}" for slot in held)
        self._agenda.at(self._agenda.now_s + self._spec.timing.death_noticed_s, self._bury, process)

    def _bury(self, process: Process) -> None:
        del self._processes[process.known_as]
        self._tell(Died(member=process.known_as))

    def _pause(self, process: Process, seconds: float) -> None:
        if process.paused:
            return
        now_s = self._agenda.now_s
        self._note(f"{process.role.value} paused for {seconds:.3g} s", process.known_as)
        process.paused = True
        wound = f"pause at {now_s}"
        if process.role is FaultRole.SERVER:
            self._wounds.add(wound)
        if seconds >= self._spec.timing.silent_after_s:
            self._agenda.at(now_s + self._spec.timing.silent_after_s, self._notice, process)
        self._agenda.at(now_s + seconds, self._resume, process, wound)

    def _notice(self, process: Process) -> None:
        if process.alive:
            self._tell(MemberSilent(member=process.known_as))

    def _resume(self, process: Process, wound: str) -> None:
        process.paused = False
        self._heal(wound)
        if process.alive and not process.busy:
            self._work(process)

    def _heal(self, wound: str) -> None:
        self._wounds.discard(wound)
        if self._deferred and not self._wounds:
            self._strike(self._deferred.popleft())

    def _note(self, what: str, member: int) -> None:
        slots = (place.slot for place in self._membership.view.slots if place.member == member)
        happening = SimulatedHappening(self._agenda.now_s, what, member, next(slots, -1))
        self._happenings.append(happening)
        self._observer.happens(happening)
