"""Elastic training as `fit` requests it: sets up memory and processes, and launches, watches and replaces workers."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from manyhands.data.store.tensorfile import read_tensors
from manyhands.engine.exchange import SentFor
from manyhands.engine.reporting import WorkerNote
from manyhands.engine.request import Request
from manyhands.engine.run import RowsInOrder
from manyhands.engine.training import Result, Stage, Training
from manyhands.errors import PeerTimeout, WorkerFailed, num_of
from manyhands.native.group.shared_group import warm
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.local.failure import Failure
from manyhands.places.local.host import host_identity, threads_per_role
from manyhands.places.local.watchdog import Watched
from manyhands.places.run_commands import MORE_WORKERS, Command
from manyhands.strategies.allreduce.elastic.elastic_members import (
    ElasticMembers,
    ExternalElasticMembers,
    LocalElasticMembers,
)
from manyhands.strategies.allreduce.elastic.elastic_membership import (
    ArrivedInEpoch,
    BeginEpoch,
    Done,
    ElasticAction,
    ElasticMembership,
    EndSoon,
    EpochView,
    LeaveEpoch,
    MemberReady,
    Notify,
    RunOver,
)
from manyhands.strategies.allreduce.elastic.epochs import Wiring
from manyhands.strategies.allreduce.elastic.member_control import ORDERS, REPORTS
from manyhands.strategies.allreduce.elastic.member_process import ElasticJob, take_slot, wiring_of
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.run_launcher import MemberLog, RunLauncher

__all__ = ["ElasticTraining"]

_Members = AbstractContextManager[ElasticMembers]  # on exit from it none of them remains


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
        if event == "silent":
            sentence = f"{sentence}; it is killed, and the others continue without it"
        self._num_lost += event == "died"
        self.lost(event, member, self.names[member], sentence)

    def published(self, view: EpochView) -> None:
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
        elif view.seats[view.rank_of(report.member)].fresh and view.donor is not None:
            self._num_joined += 1
            name, donor = self.names[report.member], self.names[view.donor]
            sentence = f"{name} joined after step {report.step}, with the state of {donor}"
            self.tell("joined", report.member, sentence=sentence)
        if len(self._arrived) < len(view.seats):
            return
        again, self._redone = redone - self._redone, redone
        if not self._lost:
            return
        what, count = " and ".join(self._lost), len(view.seats)
        were = "were" if len(self._lost) > 1 else "was"
        self._lost = {what: min(self._lost.values())}
        there = f"{num_of(count, 'worker')} continue{'s' if count == 1 else ''}"
        twice = f"; step {report.step + 1} is computed again" if again else ""
        sentence = f"{there} after step {report.step}, {{seconds}} s after {what} {were} lost{twice}"
        self.recovered(view.seats[0].member, what, sentence)

    def summary(self, membership: ElasticMembership) -> dict[str, Any]:
        return {
            "epochs": membership.view.epoch,
            "changes": membership.changes,
            "lost": self._num_lost,
            "joined": self._num_joined,
            "steps_computed_twice": membership.redone,
        }


class ElasticLauncher(RunLauncher[ElasticMembers]):
    """Runs one job to its end; `run` is called once.

    `rings` has one ring for each possible slot; `assemble` creates the members. `on_note` receives what workers
    report, `on_event` what happens to members. Commands, from any thread, change the slots during the run.
    """

    _membership: ElasticMembership
    _log: ElasticLog

    def __init__(
        self,
        membership: ElasticMembership,
        rings: Sequence[EventRing],
        assemble: Callable[[Watched], _Members],
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
        self._membership, self._log = membership, ElasticLog(on_event)
        self._last_lost = -1  # the slot
        self._payloads: dict[int, Mapping[str, Any]] = {}
        self._done: Done | None = None
        self._ending = False

    def run(self) -> tuple[Done, SentFor, dict[str, Any]]:
        """Return what the member that left the weights reported, what all sent, and what happened to members."""
        self._run()
        assert self._done is not None, "a run is over when somebody is done"
        sent = sum((SentFor.from_dict(one["sent"]) for one in self._payloads.values()), SentFor())
        membership = self._log.summary(self._membership)
        return self._done, sent, {"membership": membership, "recoveries": self._log.recoveries}

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
            case Notify(members=members, order=order):
                if isinstance(order, LeaveEpoch):
                    self._members.abort()
                for member in members:
                    self._send(member, order)
            case BeginEpoch(view=view):
                self._members.begin(view)  # each member has the resources of the epoch before its view
                for seat in view.seats:
                    self._send(seat.member, view)
                self._log.published(view)
            case RunOver():
                self._over = True

    def _finish(self) -> None:
        self._closing = True
        deadline = time.monotonic() + self._timeout_s
        while self._members.members:
            if time.monotonic() > deadline:
                names = ", ".join(self._log.names[member] for member in self._members.members)
                raise PeerTimeout(f"{names} did not end within {self._timeout_s:g} s of the run's end", -1)
            self._poll()


class FirstRows:
    """Passes every row of the history once: a worker that replaces worker 0 reports the newest rows again. Pure."""

    def __init__(self, steps_done: int = 0) -> None:
        self._all_until = steps_done  # every step up to this one was reported
        self._steps: set[int] = set()  # reported steps after a gap that another worker is about to fill
        self._evaluated: set[int] = set()

    def of(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that no worker has reported before."""
        found = []
        for row in rows:
            step, reported = row["step"], self._evaluated if "metrics" in row else self._steps
            if step not in reported and (reported is self._evaluated or step > self._all_until):
                reported.add(step)
                found.append(row)
        while self._all_until + 1 in self._steps:
            self._all_until += 1
            self._steps.remove(self._all_until)
        return found


