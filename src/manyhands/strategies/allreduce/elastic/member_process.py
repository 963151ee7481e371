"""The lifecycle of one member's process: join, train, and make sure that the lowest member leaves the weights.

It is a child of the launcher (`work`), or was started by somebody else, on any host (`take_slot`).
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from manyhands.data.store.checkpoint import CheckpointStore, Loaded, Snapshot
from manyhands.data.store.rundir import RunDirectory
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import SentFor
from manyhands.engine.worker import Trained, Trainer
from manyhands.errors import Aborted
from manyhands.native.threads import use_threads, with_threads
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind
from manyhands.places.local.control import Context, RoleContext, TypedNotes
from manyhands.places.local.packed_job import load
from manyhands.strategies.allreduce.elastic.elastic_membership import Done
from manyhands.strategies.allreduce.elastic.epochs import (
    Epochs,
    LinkedEpochs,
    SharedEpochs,
    Wiring,
    write_file,
)
from manyhands.strategies.allreduce.elastic.exchange import ElasticExchange
from manyhands.strategies.allreduce.elastic.member_control import Departed, ListeningContext, MemberLine
from manyhands.strategies.allreduce.strategy import AllReduce

if TYPE_CHECKING:  # a worker of one host needs nothing of it
    from manyhands.places.external.control_connection import ControlConnection
    from manyhands.places.external.process_group import GroupMember, ProcessGroup

_WAIT_S: Final = 0.5
START, WEIGHTS, CHECKPOINT = "start", "weights", "checkpoint"
"""The names under which leader and member send each other what is too large for a message."""


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """The settings that all members share."""

    plan: TrainingPlan
    strategy: AllReduce
    timeout_s: float
    threads: int
    run_path: Path | None
    keep_checkpoints: int
    resume_step: int | None
    """The step of the checkpoint to begin with; a member that joins later gets its state from a donor."""
    wiring: Wiring | None = None  # how members reach each other over links; None if all share memory


@dataclass(frozen=True, kw_only=True)
class ElasticPart:
    """What connects one member's process to the run."""

    context: ListeningContext
    member: int
    slot: int
    ring: EventRing
    checkpoints: CheckpointStore | None
    leave_weights: Callable[[Mapping[str, torch.Tensor]], None]  # on the lowest member, at the end of the run
    resume: Callable[[], Loaded | None]  # the checkpoint that the run begins with, for the first epoch
    early: Sequence[Mapping[str, Any]] = ()  # messages that the launcher has sent before


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSlot:
    """The leader tells a process which member it is, with the settings that only the leader knows."""

    member: int
    slot: int
    threads: int
    resumes: bool  # whether the checkpoint that the run begins with follows
    checkpoints: str | None  # the leader's folder, if the run keeps one; only the leader can write there


PARTS: Final = TypedNotes(TakeSlot)


def wiring_of(party: ProcessGroup | GroupMember) -> Wiring:
    return Wiring(address=party.address or "127.0.0.1", token=party.token, security=party.security)


def work(context: RoleContext, *, slot: int) -> Mapping[str, Any]:
    """Be the worker of `slot` as a child of the launcher, and return its final report."""
    job: ElasticJob = load(context.descriptor("job"))
    use_threads(job.threads)
    files = socket.socket(fileno=context.descriptor("files"))
    with files, EventRing.attach(context.descriptor("events")) as ring:
        directory = RunDirectory.open(job.run_path, lock=False) if job.run_path is not None else None
        checkpoints = directory.checkpoints(job.keep_checkpoints) if directory is not None else None

        def resume() -> Loaded | None:  # a run that is resumed has a directory
            step = job.resume_step
            return checkpoints.load(step) if step is not None and checkpoints is not None else None

        part = ElasticPart(
            context=context,
            member=context.rank,
            slot=slot,
            ring=ring,
            checkpoints=checkpoints,
            leave_weights=lambda weights: write_file(context.descriptor("weights"), encode_tensors(weights)),
            resume=resume,
        )
        epochs: Epochs = SharedEpochs(files, job.timeout_s)
        if job.wiring is not None:
            epochs = LinkedEpochs(job.wiring, job.timeout_s)
        return _train(job, part, epochs)


