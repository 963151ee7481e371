"""The whole life of one member's process: come in, train, and see that the weights are left by whoever is lowest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyhands.allreduce.elastic.changes import Done
from manyhands.allreduce.elastic.exchange import ElasticExchange
from manyhands.allreduce.elastic.line import Departed, MemberLine
from manyhands.allreduce.elastic.state import write_file
from manyhands.allreduce.strategy import AllReduce
from manyhands.cluster.context import RoleContext
from manyhands.cluster.job import load
from manyhands.record.events import EventKind
from manyhands.record.ring import EventRing
from manyhands.store.rundir import RunDirectory
from manyhands.store.tensorfile import encode_tensors
from manyhands.training.computing import TrainingPlan
from manyhands.training.exchanging import told
from manyhands.training.reporting import WorkerNote
from manyhands.training.worker import Trained, Trainer

__all__ = ["ElasticJob", "work"]


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """What every member is told; the same for all of them."""

    plan: TrainingPlan
    strategy: AllReduce
    timeout_s: float
    threads: int
    run_path: Path | None
    keep_checkpoints: int
    resume_step: int | None
    """Begin with the checkpoint of this step; whoever joins later has its state from another."""


def work(context: RoleContext, *, slot: int) -> Mapping[str, Any]:
    """Be the worker of `slot`; what it tells at its end."""
    joined = time.monotonic_ns()
    job: ElasticJob = load(context.descriptor("job"))
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        ring = stack.enter_context(EventRing.attach(context.descriptor("events")))
        line = stack.enter_context(closing(MemberLine(context, job.timeout_s)))
        around = _Around(context, ring, line)
        directory = RunDirectory.open(job.run_path, lock=False) if job.run_path is not None else None
        checkpoints = directory.checkpoints(job.keep_checkpoints) if directory is not None else None
        exchange = stack.enter_context(closing(ElasticExchange(job.strategy, line, slot, job.timeout_s)))
        try:
            start = exchange.receive()
            if start is None and job.resume_step is not None:
                assert checkpoints is not None, "a run that is resumed has a directory"
                start = checkpoints.load(job.resume_step)
            ring.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
            trainer = Trainer(job.plan, exchange, around, checkpoints)
            _end(context, line, exchange, trainer, trainer.run(start))
        except Departed:
            pass  # removed, or not needed any more
        ring.record(EventKind.LEAVE, time.monotonic_ns())
        traffic = exchange.traffic()
    return told(traffic)


def _end(
    context: RoleContext, line: MemberLine, exchange: ElasticExchange, trainer: Trainer, trained: Trained
) -> None:
    """The lowest of those who are there leaves the weights; all stay until somebody has."""
    view = exchange.end()
    left = False
    while not line.departs and not context.stopping:
        if view is not None:
            exchange.follow(view)
            view = None
        if exchange.rank == 0 and not left:
            trainer.leave_owed(trained.steps_done, trained.model)
            weights = trained.weights if trained.weights is not None else trained.model.state_dict()
            write_file(context.descriptor("weights"), encode_tensors(weights))
            line.tell(
                Done(
                    member=line.member,
                    epoch=exchange.epoch,
                    steps_done=trained.steps_done,
                    samples=trained.samples,
                    seconds=trained.seconds,
                    stopped_early=trained.stopped_early,
                )
            )
            left = True
        if line.is_told_to_leave(exchange.epoch):
            view = exchange.leave()
        elif not line.departs:
            line.wait()


class _Around:
    """The surroundings of a member: its ring, its line on the board, its line to the launcher."""

    def __init__(self, context: RoleContext, ring: EventRing, line: MemberLine) -> None:
        self.record = ring.record
        self.mark = context.mark
        self.stop_requested = line.stop_requested
        self._line = line

    def note(self, note: WorkerNote) -> None:
        """Send something to the launcher."""
        self._line.tell(note)
