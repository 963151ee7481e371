"""Drives the parameter server's cores in virtual time, deterministically for a given seed.

The launcher's membership, the servers' cores and the workers' cores are those of a live run. Simulated are the
durations of computing, optimizer steps, messages and process starts, and the faults.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from manyhands.errors import ManyhandsError, UserError
from manyhands.foresight.simulate import faults
from manyhands.foresight.simulate.models import Store
from manyhands.foresight.simulate.simulated_processes import (
    Assignment,
    Process,
    Restore,
    ServerProcess,
    ShardsToLeave,
    SimulatedMessage,
    SimulatedWorld,
)
from manyhands.foresight.simulate.simulated_run import Observer, SimulatedHappening, SimulatedRun
from manyhands.foresight.simulate.simulated_spec import SimulationSpec
from manyhands.foresight.simulate.simulated_workers import WorkerProcess
from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.common import membership
from manyhands.strategies.ps import member_events as events
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_membership import MembershipPlan, PsMembership
from manyhands.strategies.ps.ps_messages import LAUNCHER, Installed, View
from manyhands.strategies.ps.shard_replica import ServerCore

__all__ = ["new_server", "simulate"]


def new_server(member: int, spec: SimulationSpec) -> ServerCore:
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
    return _Launcher(spec, make_server, observer or Observer()).run()


class _Launcher:
    """The launcher of one run, and the faults that strike its processes."""

    def __init__(
        self,
        spec: SimulationSpec,
        make_server: Callable[[int, SimulationSpec], ServerCore],
        observer: Observer,
    ) -> None:
        self._spec, self._make_server, self._observer = spec, make_server, observer
        sizes = {"num_shards": spec.shards, "num_workers": spec.workers, "replicas": spec.replicas}
        self._membership = PsMembership(MembershipPlan(**sizes, can_restore=spec.can_restore))
        self._world = SimulatedWorld(spec, observer, self._membership, self._handle)
        self._agenda, self._processes = self._world.agenda, self._world.processes
        self._view: View | None = None
        self._servers: list[ServerProcess] = []  # including dead ones, whose logs are kept
        self._wounds: set[str] = set()
        self._deferred: deque[faults.Fault] = deque()
        self._copies: set[tuple[int, int, int]] = set()  # shard, epoch and server of every reported copy
        self._left: set[int] = set()  # shards whose final copy has been left
        self._over_s: float | None = None  # when the run was first over
        self._began_s = 0.0

    def run(self) -> SimulatedRun:
        self._obey(self._membership.begin())
        while len(self._left) < self._spec.shards:
            if not self._agenda.next() or self._agenda.now_s > self._spec.timing.limit_s:
                waiting = [
                    f"worker {process.slot} (member {process.member}) at clock {process.core.clock} waits for shards "
                    f"{list(process.core.waiting_for)}"
                    for process in self._processes.values()
                    if isinstance(process, WorkerProcess) and process.core and process.core.waiting_for
                ]
                raise ManyhandsError(
                    f"the simulated run did not end: at {self._agenda.now_s:g} s, "
                    f"{'; '.join(waiting[:8]) or 'no worker waits for a shard'}"
                )
        shards, serving = range(self._spec.shards), self._world.serving
        return SimulatedRun(
            began_s=self._began_s,
            seconds=self._agenda.now_s if self._over_s is None else self._over_s,
            logs=tuple(tuple(serving[shard].rows[shard]) for shard in shards),
            written={shard: tuple(tuple(s.written[shard]) for s in self._servers) for shard in shards},
            stores=tuple(serving[shard].stores[shard] for shard in shards),
            backups=tuple(map(self._backup, shards)),
            held=tuple(frozenset(serving[shard].held[shard]) for shard in shards),
            times=dict(sorted(self._world.times.items())),
            happenings=tuple(self._world.happenings),
            num_events=self._agenda.num_done,
        )

    def _backup(self, shard: int) -> Store | None:
        place = self._view.shards[shard] if self._view is not None else None
        if place is None or (shard, place.epoch, place.backup) not in self._copies:
            return None
        server = self._processes.get(place.backup)
        return server.stores[shard] if isinstance(server, ServerProcess) and server.alive else None

    # ── membership ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, event: events.PsEvent) -> None:
        if isinstance(event, events.Left):
            if event.member not in self._processes:
                return  # a report of a removed member does not count
            self._left.update(event.shards)
        if isinstance(event, Installed):
            self._copies.add((event.shard, event.epoch, event.member))
        self._obey(self._membership.handle(event))
        if isinstance(event, Installed):
            first = f"first copy of shard {event.shard}"
            if first in self._wounds and sum(wound.startswith("first copy") for wound in self._wounds) == 1:
                self._observer.happens(SimulatedHappening(self._agenda.now_s, "first copies", event.member))
            self._heal(first)

    def _obey(self, actions: list[events.PsAction]) -> None:
        world = self._world
        for action in actions:
            match action:
                case events.StartServer(member=member):
                    server = ServerProcess(self._make_server(member, self._spec), world)
                    self._servers.append(server)
                    self._start(server)
                case membership.StartWorker(member=member):
                    self._start(WorkerProcess(member, world))
                case events.Publish(view=view):
                    if self._view is None:
                        self._begin()
                    self._view = view
                    for member, process in self._processes.items():
                        if process.joined and process.alive:
                            world.instruct(member, SimulatedMessage(LAUNCHER, view))
                case events.Assign(member=member, as_member=as_member, slot=slot):
                    process = self._processes[as_member] = self._processes.pop(member)
                    process.known_as = as_member
                    world.waiting_since_s[as_member] = self._agenda.now_s
                    world.instruct(as_member, Assignment(as_member, slot))
                case membership.KillMember(member=member):
                    self._kill(self._processes[member])
                case events.ShardLost(shard=shard, member=member):
                    world.note(f"shard {shard} restored", member)
                    self._observer.restores(shard)
                    world.instruct(member, Restore(shard, world.snapshots[shard]))
                case events.Recovered(what=what, member=member):
                    world.note(f"recovered {what}", member)
                    self._heal(what)
                case membership.Fail(sentence=sentence):
                    raise ManyhandsError(sentence)
                case events.Over(shards=shards):
                    self._end(shards)

    def _start(self, process: Process) -> None:
        def join() -> None:
            if process.alive:
                process.joined = True
                self._handle(membership.MemberJoined(member=process.known_as))

        self._processes[process.member] = process
        self._observer.starts(process.member, process.role)
        self._agenda.after(self._spec.timing.start_s * (0.9 + 0.2 * self._world.draw.random()), join)

    def _begin(self) -> None:
        """Publish the first view: training begins, and fault times count from here."""
        spec, world = self._spec, self._world
        self._began_s = now_s = self._agenda.now_s
        world.waiting_since_s = dict.fromkeys(world.waiting_since_s, now_s)
        for fault in spec.faults:
            self._agenda.after(fault.at_s, self._strike, fault)
        if spec.faults and spec.can_restore:
            world.snapshots = ServerProcess(self._make_server(1, spec), world).first_copies()
            self._agenda.after(spec.timing.snapshot_every_s, self._snapshot, idly=True)
        if spec.replicas:
            self._wounds.update(f"first copy of shard {shard}" for shard in range(spec.shards))

    def _snapshot(self) -> None:
        for shard, server in self._world.serving.items():
            if server.alive and not server.paused:
                self._world.snapshots[shard] = server.copy(shard)
        self._agenda.after(self._spec.timing.snapshot_every_s, self._snapshot, idly=True)

    def _end(self, shards: tuple[int, ...]) -> None:
        self._over_s = self._agenda.now_s if self._over_s is None else self._over_s
        self._left.difference_update(shards)
        for place in self._view.shards if self._view is not None else ():
            server = self._processes.get(place.primary)
            if place.shard in shards and isinstance(server, ServerProcess):
                self._observer.over(place.shard, server.stores[place.shard], server.held[place.shard])
        for server in self._servers:
            if server.alive and server.joined:
                self._world.instruct(server.member, ShardsToLeave(shards))

    # ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _strike(self, fault: faults.Fault) -> None:
        if self._spec.one_at_a_time and self._wounds and isinstance(fault, faults.Kill | faults.Pause):
            self._deferred.append(fault)
            return
        match fault:
            case faults.WorkerComes():
                self._world.note("one more worker", LAUNCHER)
                self._handle(AddWorker())
                return
            case faults.WorkerGoes(pick=pick):
                slots = [place.slot for place in self._membership.view.slots]
                slot = slots[pick % len(slots)]
                try:
                    self._handle(RemoveWorker(slot=slot))
                except UserError as error:  # this was the last one
                    self._world.note(f"refused: {error}", LAUNCHER)
                else:
                    self._world.note(f"slot {slot} removed", LAUNCHER)
                return
        present = [m for m, p in self._processes.items() if p.role is fault.role and p.joined and p.alive]
        if not present:
            return
        process = self._processes[sorted(present)[fault.pick % len(present)]]
        match fault:
            case faults.Kill():
                self._kill(process)
            case faults.Pause(seconds=seconds):
                self._pause(process, seconds)
            case faults.SlowLink(seconds=seconds, factor=factor):
                self._world.network.slow_down(process.known_as, self._agenda.now_s + seconds, factor)

    def _kill(self, process: Process) -> None:
        def bury() -> None:
            del self._processes[process.known_as]
            self._handle(membership.Died(member=process.known_as))

        self._world.note(f"{process.role.value} killed", process.known_as)
        process.alive = False
        self._world.died_s[process.member] = self._agenda.now_s
        if process.role is faults.FaultRole.SERVER:
            self._wounds.add("every shard")
        held = (p.slot for p in self._membership.view.slots if p.member == process.known_as)
        self._wounds.update(f"slot {slot}" for slot in held)
        self._agenda.after(self._spec.timing.death_noticed_s, bury)

    def _pause(self, process: Process, seconds: float) -> None:
        def notice() -> None:
            if process.alive:
                self._handle(membership.MemberSilent(member=process.known_as))

        def resume() -> None:
            process.paused = False
            self._heal(wound)
            process.look()

        if process.paused:
            return
        self._world.note(f"{process.role.value} paused for {seconds:.3g} s", process.known_as)
        process.paused = True
        wound = f"pause at {self._agenda.now_s}"
        if process.role is faults.FaultRole.SERVER:
            self._wounds.add(wound)
        if seconds >= self._spec.timing.silent_after_s:
            self._agenda.after(self._spec.timing.silent_after_s, notice)
        self._agenda.after(seconds, resume)

    def _heal(self, wound: str) -> None:
        self._wounds.discard(wound)
        if self._deferred and not self._wounds:
            self._strike(self._deferred.popleft())