def _train(job: ElasticJob, part: ElasticPart, epochs: Epochs) -> Mapping[str, Any]:
    """Run one member, which owns `epochs`, to its end, and return its final report."""
    joined = time.monotonic_ns()
    with ExitStack() as stack:
        stack.enter_context(closing(epochs))
        line = stack.enter_context(closing(MemberLine(part.context, part.member, job.timeout_s, part.early)))
        worker_context = _MemberContext(part.context, part.ring, line)
        exchange = stack.enter_context(closing(ElasticExchange(job.strategy, line, part.slot, epochs)))
        trainer = None
        try:
            start = exchange.receive() or part.resume()
            part.ring.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
            trainer = Trainer(job.plan, exchange, worker_context, part.checkpoints)
            _end(part, line, exchange, trainer, trainer.run(start))
        except Departed:
            pass  # dismissed
        part.ring.record(EventKind.LEAVE, time.monotonic_ns())
        sent = trainer.sent() if trainer is not None else SentFor(control=exchange.meter.traffic())
    return {"sent": sent.to_dict()}


def _end(
    part: ElasticPart, line: MemberLine, exchange: ElasticExchange, trainer: Trainer, trained: Trained
) -> None:
    """The lowest member of the epoch leaves the weights; all members stay until one has."""
    exchange.at_border = False
    left = False
    while not line.departs and not part.context.stopping:
        exchange.follow()
        if exchange.rank == 0 and not left:
            trainer.reporter.save_missing(trained.steps_done, trained.model)
            part.leave_weights(trained.weights if trained.weights is not None else trained.model.state_dict())
            line.tell(
                Done(
                    member=line.member,
                    epoch=exchange.channel.epoch,
                    steps_done=trained.steps_done,
                    samples=trained.samples,
                    seconds=trained.seconds,
                    stopped_early=trained.stopped_early,
                )
            )
            left = True
        if line.must_leave(exchange.channel.epoch):
            exchange.leave()
        elif not line.departs:
            line.wait(exchange.channel.epoch)


class _MemberContext:
    """The worker context of a member: its ring, its row of the status table, its control connection."""

    def __init__(self, context: Context, ring: EventRing, line: MemberLine) -> None:
        self.record, self.mark = ring.record, context.mark
        self.stop_requested, self.note = line.stop_requested, line.tell


def take_slot(party: GroupMember, job: ElasticJob) -> Mapping[str, Any]:
    """Be the worker that the leader assigns, to the end, and return its report. Aborted if the run ended before.

    `job` has the settings of this process, without those that only the leader knows.
    """
    line = party.connection
    while line.stop_requested() or not (early := line.received()):  # as long as the leader lives
        if line.stop_requested():
            sentence = f"the run ended before {line.name} joined it"
            raise Aborted(line.over.sentence if line.over is not None else sentence)
        select.select([line.control_fileno()], [], [], _WAIT_S)
    part: TakeSlot = PARTS.read(early[0])
    start = Loaded.of(unpack_tree(line.take(START, job.timeout_s))) if part.resumes else None
    mine = ElasticPart(
        context=line,
        member=part.member,
        slot=part.slot,
        ring=line.ring,
        checkpoints=_SentCheckpoints(line, Path(part.checkpoints)) if part.checkpoints is not None else None,
        leave_weights=lambda weights: line.give(WEIGHTS, list(map(bytes, encode_tensors(weights)))),
        resume=lambda: start,
        early=early[1:],
    )
    try:
        with with_threads(part.threads):
            return _train(job, mine, LinkedEpochs(wiring_of(party), job.timeout_s))
    except Aborted:
        if line.over is not None:  # it knows more than that this one was to stop
            raise Aborted(line.over.sentence) from None
        raise


class _SentCheckpoints(CheckpointStore):
    """Checkpoints that are sent to the leader, which stores them in its folder."""

    def __init__(self, line: ControlConnection, folder: Path) -> None:
        super().__init__(folder)
        self._line = line

    def save(self, snapshot: Snapshot, spare_from: int | None = None) -> Path:
        """Send a checkpoint and return the path it will have; the leader reports what goes wrong in writing it."""
        del spare_from
        tree = {name: dict(getattr(snapshot, name)) for name in ("model", "optimizer", "extra")} | {
            "step": snapshot.step,
            "score": snapshot.score,
            "may_hold_infinity": sorted(snapshot.may_hold_infinity),
        }
        self._line.give(CHECKPOINT, list(map(bytes, pack_tree(tree))))  # copies: tensors change meanwhile
        return self.path_of(snapshot.step)
