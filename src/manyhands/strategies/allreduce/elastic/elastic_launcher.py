"""The launcher of an elastic run: drives `ElasticMembership` and receives every message of the members."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manyhands.engine.exchange import SentFor
from manyhands.engine.reporting import WorkerNote
from manyhands.errors import Hang, PeerTimeout, UserError, WorkerFailed
from manyhands.observe.record.event_ring import BlackBoxes, EventRing
from manyhands.places.local.control import Unread
from manyhands.places.local.signals import as_exception
from manyhands.places.local.supervisor import Ended, Hung, Interrupted, Said, Silent, Started
from manyhands.places.local.watchdog import Watched
from manyhands.places.run_commands import AddWorker, Command
from manyhands.strategies.allreduce.elastic.elastic_members import AssembleElastic, ElasticMembers
from manyhands.strategies.allreduce.elastic.elastic_membership import ElasticMembership, ElasticPlan
from manyhands.strategies.allreduce.elastic.elastic_messages import (
    Abort,
    ArrivedInEpoch,
    Ask,
    BeginEpoch,
    Depart,
    Dismiss,
    Done,
    ElasticAction,
    ElasticEvent,
    EndSoon,
    EpochView,
    GatherEpoch,
    GiveUp,
    KillWorker,
    LeaveEpoch,
    RunOver,
    StartMember,
    WorkerLost,
    WorkerSilent,
)
from manyhands.strategies.allreduce.elastic.member_control import ORDERS, REPORTS
from manyhands.strategies.allreduce.elastic.story import MemberStory

__all__ = ["ElasticLauncher", "ElasticOutcome"]

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOutcome:
    """What the members reported at the end of the run."""

    done: Done
    """The report of the member that left the weights."""

    sent: SentFor
    membership: Mapping[str, Any]
    recoveries: Sequence[Mapping[str, Any]]


class ElasticLauncher:
    """Runs one job to its end; `run` is called once.

    `rings` has one ring for each possible slot; `assemble` creates the members. `on_note` receives what workers
    report, `on_event` what happens to members. Commands, from any thread, change the slots during the run.
    """

    def __init__(
        self,
        plan: ElasticPlan,
        rings: Sequence[EventRing],
        assemble: AssembleElastic,
        *,
        timeout_s: float,
        on_note: Callable[[WorkerNote], None],
        on_event: Callable[[dict[str, Any]], None],
        stop_wanted: Callable[[], bool],
        commands: queue.SimpleQueue[Command] | None = None,
        watchdog_s: float = 0.0,
    ) -> None:
        self._rings, self._assemble, self._timeout_s = rings, assemble, timeout_s
        self._on_note, self._stop_wanted = on_note, stop_wanted
        self._commands: queue.SimpleQueue[Command] = commands or queue.SimpleQueue()
        self._watchdog_s = watchdog_s
        self._membership = ElasticMembership(plan)
        self._story = MemberStory(on_event)
        self._slots: dict[int, int] = {}
        self._last_lost = -1  # the slot
        self._payloads: dict[int, Mapping[str, Any]] = {}
        self._members: ElasticMembers
        self._done: Done | None = None
        self._ending = self._over = False

    def run(self) -> ElasticOutcome:
        """Start all members, drive the run to its end, and return its outcome."""
        with self._assemble(self._watched()) as members:
            self._members = members
            self._do(self._membership.begin())
            while not self._over:
                self._poll()
            self._finish()
        return self._outcome()

    def _poll(self) -> None:
        for event in self._members.poll(_LOOK_S):
            match event:
                case Said(payload=payload):
                    self._hear(payload)
                case Ended():
                    self._bury(event)
                case Started(member=member, pid=pid):
                    self._story.started(member, pid)
                case Silent(member=member, seen=seen):
                    self._story.silent(member, seen)
                    self._tell_membership(WorkerSilent(member=member))
                case Hung(found=found):
                    slot = self._slots.get(found.role, -1)
                    hang = Hang(f"{found.sentence}\n\n{found.page}", slot, found.details)
                    hang.blamed = f"worker {slot}"
                    raise hang
                case Interrupted(signal=number):
                    raise as_exception(number)
        while not self._commands.empty():
            self._obey(self._commands.get())
        if self._stop_wanted():
            self._end_soon()

    def _watched(self) -> Watched:
        boxes = BlackBoxes({ring.role: ring for ring in self._rings})

        def last(member: int, count: int) -> Sequence[str]:
            return boxes.last(self._slots[member], count) if member in self._slots else ()

        return Watched(deadline_s=self._watchdog_s, count_events=boxes.counts, last_events=last)

    def _obey(self, command: Command) -> None:
        if command.change is None:
            command.done.set_result(-1)
            self._end_soon()
            return
        try:
            if isinstance(command.change, AddWorker):
                slot = self._membership.next_slot
                if slot >= len(self._rings):
                    raise UserError(f"no more than {len(self._rings)} workers can be in one run")
            else:
                slot = command.change.slot
            actions = self._membership.handle(command.change)
        except UserError as error:
            command.done.set_exception(error)
            return
        command.done.set_result(slot)
        self._do(actions)

    def _end_soon(self) -> None:
        if not self._ending:
            self._ending = True
            for member in self._members.members:
                self._say(member, EndSoon())

    # ── messages of members ─────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, said: Mapping[str, Any]) -> None:
        report = REPORTS.read(said)
        if isinstance(report, WorkerNote):
            self._on_note(report)
            return
        if isinstance(report, Done):
            self._done = report
        if isinstance(report, ArrivedInEpoch):
            self._story.arrived(report, self._membership)
        self._tell_membership(report)

    def _bury(self, ended: Ended) -> None:
        member = ended.member
        if ended.payload is not None:
            self._payloads[member] = ended.payload
            self._story.left(member)
            return
        assert ended.failure is not None, "who returned nothing has failed"
        if ended.failure.reported is not None:
            # A task that fails in one worker would fail in its replacement.
            raise replace(ended.failure, rank=self._slots[member]).error()
        self._last_lost = self._slots[member]
        self._story.died(member, ended.failure.sentence)
        self._tell_membership(WorkerLost(member=member, sentence=ended.failure.sentence))

    # ── actions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_membership(self, event: ElasticEvent) -> None:
        self._do(self._membership.handle(event))

    def _do(self, actions: Sequence[ElasticAction]) -> None:
        for action in actions:
            match action:
                case StartMember(member=member, slot=slot):
                    self._start(member, slot)
                case KillWorker(member=member):
                    self._members.kill(member)
                case Ask(epoch=epoch, members=members):
                    for member in members:
                        self._say(member, GatherEpoch(epoch=epoch))
                case Abort(epoch=epoch, members=members):
                    self._members.abort()
                    for member in members:
                        self._say(member, LeaveEpoch(epoch=epoch))
                case BeginEpoch(view=view):
                    self._publish(view)
                case Dismiss(member=member):
                    self._say(member, Depart())
                case GiveUp(sentence=sentence):
                    raise WorkerFailed(sentence, worker_rank=self._last_lost)
                case RunOver():
                    self._over = True

    def _publish(self, view: EpochView) -> None:
        """Give each member the resources of the epoch before announcing its view."""
        self._members.begin(view)
        for seat in view.seats:
            self._say(seat.member, view)
        self._story.published(view)

    def _start(self, member: int, slot: int) -> None:
        self._slots[member] = slot
        self._story.names[member] = f"worker {slot}"
        self._members.start(member, slot)
        if self._ending:
            self._say(member, EndSoon())

    def _say(self, member: int, order: Any) -> None:
        """Send a message.

        A member that leaves megabytes unread counts as dead, so that it cannot block the others.
        """
        try:
            self._members.tell(member, ORDERS.write(order))
        except Unread:
            self._members.kill(member)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        """Wait for the last reports. The weights are already in place, so failures here are harmless."""
        deadline = time.monotonic() + self._timeout_s
        while self._members.members:
            if time.monotonic() > deadline:
                names = ", ".join(self._story.names[member] for member in self._members.members)
                raise PeerTimeout(f"{names} did not end within {self._timeout_s:g} s of the run's end", -1)
            for event in self._members.poll(_LOOK_S):
                match event:
                    case Interrupted(signal=number):
                        raise as_exception(number)
                    case Said(payload=payload):
                        report = REPORTS.read(payload)
                        if isinstance(report, WorkerNote):
                            self._on_note(report)
                    case Silent(member=member):
                        self._members.kill(member)
                    case Ended(member=member, payload=payload) if payload is not None:
                        self._payloads[member] = payload

    def _outcome(self) -> ElasticOutcome:
        assert self._done is not None, "a run is over when somebody is done"
        return ElasticOutcome(
            done=self._done,
            sent=sum((SentFor.from_dict(one["sent"]) for one in self._payloads.values()), SentFor()),
            membership=self._story.summary(self._membership),
            recoveries=self._story.recoveries,
        )
