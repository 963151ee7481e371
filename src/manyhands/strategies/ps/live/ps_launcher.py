"""The launcher of a parameter-server run: carries out what `PsMembership` decides, and collects the reports.

It publishes views and turns reports into rows of the run's history. A run with a directory can resume from the
shards' snapshots.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import Aborted, ManyhandsError, PeerTimeout
from manyhands.places.local.failure import Failure
from manyhands.places.local.supervisor import Ended
from manyhands.places.place import Command
from manyhands.strategies.common.membership import KillMember, MemberJoined
from manyhands.strategies.common.run_launcher import MemberLog, RunLauncher
from manyhands.strategies.ps import member_events
from manyhands.strategies.ps.live import reports
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_members import Assemble, RunFiles, RunMembers
from manyhands.strategies.ps.ps_membership import MembershipPlan, PsMembership
from manyhands.strategies.ps.ps_messages import Concluded, Installed, View

_SHARDS = "every shard"


@dataclass(slots=True)
class LaunchOutcome:
    """The result of a run, from the members' reports."""

    totals: dict[str, int] = field(
        default_factory=lambda: {"messages_sent": 0, "bytes_sent": 0, "samples": 0}
    )
    shards: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recorded: dict[str, int] = field(default_factory=dict)  # the complete files of updates/, and their rows
    unrecorded: list[str] = field(default_factory=list)  # a sentence for each file that ended early

    seconds: float = 0.0


