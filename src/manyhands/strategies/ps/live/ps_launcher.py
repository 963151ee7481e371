"""The launcher of a parameter-server run: the driver of `Membership`, to which all members report.

It starts and reaps processes, publishes views, and turns reports into rows of the run's history. Its death ends
the run; a run with a directory can resume from the shards' snapshots.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from manyhands.errors import Aborted, Hang, ManyhandsError, PeerTimeout, UserError
from manyhands.observe.record.event_ring import BlackBoxes
from manyhands.places.local.control import Unread
from manyhands.places.local.failure import Failure
from manyhands.places.local.signals import as_exception
from manyhands.places.local.supervisor import Ended, Hung, Interrupted, Said, Silent, Started
from manyhands.places.local.watchdog import Watched
from manyhands.places.run_commands import AddWorker, Command, RemoveWorker
from manyhands.strategies.ps import member_events
from manyhands.strategies.ps.live.losses import LossBook
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_members import Assemble, RunFiles, RunMembers
from manyhands.strategies.ps.live.recoveries import Recoveries
from manyhands.strategies.ps.live.reports import (
    ORDERS,
    REPORTS,
    Evaluated,
    Finish,
    LeaveShards,
    LeftShard,
    Notice,
    PlaceGiven,
    PlaceLost,
    RestoreShard,
    ServerListens,
    ShardsLeft,
    ShardsWelcomed,
    StepComputed,
    StepSkipped,
    ViewPublished,
    WorkerLeft,
    WorkerReady,
)
from manyhands.strategies.ps.member_events import (
    Assign,
    Fail,
    KillMember,
    MembershipAction,
    MembershipEvent,
    Over,
    Publish,
    Recovered,
    ShardLost,
    StartServer,
    StartWorker,
)
from manyhands.strategies.ps.membership import Membership, MembershipPlan
from manyhands.strategies.ps.ps_messages import Concluded, Installed, View

__all__ = ["LaunchOutcome", "Launcher", "new_token"]

_LOOK_S = 0.1


@dataclass(slots=True)
class LaunchOutcome:
    """The result of a run, from the members' reports."""

    totals: dict[str, int] = field(
        default_factory=lambda: {"messages_sent": 0, "bytes_sent": 0, "samples": 0}
    )
    shards: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recorded: dict[str, int] = field(default_factory=dict)
    """The completely written files of updates/, with their number of rows."""

    unrecorded: list[str] = field(default_factory=list)
    """A sentence for each file whose recording ended early."""

    seconds: float = 0.0