class ElasticTraining(Training):
    """`allreduce elastic=yes`: worker processes that join and leave, led by the launcher."""

    can_take_part: ClassVar[bool] = True
    comes_again: ClassVar[bool] = True

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, AllReduce), "only allreduce leads here"
        self._strategy = request.strategy

    def run(self, stage: Stage) -> Result:
        request, options = self._request, self._request.options
        most = request.workers + (MORE_WORKERS if options.commands is not None else 0)
        job = self._job(stage.run_path)

        def assemble(rings: Sequence[EventRing], weights: int, watched: Watched) -> _Members:
            return LocalElasticMembers(job, rings, weights, request.workers, watched)

        return self._run(stage, [None] * most, assemble, options.watchdog_s)

    def lead(self, stage: Stage, process_group: ProcessGroup) -> Result:
        """`run` with workers that were started externally, and one child of this process."""
        server = process_group.control_server
        here = 1 + sum(server.host_of(rank) == host_identity() for rank in server.members)
        job = replace(self._job(stage.run_path, wiring_of(process_group)), threads=threads_per_role(here))

        def assemble(rings: Sequence[EventRing], weights: int, watched: Watched) -> _Members:
            child, kept = LocalElasticMembers(job, rings, weights, 1, watched), stage.checkpoints()
            return ExternalElasticMembers(process_group, child, kept, self._start, stage.say)

        # A later worker already has a rank. A child that waits for externally started workers would look hung.
        rings = [server.rings[slot] if slot else None for slot in range(process_group.place.world)]
        return self._run(stage, rings, assemble, watchdog_s=0.0)

    def _run(
        self,
        stage: Stage,
        given: Sequence[EventRing | None],
        assemble: Callable[[Sequence[EventRing], int, Watched], _Members],
        watchdog_s: float,
    ) -> Result:
        """`given` has the event ring of each slot, None where it is made here."""
        request, options = self._request, self._request.options
        warm({torch.float64, *(parameter.dtype for parameter in self._model.parameters())})
        begun = self._start.step if self._start is not None else 0
        order, first = RowsInOrder(begun), FirstRows(begun)

        def hear(note: WorkerNote) -> None:
            rows = first.of(dict(row) for row in note.rows)
            stage.hear(WorkerNote(rows=tuple(rows), saved=note.saved, notice=note.notice), order)

        with ExitStack() as stack:
            rings = [
                ring or stack.enter_context(EventRing.create(role=slot)) for slot, ring in enumerate(given)
            ]
            weights = os.memfd_create("manyhands:weights", os.MFD_CLOEXEC)
            stack.callback(os.close, weights)
            named = {f"worker-{slot}": ring for slot, ring in enumerate(rings)}
            collector = stack.enter_context(stage.collector(named))
            launcher = ElasticLauncher(
                ElasticMembership(request.workers, options.min_workers or 1),
                rings,
                partial(assemble, rings, weights),
                timeout_s=options.timeout_s,
                on_note=hear,
                on_event=stage.take_event,
                stop_wanted=stage.stop_wanted,
                commands=options.commands,
                watchdog_s=watchdog_s,
            )
            try:
                with stage.view(collector):
                    done, sent, changes = launcher.run()
            finally:
                stage.take_rows(order.rest())
            collector.flush()
            observed = collector.summary()
            observed["per_worker"] = [
                one for one in observed["per_worker"] if one["worker"] < request.workers or one["steps"]
            ]
            self._model.load_state_dict(read_tensors(Path(f"/proc/self/fd/{weights}")))
        return Result(
            model=self._model,
            steps_done=done.steps_done,
            samples=done.samples,
            seconds=done.seconds,
            stopped_early=done.stopped_early,
            sent=sent,
            observed={**observed, **changes},
        )

    def take_part(self, member: GroupMember) -> None:
        line = member.connection
        try:
            line.end(take_slot(member, self._job(None, wiring_of(member))))
        except Exception as error:
            if line.over is None:
                line.fail(error)
            raise

    def _job(self, run_path: Path | None, wiring: Wiring | None = None) -> ElasticJob:
        request = self._request
        return ElasticJob(
            plan=request.plan,
            strategy=self._strategy,
            timeout_s=request.options.timeout_s,
            threads=threads_per_role(request.workers),
            run_path=run_path,
            keep_checkpoints=request.options.keep_checkpoints,
            resume_step=self._start.step if self._start is not None else None,
            wiring=wiring,
        )