class Launcher(RunLauncher[RunMembers]):
    """Runs one job to its end with the members that `assemble` creates, local or remote; `run` is called once.

    `on_rows` receives rows of the history, `on_event` the events of members, with a sentence if the user should
    know. Commands put into `commands` (from any thread) change the slots during the run.
    """

    _membership: PsMembership

    def __init__(
        self,
        job: Job,
        files: RunFiles,
        assemble: Assemble,
        *,
        losses: reports.LossBook,
        on_rows: Callable[[list[dict[str, Any]]], None],
        on_event: Callable[[dict[str, Any]], None],
        commands: queue.SimpleQueue[Command] | None = None,
        watchdog_s: float = 0.0,
    ) -> None:
        super().__init__(
            assemble,
            [*files.rings.values(), *files.server_rings],
            most_slots=len(files.rings),
            reports=reports.REPORTS,
            orders=reports.ORDERS,
            commands=commands,
            watchdog_s=watchdog_s,
        )
        self._job, self._files, self._losses, self._on_rows = job, files, losses, on_rows
        strategy = job.strategy
        self._membership = PsMembership(
            MembershipPlan(
                num_shards=strategy.servers,
                num_workers=job.workers,
                replicas=strategy.replicas,
                can_restore=job.run_path is not None,
            )
        )
        self._log = MemberLog(on_event)
        self._recoveries = Recoveries()
        self._outcome = LaunchOutcome(recoveries=self._log.recoveries)
        self._addresses: dict[int, str] = {}
        self._servers: set[int] = set()  # that have joined
        self._workers: dict[int, int] = {}  # the process of each member that has a slot
        self._ready: dict[int, reports.WorkerReady] = {}  # what they said, by member
        self._places: dict[int, int] = {}  # of the servers, by member
        self._left: dict[int, reports.LeftShard] = {}  # by shard: what its server said when it had left it

    def run(self) -> LaunchOutcome:
        self._run()
        return self._outcome

    # ── what members say ──────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, member: int, report: Any) -> None:
        if self._closing and not isinstance(report, reports.Notice):
            return  # the results are stored
        match report:
            case reports.StepComputed(clock=clock):
                self._decide(member_events.Progressed(member=member, clock=clock))
                self._keep(self._losses.add(report, self._log.seconds))
            case reports.StepSkipped(clock=clock, sentence=sentence):
                self._decide(member_events.Progressed(member=member, clock=clock))
                self._outcome.notes.append(sentence)
                self._log.tell("note", member, sentence=sentence)
            case reports.Evaluated():
                self._keep(self._losses.add_evaluation(report, self._log.seconds))
            case reports.WorkerReady():
                self._workers[member] = self._process_of(member)
                self._ready[member] = report
                self._log.tell("joined", member)
                self._decide(MemberJoined(member=member))
            case reports.ServerListens(address=address):
                self._addresses[member] = address
                self._servers.add(member)
                self._log.tell("joined", member)
                self._decide(MemberJoined(member=member))
            case Installed() | Concluded():
                self._decide(report)
            case reports.ShardsWelcomed(epoch=epoch):
                self._report_recovered(self._recoveries.welcomed(member, epoch))
            case reports.PlaceLost(sentence=sentence):
                self._log.tell("fenced", member, sentence=sentence)
                self._decide(member_events.Rejoin(member=member))
            case reports.ShardsLeft(shards=shards):
                left = {one.shard: one for one in shards}
                self._left |= left
                self._decide(member_events.Left(member=member, shards=tuple(left)))
            case reports.WorkerLeft(reason=reason):
                self._decide(member_events.SlotFinished(member=member, reason=reason))
            case reports.Notice(sentence=sentence):
                self._outcome.notes.append(sentence)
                self._outcome.unrecorded += [sentence] if report.ends_recording else []
                if not self._closing:
                    self._log.tell("note", member, sentence=sentence)

    def _decide(self, event: member_events.PsEvent) -> None:
        self._do(self._membership.handle(event))

    def _keep(self, row: dict[str, Any] | None) -> None:
        if row is not None:
            self._on_rows([row])

    def _bury(self, ended: Ended) -> None:
        member = self._numbers.get(ended.member, ended.member)
        for table in (self._addresses, self._places, self._workers, self._ready):
            table.pop(member, None)
        self._servers.discard(member)
        super()._bury(ended)

    def _lost(self, event: str, member: int, sentence: str) -> None:
        slot = next((view.slot for view in self._membership.view.slots if view.member == member), None)
        if event == "silent":
            sentence = f"{self._log.names[member]} fell silent; {sentence}"
        self._log.lost(event, member, f"slot {slot}" if slot is not None else "every shard", sentence)

    def _ended_well(self, member: int, payload: Mapping[str, Any]) -> None:
        del member
        for name in self._outcome.totals:
            self._outcome.totals[name] += payload.get(name, 0)
        self._outcome.recorded |= payload.get("recorded", {})

    def _failed_late(self, member: int, failure: Failure) -> None:
        """All results are stored, so a server's failure is only noted; what was asked to stop may fail by that."""
        if failure.is_consequence:
            return
        if member not in self._slots:
            self._outcome.notes.append(failure.sentence)
        elif failure.reported is not None:
            raise failure.error()

    def _act(self, action: member_events.PsAction) -> None:
        match action:
            case member_events.Publish(view=view):
                self._publish(view)
            case member_events.StartServer(member=member):
                place = self._give_place(member)
                self._log.names[member] = self._members.start_server(member, place)
            case member_events.Assign(member=member, as_member=number, slot=slot):
                process = self._process_of(member)
                self._workers.pop(member, None)
                self._numbers[process], self._workers[number] = number, process
                self._log.names[number], self._slots[number] = self._log.names[process], slot
                self._send(process, reports.PlaceGiven(slot=slot, member=number))
            case member_events.ShardLost(shard=shard, member=member):
                self._recoveries.restored(self._membership.view.epoch)
                self._send(member, reports.RestoreShard(shard=shard))
            case member_events.Recovered(what=what, member=member):
                self._report_recovered(self._recoveries.found(what, member))
            case member_events.Over(shards=shards):
                self._report_recovered(self._recoveries.over())
                self._over = True
                self._left = {shard: one for shard, one in self._left.items() if shard not in shards}
                for server in self._servers:
                    self._send(server, reports.LeaveShards(shards=tuple(self._missing_shards())))

    def _do(self, actions: Sequence[member_events.PsAction]) -> None:
        for action in actions:
            if isinstance(action, KillMember):
                self._places.pop(action.member, None)  # it writes nothing more
        super()._do(actions)

    def _publish(self, view: View) -> None:
        members = {shard.primary for shard in view.shards} | {shard.backup for shard in view.shards}
        members |= {slot.member for slot in view.slots}
        shards, slots = [one._asdict() for one in view.shards], [one._asdict() for one in view.slots]
        self._log.view(view.epoch, shards, slots, sorted(members))
        roles = {member: self._roles[member] for member in self._places}
        workers = {member: ready for member, ready in self._ready.items() if ready.address}
        published = reports.ViewPublished(view=view, addresses=self._addresses, roles=roles, workers=workers)
        # Workers first: one that lost its slot must hear of it before a server serves its successor.
        for process in [*self._workers.values(), *self._servers]:
            self._send(process, published)

    def _missing_shards(self) -> list[int]:
        return [shard for shard in range(self._job.strategy.servers) if shard not in self._left]

    def _give_place(self, member: int) -> int:
        """Assign the first index that no live server has."""
        taken = set(self._places.values())
        place = next((one for one in range(len(self._files.server_rings)) if one not in taken), None)
        if place is None:
            raise ManyhandsError(f"member {member} replaces no server: all {len(taken)} are still alive")
        self._places[member], self._roles[member] = place, self._files.server_rings[place].role
        return place

    def _report_recovered(self, recovered: list[tuple[str, int]]) -> None:
        for what, member in recovered:
            self._log.recovered(member, what, f"{what} recovered after {{seconds}} s, with member {member}")

    def _stop(self) -> None:
        raise Aborted("the run was asked to stop")

    def _failed(self, sentence: str) -> Exception:
        return ManyhandsError(sentence)

    def _finish(self) -> None:
        """Wait until the servers have handed over all shards, despite deaths meanwhile, then stop all members."""
        self._outcome.seconds = self._log.seconds
        deadline = time.monotonic() + self._job.timeout_s
        while missing := self._missing_shards():
            if time.monotonic() > deadline:
                raise PeerTimeout(f"the servers did not hand over shards {missing} in time", peer=-1)
            self._poll()
        self._closing = True
        self._outcome.shards = [self._left[shard]._asdict() for shard in sorted(self._left)]
        for server in self._servers:
            self._send(server, reports.Finish())
        while self._servers and time.monotonic() < deadline:
            self._poll()
        self._end_members(deadline)

    def _end_members(self, deadline: float) -> None:
        for process in self._members.members:
            self._members.ask_to_stop(process)
        while self._members.members and time.monotonic() < deadline:
            self._poll()