class Launcher:
    """Runs one job to its end with the members that `assemble` creates, local or remote; `run` is called once.

    `on_rows` receives rows of the history, `on_event` the events of members, with a sentence if the user should
    know. Commands put into `commands` (from any thread) change the slots during the run.
    """

    def __init__(
        self,
        job: Job,
        files: RunFiles,
        assemble: Assemble,
        *,
        losses: LossBook,
        on_rows: Callable[[list[dict[str, Any]]], None],
        on_event: Callable[[dict[str, Any]], None],
        commands: queue.SimpleQueue[Command] | None = None,
        watchdog_s: float = 0.0,
    ) -> None:
        self._job, self._files, self._assemble = job, files, assemble
        self._watchdog_s = watchdog_s
        self._on_rows, self._on_event = on_rows, on_event
        self._commands: queue.SimpleQueue[Command] = commands or queue.SimpleQueue()
        strategy = job.strategy
        self._membership = Membership(
            MembershipPlan(
                num_shards=strategy.servers,
                num_workers=job.workers,
                replicas=strategy.replicas,
                can_restore=job.run_path is not None,
            )
        )
        self._losses = losses
        self._recoveries = Recoveries()
        self._outcome = LaunchOutcome()
        self._addresses: dict[int, str] = {}
        self._servers: set[int] = set()  # that have joined
        self._workers: dict[int, int] = {}  # the process of each member that has a slot
        self._numbers: dict[int, int] = {}  # what each process goes by, where that has changed
        self._names: dict[int, str] = {}
        self._places: dict[int, int] = {}  # of the servers, by member
        self._server_members: set[int] = set()  # that were ever started
        self._left: dict[int, LeftShard] = {}  # by shard: what its server said when it had left it
        self._died_at: dict[str, float] = {}
        self._over = False
        self._began = 0.0
        self._slots_asked: dict[int, int] = {}  # by worker: the slot that it was started for
        self._highest_slot = job.workers - 1

    def run(self) -> LaunchOutcome:
        """Start all members, run the job to its end, and return the outcome."""
        with self._assemble(self._watched()) as members:
            self._members: RunMembers = members
            with members.together():
                self._do(self._membership.begin())
            while not self._over:
                self._poll()
            self._finish()
        return self._outcome

    def _poll(self) -> None:
        for event in self._members.poll(_LOOK_S):
            match event:
                case Said(member=process, payload=payload):
                    self._hear(self._numbers.get(process, process), payload)
                case Ended():
                    self._bury(event)
                case Started(member=process, pid=pid):
                    self._tell("started", process, pid=pid)
                case Silent(member=process, seen=seen):
                    member = self._numbers.get(process, process)
                    self._missed("silent", member, f"{self._names[process]} fell silent; {seen}")
                    self._tell_membership(member_events.MemberSilent(member=member))
                case Hung(found=found):
                    hang = Hang(f"{found.sentence}\n\n{found.page}", self._rank_of(found.role), found.details)
                    hang.blamed = self._names.get(self._process_of(found.role), "")
                    raise hang
                case Interrupted(signal=number):
                    raise as_exception(number)
        while not self._commands.empty():
            self._obey(self._commands.get())

    def _watched(self) -> Watched:
        """The watchdog's view of the members: event rings are keyed by role, members by number."""
        rings = [*self._files.rings.values(), *self._files.server_rings]
        boxes = BlackBoxes({ring.role: ring for ring in rings})

        def last(member: int, count: int) -> Sequence[str]:
            role = self._roles().get(member, self._slot_of(member))
            return boxes.last(role, count) if role is not None else ()

        return Watched(deadline_s=self._watchdog_s, count_events=boxes.counts, last_events=last)

    def _obey(self, command: Command) -> None:
        if command.change is None:
            command.done.set_result(-1)
            raise Aborted("the run was asked to stop")
        try:
            if isinstance(command.change, AddWorker) and len(self._files.rings) <= self._highest_slot + 1:
                raise UserError(f"no more than {len(self._files.rings)} slots can be in one run")
            actions = self._membership.handle(_change(command.change))
        except UserError as error:
            command.done.set_exception(error)
            return
        if isinstance(command.change, AddWorker):
            self._highest_slot += 1  # the membership counts them in the same way
            command.done.set_result(self._highest_slot)
        else:
            command.done.set_result(command.change.slot)
        self._do(actions)

    # ── what members say ──────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, member: int, said: Mapping[str, Any]) -> None:
        match report := REPORTS.read(said):
            case StepComputed() | StepSkipped():
                self._progressed(member, report)
            case Evaluated():
                self._keep(self._losses.add_evaluation(report, self._seconds()))
            case WorkerReady():
                self._workers[member] = self._process_of(member)
                self._joined(member)
            case ServerListens(address=address):
                self._addresses[member] = address
                self._servers.add(member)
                self._joined(member)
            case Installed() | Concluded():
                self._tell_membership(report)
            case ShardsWelcomed(epoch=epoch):
                self._say_recovered(self._recoveries.welcomed(member, epoch))
            case PlaceLost(sentence=sentence):
                self._tell("fenced", member, sentence=sentence)
                self._tell_membership(member_events.Rejoin(member=member))
            case ShardsLeft(shards=shards):
                left = {one.shard: one for one in shards}
                self._left |= left
                self._tell_membership(member_events.Left(member=member, shards=tuple(left)))
            case WorkerLeft(reason=reason):
                self._tell_membership(member_events.SlotFinished(member=member, reason=reason))
            case Notice():
                self._take_note(report)
                self._tell("note", member, sentence=report.sentence)

    def _joined(self, member: int) -> None:
        self._tell("joined", member)
        self._tell_membership(member_events.MemberJoined(member=member))

    def _progressed(self, member: int, report: StepComputed | StepSkipped) -> None:
        self._tell_membership(member_events.Progressed(member=member, clock=report.clock))
        if isinstance(report, StepComputed):
            self._keep(self._losses.add(report, self._seconds()))
        else:
            self._outcome.notes.append(report.sentence)
            self._tell("note", member, sentence=report.sentence)

    def _keep(self, row: dict[str, Any] | None) -> None:
        if row is not None:
            self._on_rows([row])

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _take_note(self, notice: Notice) -> None:
        self._outcome.notes.append(notice.sentence)
        if notice.ends_recording:
            self._outcome.unrecorded.append(notice.sentence)

    def _tell(self, event: str, member: int, **details: Any) -> None:
        at_s = time.monotonic() - self._began if self._began else 0.0
        name = self._names.get(self._process_of(member))
        known = {"name": name} if name is not None else {}
        self._on_event({"event": event, "at_s": at_s, "member": member, **known, **details})

    def _bury(self, ended: Ended) -> None:
        member = self._numbers.get(ended.member, ended.member)
        self._addresses.pop(member, None)
        self._places.pop(member, None)
        self._servers.discard(member)
        self._workers.pop(member, None)
        if ended.payload is not None:
            self._add_totals(ended.payload)
            return
        assert ended.failure is not None, "who returned nothing has failed"
        reported = ended.failure.reported
        if reported is not None and member not in self._server_members:
            raise replace(
                ended.failure, rank=self._rank_of(member)
            ).error()  # a task that fails in one worker fails in its successor
        self._missed("died", member, ended.failure.sentence)
        error = reported.error if reported is not None else ""
        actions = self._membership.handle(member_events.Died(member=member, error=error))
        if error and any(isinstance(action, Fail) for action in actions):
            raise self._repeated(replace(ended.failure, rank=self._rank_of(member)), actions)
        self._do(actions)

    def _repeated(self, failure: Failure, actions: list[MembershipAction]) -> ManyhandsError:
        """The error that ended a server and would end its successor, with the membership's sentence as a note."""
        error = failure.error()
        for action in actions:
            if isinstance(action, Fail):
                error.add_note(action.sentence)
        return error

    def _missed(self, event: str, member: int, sentence: str) -> None:
        self._died_at.setdefault(self._what(member), time.monotonic())
        self._tell(event, member, sentence=sentence)

    def _slot_of(self, member: int) -> int | None:
        return next((view.slot for view in self._membership.view.slots if view.member == member), None)

    def _rank_of(self, member: int) -> int:
        """A member's rank in errors: a worker's slot, -1 for a server."""
        slot = self._slot_of(member)
        if slot is not None:
            return slot
        return self._slots_asked.get(self._process_of(member), -1)  # before there is a view

    def _what(self, member: int) -> str:
        slot = self._slot_of(member)
        return f"slot {slot}" if slot is not None else "every shard"

    # ── what to do ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_membership(self, event: MembershipEvent) -> None:
        self._do(self._membership.handle(event))

    def _do(self, actions: list[MembershipAction]) -> None:
        for action in actions:
            match action:
                case Publish(view=view):
                    self._began = self._began or time.monotonic()
                    self._tell_view(view)
                    told = ViewPublished(view=view, addresses=self._addresses, roles=self._roles())
                    # Workers first: one that lost its slot must hear of it before a server serves its successor.
                    for process in [*self._workers.values(), *self._servers]:
                        self._tell_process(process, told)
                case StartServer(member=member):
                    self._server_members.add(member)
                    self._names[member] = self._members.start_server(member, self._give_place(member))
                case StartWorker(member=member, slot=slot):
                    self._slots_asked[member] = slot
                    self._names[member] = self._members.start_worker(member, slot)
                case Assign(member=member, as_member=number, slot=slot):
                    process = self._process_of(member)
                    self._workers.pop(member, None)
                    self._numbers[process], self._workers[number] = number, process
                    self._tell_process(process, PlaceGiven(slot=slot, member=number))
                case KillMember(member=member):
                    self._members.kill(self._process_of(member))
                    self._places.pop(member, None)  # it writes nothing more
                case ShardLost(shard=shard, member=member):
                    self._recoveries.restored(self._membership.view.epoch)
                    self._tell_process(member, RestoreShard(shard=shard))
                case Recovered(what=what, member=member):
                    self._say_recovered(self._recoveries.found(what, member))
                case Fail(sentence=sentence):
                    raise ManyhandsError(sentence)
                case Over(shards=shards):
                    self._say_recovered(self._recoveries.over())
                    self._over = True
                    self._left = {shard: one for shard, one in self._left.items() if shard not in shards}
                    for server in self._servers:
                        self._tell_process(server, LeaveShards(shards=tuple(self._missing_shards())))

    def _tell_process(self, process: int, order: Any) -> None:
        """Send an order; a member with megabytes unread is killed, since it must not block the others."""
        try:
            self._members.tell(process, ORDERS.write(order))
        except Unread:
            self._members.kill(process)

    def _missing_shards(self) -> list[int]:
        """The shards that no server has handed over yet."""
        return [shard for shard in range(self._job.strategy.servers) if shard not in self._left]

    def _give_place(self, member: int) -> int:
        """Assign the first index that no live server has."""
        taken = set(self._places.values())
        place = next((one for one in range(len(self._files.server_rings)) if one not in taken), None)
        if place is None:
            raise ManyhandsError(f"member {member} has no place: all {len(taken)} servers are still there")
        self._places[member] = place
        return place

    def _roles(self) -> dict[int, int]:
        return {member: self._files.server_rings[place].role for member, place in self._places.items()}

    def _tell_view(self, view: View) -> None:
        """Record which members serve and work from now on."""
        members = {shard.primary for shard in view.shards} | {shard.backup for shard in view.shards}
        members |= {slot.member for slot in view.slots}
        self._on_event(
            {
                "event": "view",
                "at_s": time.monotonic() - self._began,
                "epoch": view.epoch,
                "shards": [asdict(shard) for shard in view.shards],
                "slots": [asdict(slot) for slot in view.slots],
                "names": {
                    str(member): self._names[self._process_of(member)]
                    for member in sorted(members)
                    if self._process_of(member) in self._names
                },
            }
        )

    def _say_recovered(self, recovered: list[tuple[str, int]]) -> None:
        for what, member in recovered:
            seconds = time.monotonic() - self._died_at.pop(what, time.monotonic())
            self._outcome.recoveries.append({"what": what, "seconds": seconds})
            sentence = f"{what} is whole again after {seconds:.2f} s, with member {member}"
            self._tell("recovered", member, what=what, seconds=seconds, sentence=sentence)

    def _process_of(self, member: int) -> int:
        return next((process for process, number in self._numbers.items() if number == member), member)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        """Wait until the servers have handed over all shards, despite deaths meanwhile, then stop all members."""
        self._outcome.seconds = time.monotonic() - self._began
        deadline = time.monotonic() + self._job.timeout_s
        while missing := self._missing_shards():
            if time.monotonic() > deadline:
                raise PeerTimeout(f"the servers of shards {missing} did not leave them in time", peer=-1)
            self._poll()
        self._outcome.shards = [asdict(self._left[shard]) for shard in sorted(self._left)]
        for server in self._servers:
            self._tell_process(server, Finish())
        while self._servers and time.monotonic() < deadline:
            self._turn_down()
        for process in self._members.members:
            self._members.ask_to_stop(process)
        while self._members.members and time.monotonic() < deadline:
            self._turn_down()

    def _turn_down(self) -> None:
        """Poll once during shutdown: all results are stored, so a server's failure is only noted."""
        for event in self._members.poll(_LOOK_S):
            match event:
                case Interrupted(signal=number):
                    raise as_exception(number)
                case Said(payload=payload):
                    report = REPORTS.read(payload)
                    if isinstance(report, Notice):
                        self._take_note(report)
                case Silent(member=process):
                    self._members.kill(process)
                case Ended(member=process, payload=payload, failure=failure):
                    self._servers.discard(process)
                    if payload is not None:
                        self._add_totals(payload)
                    elif failure is None or failure.is_consequence:
                        pass  # who came too late to be of use was asked to stop
                    elif process in self._server_members:
                        self._outcome.notes.append(failure.sentence)
                    elif failure.reported is not None:
                        raise replace(failure, rank=self._rank_of(process)).error()

    def _add_totals(self, payload: Mapping[str, Any]) -> None:
        for name in self._outcome.totals:
            self._outcome.totals[name] += payload.get(name, 0)
        self._outcome.recorded |= payload.get("recorded", {})


def _change(asked: AddWorker | RemoveWorker) -> member_events.AddSlot | member_events.RemoveSlot:
    return (
        member_events.AddSlot() if isinstance(asked, AddWorker) else member_events.RemoveSlot(slot=asked.slot)
    )


def new_token() -> str:
    """A new secret, shared by the processes of one run."""
    return os.urandom(32).hex()
