"""Elastic training as `fit` requests it: sets up memory and processes, and launches, watches and replaces workers."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import CheckpointStore, Loaded, Snapshot
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.data.store.tensorfile import read_tensors
from manyhands.engine.computing import worker_environment
from manyhands.engine.exchange import SentFor
from manyhands.engine.reporting import WorkerNote
from manyhands.engine.request import Request
from manyhands.engine.run import RowsInOrder
from manyhands.engine.training import Result, Stage, Training
from manyhands.errors import ManyhandsError, PeerTimeout, WorkerFailed, num_of
from manyhands.native.group.shared_group import warm
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.local.failure import Failure
from manyhands.places.local.host import host_identity, threads_per_role
from manyhands.places.local.supervisor import Ended, Event, Hung
from manyhands.places.local.watchdog import Watched
from manyhands.places.place import MORE_WORKERS, Command
from manyhands.strategies.allreduce.elastic import elastic_membership as core
from manyhands.strategies.allreduce.elastic import member_process as process
from manyhands.strategies.allreduce.elastic.epochs import EpochFiles, Wiring, send_files, write_file
from manyhands.strategies.allreduce.elastic.member_control import ORDERS, REPORTS
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common import run_launcher


# The processes of an elastic run: children, or externally started on any hosts. The slot of an external worker is its
# rank. Slot 0 is a child of the leader: a worker that is lost must not take the leader with it. What a child would
# leave in the leader's memory or directory, others send: weights at the end, and the checkpoints that are due while the
# lowest worker is on another host.
class LocalElasticMembers(run_launcher.ChildMembers):
    """Children of this process, which share memory; a context manager.

    `rings` has one ring for each possible slot; `weights` is where the final weights are left.
    """

    def __init__(
        self,
        job: process.ElasticJob,
        rings: Sequence[EventRing],
        weights: int,
        num_members: int,
        watched: Watched,
    ) -> None:
        super().__init__(job, num_members, watched)
        self._rings, self.weights = rings, weights
        self._connections: dict[int, socket.socket] = {}
        self._files: EpochFiles | None = None

    def close(self) -> None:
        try:
            super().close()
        finally:
            for connection in self._connections.values():
                connection.close()
            if self._files is not None:
                self._files.close()

    def start_worker(self, member: int, slot: int) -> str:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = {"events": self._rings[slot].descriptor, "weights": self.weights, "files": theirs.fileno()}
        env = worker_environment(self._job.plan, self._job.threads)
        with theirs:
            self._connections[member] = ours
            return self.start_child(member, f"worker {slot}", partial(process.work, slot=slot), files, env)

    def begin(self, view: core.EpochView) -> None:
        if self._files is not None:
            self._files.close()
        self._files = EpochFiles(len(view.seats), self._job.strategy, with_state=view.has_fresh)
        for rank, seat in enumerate(view.seats):
            connection = self._connections.get(seat.member)
            try:
                if connection is not None:
                    send_files(connection, view.epoch, self._files.of(rank))
            except OSError:  # it is dead or not reading: either way it does not enter this epoch
                self.kill(seat.member)
        self._files.passed.close()

    def abort(self) -> None:
        assert self._files is not None, "an epoch that is ended was begun"
        self._files.group.abort()

    def poll(self, timeout_s: float) -> list[Event | Hung]:
        events = super().poll(timeout_s)
        for event in events:
            if isinstance(event, Ended):
                self._connections.pop(event.member).close()
        return events


class ExternalElasticMembers(run_launcher.ExternalMembers):
    """Externally started members over control connections, and the leader's child."""

    def __init__(
        self,
        process_group: ProcessGroup,
        child: LocalElasticMembers,
        checkpoints: CheckpointStore | None,
        start: Loaded | None,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(process_group.control_server, child, say)
        self._local, self._checkpoints = child, checkpoints
        names = ("step", "model", "optimizer", "extra")
        self._start = {name: getattr(start, name) for name in names} if start is not None else None

    def start_worker(self, member: int, slot: int) -> str:
        if slot == 0:
            return self._local.start_worker(member, slot)
        self._want(slot, member)
        return self._name(slot)

    def begin(self, view: core.EpochView) -> None:
        del view
        self._start = None

    def abort(self) -> None:
        """Nothing to do here: each member ends its waits when it is told to leave."""

    def _name(self, rank: int) -> str:
        return f"worker {rank}"

    def _give_part(self, rank: int, member: int) -> None:
        kept, control_server = self._checkpoints, self._control_server
        host = control_server.host_of(rank)
        workers = sum(control_server.host_of(other) == host for other in control_server.members)
        part = process.TakeSlot(
            member=member,
            slot=rank,
            threads=threads_per_role(workers + (host == host_identity())),
            resumes=self._start is not None,
            checkpoints=str(kept.folder) if kept is not None else None,
        )
        control_server.tell(rank, process.PARTS.write(part))
        if self._start is not None:
            control_server.give(rank, process.START, pack_tree(self._start))

    def _receive(self, rank: int, name: str, data: bytearray) -> None:
        """Store what a member sent where a child would leave it; a full disk loses it, but does not fail the run."""
        try:
            if name == process.WEIGHTS:
                write_file(self._local.weights, [bytes(data)])
            elif name == process.CHECKPOINT and self._checkpoints is not None:
                tree = unpack_tree(data)
                infinite = frozenset(tree.pop("may_hold_infinity"))
                self._checkpoints.save(Snapshot(**tree, may_hold_infinity=infinite))
            else:
                raise ManyhandsError(f"{name[:80]!r} is nothing that a worker sends")
        except WriteFailed as error:
            self._say(str(error))
        except (ManyhandsError, KeyError, TypeError) as error:
            self._refuse(rank, error)


ElasticMembers = LocalElasticMembers | ExternalElasticMembers
_Members = AbstractContextManager[ElasticMembers]  # on exit from it none of them remains


class ElasticLog(run_launcher.MemberLog):
    """The rows of members.jsonl, and the counts of the summary."""

    def __init__(
        self, on_event: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(on_event, clock)
        self._view = core.EpochView(epoch=0, seats=())
        self._arrived: set[int] = set()
        self._redone = 0  # steps computed twice up to the last reported epoch
        self._num_lost = self._num_joined = 0

    def lose(self, event: str, member: int, sentence: str) -> None:
        if event == "silent":
            sentence = f"{sentence}; it is killed, and the others continue without it"
        self._num_lost += event == "died"
        self.lost(event, member, self.names[member], sentence)

    def published(self, view: core.EpochView) -> None:
        self._view, self._arrived = view, set()
        seats = [{"slot": seat.slot, "member": seat.member, "fresh": seat.fresh} for seat in view.seats]
        self.view(view.epoch, [], seats, [seat.member for seat in view.seats])

    def arrived(self, report: core.ArrivedInEpoch, redone: int) -> None:
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

    def summary(self, membership: core.ElasticMembership) -> dict[str, Any]:
        return {
            "epochs": membership.view.epoch,
            "changes": membership.changes,
            "lost": self._num_lost,
            "joined": self._num_joined,
            "steps_computed_twice": membership.redone,
        }


class ElasticLauncher(run_launcher.RunLauncher[ElasticMembers]):
    """Runs one job to its end; `run` is called once.

    `rings` has one ring for each possible slot; `assemble` creates the members. `on_note` receives what workers
    report, `on_event` what happens to members. Commands, from any thread, change the slots during the run.
    """

    _membership: core.ElasticMembership
    _log: ElasticLog

    def __init__(
        self,
        membership: core.ElasticMembership,
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
        self._done: core.Done | None = None
        self._ending = False

    def run(self) -> tuple[core.Done, SentFor, dict[str, Any]]:
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
                self._send(member, core.EndSoon())

    def _hear(self, member: int, report: Any) -> None:
        if isinstance(report, WorkerNote):
            self._on_note(report)
            return
        if self._closing:
            return
        match report:
            case core.Done():
                self._done = report
            case core.ArrivedInEpoch():
                self._log.arrived(report, self._membership.redone)
            case core.MemberReady() if self._ending:
                self._send(member, core.EndSoon())  # it was not there when the others were told
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

    def _act(self, action: core.ElasticAction) -> None:
        match action:
            case core.Notify(members=members, order=order):
                if isinstance(order, core.LeaveEpoch):
                    self._members.abort()
                for member in members:
                    self._send(member, order)
            case core.BeginEpoch(view=view):
                self._members.begin(view)  # each member has the resources of the epoch before its view
                for seat in view.seats:
                    self._send(seat.member, view)
                self._log.published(view)
            case core.RunOver():
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
        job = replace(
            self._job(stage.run_path, process.wiring_of(process_group)), threads=threads_per_role(here)
        )

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
            stage.hear(replace(note, rows=tuple(rows)), order)

        with ExitStack() as stack:
            rings = [
                ring or stack.enter_context(EventRing.create(role=slot)) for slot, ring in enumerate(given)
            ]
            weights = os.memfd_create("manyhands:weights", os.MFD_CLOEXEC)
            stack.callback(os.close, weights)
            named = {f"worker-{slot}": ring for slot, ring in enumerate(rings)}
            collector = stack.enter_context(stage.collector(named))
            launcher = ElasticLauncher(
                core.ElasticMembership(request.workers, options.min_workers or 1),
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
            line.end(process.take_slot(member, self._job(None, process.wiring_of(member))))
        except Exception as error:
            if line.over is None:
                line.fail(error)
            raise

    def _job(self, run_path: Path | None, wiring: Wiring | None = None) -> process.ElasticJob:
        request = self._request
        return process.ElasticJob(
            plan=request.plan,
            strategy=self._strategy,
            timeout_s=request.options.timeout_s,
            threads=threads_per_role(request.workers),
            run_path=run_path,
            keep_checkpoints=request.options.keep_checkpoints,
            resume_step=self._start.step if self._start is not None else None,
            wiring=wiring,
        )
