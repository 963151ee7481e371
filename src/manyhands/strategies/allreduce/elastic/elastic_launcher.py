"""The launcher of an elastic run: carries out what `ElasticMembership` decides, and collects the reports."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.engine.exchange import SentFor
from manyhands.engine.reporting import WorkerNote
from manyhands.errors import PeerTimeout, WorkerFailed
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.failure import Failure
from manyhands.places.run_commands import Command
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
    EndSoon,
    EpochView,
    GatherEpoch,
    LeaveEpoch,
    MemberReady,
    RunOver,
)
from manyhands.strategies.allreduce.elastic.member_control import ORDERS, REPORTS
from manyhands.strategies.common.run_launcher import MemberLog, RunLauncher

__all__ = ["ElasticLauncher", "ElasticOutcome"]


class ElasticLog(MemberLog):
    """The rows of members.jsonl, and the counts of the summary."""

    def __init__(
        self, on_event: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(on_event, clock)
        self._view = EpochView(epoch=0, seats=())
        self._arrived: set[int] = set()
        self._redone = 0  # steps computed twice up to the last reported epoch
        self._num_lost = self._num_joined = 0

    def lose(self, event: str, member: int, sentence: str) -> None:
        """Record that a member `died`, or is `silent`."""
        if event == "silent":
            sentence = f"{sentence}; it is killed, and the others go on without it"
        self._num_lost += event == "died"
        self.lost(event, member, self.names[member], sentence)

    def published(self, view: EpochView) -> None:
        """Record a new epoch."""
        self._view, self._arrived = view, set()
        seats = [{"slot": seat.slot, "member": seat.member, "fresh": seat.fresh} for seat in view.seats]
        self.view(view.epoch, [], seats, [seat.member for seat in view.seats])

    def arrived(self, report: ArrivedInEpoch, redone: int) -> None:
        """Record that a member takes part in an epoch; with the last one the run is complete again.

        `redone` steps were computed twice so far.
        """
        view = self._view
        if report.epoch != view.epoch or report.member in self._arrived:
            return
        self._arrived.add(report.member)
        if view.epoch == 1:
            self.tell("joined", report.member)
        elif view.seats[view.rank_of(report.member)].fresh:
            self._num_joined += 1
            donor = self.names[view.donor] if view.donor is not None else "nobody"
            sentence = (
                f"{self.names[report.member]} joined after step {report.step}, with the state of {donor}"
            )
            self.tell("joined", report.member, sentence=sentence)
        if len(self._arrived) == len(view.seats):
            self._complete(report, redone)

    def _complete(self, report: ArrivedInEpoch, redone: int) -> None:
        again, self._redone = redone - self._redone, redone
        if not self._lost:
            return
        what, count = " and ".join(self._lost), len(self._view.seats)
        were = "were" if len(self._lost) > 1 else "was"
        self._lost = {what: min(self._lost.values())}
        there = f"{count} workers go" if count > 1 else "1 worker goes"
        twice = f"; step {report.step + 1} is computed again" if again else ""
        sentence = f"{there} on after step {report.step}, {{seconds}} s after {what} {were} lost{twice}"
        self.recovered(self._view.seats[0].member, what, sentence)

    def summary(self, membership: ElasticMembership) -> Mapping[str, Any]:
        """Return the counts for the run's summary."""
        return {
            "epochs": membership.view.epoch,
            "changes": membership.changes,
            "lost": self._num_lost,
            "joined": self._num_joined,
            "steps_computed_twice": membership.redone,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOutcome:
    """What the members reported at the end of the run."""

    done: Done
    """The report of the member that left the weights."""

    sent: SentFor
    membership: Mapping[str, Any]
    recoveries: Sequence[Mapping[str, Any]]


class ElasticLauncher(RunLauncher[ElasticMembers]):
    """Runs one job to its end; `run` is called once.

    `rings` has one ring for each possible slot; `assemble` creates the members. `on_note` receives what workers
    report, `on_event` what happens to members. Commands, from any thread, change the slots during the run.
    """

    _membership: ElasticMembership
    _log: ElasticLog

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
        super().__init__(
            assemble,
            rings,
            most_slots=len(rings),
            reports=REPORTS,
            orders=ORDERS,
            commands=commands,
            watchdog_s=watchdog_s,
        )
        self._timeout_s, self._on_note, self._stop_wanted = timeout_s, on_note, stop_wanted
        self._membership = ElasticMembership(plan)
        self._log = ElasticLog(on_event)
        self._last_lost = -1  # the slot
        self._payloads: dict[int, Mapping[str, Any]] = {}
        self._done: Done | None = None
        self._ending = False

    def run(self) -> ElasticOutcome:
        """Start all members, drive the run to its end, and return its outcome."""
        self._run()
        assert self._done is not None, "a run is over when somebody is done"
        return ElasticOutcome(
            done=self._done,
            sent=sum((SentFor.from_dict(one["sent"]) for one in self._payloads.values()), SentFor()),
            membership=self._log.summary(self._membership),
            recoveries=self._log.recoveries,
        )

    def _poll(self) -> None:
        super()._poll()
        if not self._closing and self._stop_wanted():
            self._stop()

    def _stop(self) -> None:
        if not self._ending:
            self._ending = True
            for member in self._members.members:
                self._send(member, EndSoon())

    def _hear(self, member: int, report: Any) -> None:
        if isinstance(report, WorkerNote):
            self._on_note(report)
            return
        if self._closing:
            return
        match report:
            case Done():
                self._done = report
            case ArrivedInEpoch():
                self._log.arrived(report, self._membership.redone)
            case MemberReady() if self._ending:
                self._send(member, EndSoon())  # it was not there when the others were told
        self._do(self._membership.handle(report))

    def _lost(self, event: str, member: int, sentence: str) -> None:
        if event == "died":
            self._last_lost = self._slots[member]
        self._log.lose(event, member, sentence)

    def _ended_well(self, member: int, payload: Mapping[str, Any]) -> None:
        self._payloads[member] = payload
        if not self._closing:
            self._log.tell("left", member)

    def _failed_late(self, member: int, failure: Failure) -> None:
        """The weights are already in place, so failures are harmless."""

    def _failed(self, sentence: str) -> Exception:
        return WorkerFailed(sentence, worker_rank=self._last_lost)

    def _act(self, action: ElasticAction) -> None:
        match action:
            case Ask(epoch=epoch, members=members):
                for member in members:
                    self._send(member, GatherEpoch(epoch=epoch))
            case Abort(epoch=epoch, members=members):
                self._members.abort()
                for member in members:
                    self._send(member, LeaveEpoch(epoch=epoch))
            case BeginEpoch(view=view):
                self._members.begin(view)  # each member has the resources of the epoch before its view
                for seat in view.seats:
                    self._send(seat.member, view)
                self._log.published(view)
            case Dismiss(member=member):
                self._send(member, Depart())
            case RunOver():
                self._over = True

    def _finish(self) -> None:
        """Wait for the last reports."""
        self._closing = True
        deadline = time.monotonic() + self._timeout_s
        while self._members.members:
            if time.monotonic() > deadline:
                names = ", ".join(self._log.names[member] for member in self._members.members)
                raise PeerTimeout(f"{names} did not end within {self._timeout_s:g} s of the run's end", -1)
            self._poll()