class Recoveries:
    """The replacements not yet known to be connected; each call returns what may be reported now: (what, member).

    The membership finds a process for a slot or a shard and reports it. A worker is connected once every shard has
    welcomed it. A server that took over from a copy was connected all along, or got its copy through a connection;
    one that restored a snapshot is connected once it has welcomed a worker. Workers report each welcome with the
    epoch of their view.
    """

    def __init__(self) -> None:
        self._found: dict[str, int] = {}
        self._welcomed_epoch = 0
        self._restored_epoch = 0

    def restored(self, epoch: int) -> None:
        """Note that in this view a shard is served by a server that restored a snapshot and has no connections yet."""
        self._restored_epoch = epoch

    def found(self, what: str, member: int) -> list[tuple[str, int]]:
        """Note the replacement for `what`, which is `slot 3` or `every shard`."""
        self._found[what] = member
        return self._shards_if_met()

    def welcomed(self, member: int, epoch: int) -> list[tuple[str, int]]:
        """Note that every shard of this view has welcomed a worker."""
        self._welcomed_epoch = max(self._welcomed_epoch, epoch)
        mine = [what for what, found in self._found.items() if found == member and what != _SHARDS]
        return [*((what, self._found.pop(what)) for what in mine), *self._shards_if_met()]

    def over(self) -> list[tuple[str, int]]:
        """Report the shards as recovered: no worker is left to be welcomed."""
        return [(_SHARDS, self._found.pop(_SHARDS))] if _SHARDS in self._found else []

    def _shards_if_met(self) -> list[tuple[str, int]]:
        return self.over() if self._welcomed_epoch >= self._restored_epoch else []
