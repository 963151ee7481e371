"""A worker as a process of the local cluster: what the launcher gives it, and what the child does with that.

The parent makes the shared memory, links and rings of a run (`WorkerFiles`); each child attaches its own ends, trains,
and leaves the final weights in a memory file that only worker 0 writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from manyhands.allreduce.algorithms import ALGORITHMS, grouped
from manyhands.allreduce.collective import ScheduleCollective, SharedCollective
from manyhands.allreduce.exchange import AllReduceExchange
from manyhands.allreduce.executor import ScheduleExecutor
from manyhands.allreduce.schedule import Algorithm
from manyhands.allreduce.shared import SharedGroup, SharedGroupFiles
from manyhands.central.exchange import CentralExchange
from manyhands.cluster.context import RoleContext
from manyhands.computing import TrainingPlan
from manyhands.exchange import Exchange, SingleExchange, Traffic
from manyhands.hogwild.trainer import HogwildTrainer
from manyhands.link.base import Link
from manyhands.link.mesh import SharedMesh, attach_mesh
from manyhands.link.shared import LinkDescriptors
from manyhands.observe.events import EventKind
from manyhands.observe.ring import EventRing
from manyhands.reporting import Surroundings
from manyhands.store.checkpoint import CheckpointStore, Loaded
from manyhands.store.rundir import RunDirectory
from manyhands.store.tensorfile import encode_tensors, read_tensors
from manyhands.strategy import AllReduce, Central, Hogwild, Mirrored, Strategy
from manyhands.worker import Trained, Trainer

__all__ = ["WorkerFiles", "WorkerJob", "exchange_for", "needs_links", "work"]


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """What every worker process is told; the same for all of them."""

    plan: TrainingPlan
    strategy: Strategy
    timeout_s: float
    threads: int
    run_path: Path | None
    keep_checkpoints: int
    resume_step: int | None
    """Go on from the checkpoint of this step."""


class WorkerFiles:
    """Everything that the workers of a run share, in the process that starts them; a context manager."""

    def __init__(self, strategy: Strategy, workers: int) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.group = stack.enter_context(SharedGroupFiles.create(workers))
            self.rings = [stack.enter_context(EventRing.create(role=rank)) for rank in range(workers)]
            self._mesh = stack.enter_context(SharedMesh.create(workers if needs_links(strategy) else 1))
            self._weights = os.memfd_create("manyhands:weights", os.MFD_CLOEXEC)
            stack.callback(os.close, self._weights)
            self._stack = stack.pop_all()

    def descriptors(self, rank: int) -> dict[str, int]:
        """What the worker of `rank` inherits, by name."""
        links = {
            f"link {peer} {part}": descriptor
            for peer, files in self._mesh.descriptors(rank).items()
            for part, descriptor in zip(LinkDescriptors._fields, files, strict=True)
        }
        return {
            "control": self.group.control,
            "arena": self.group.arena,
            "events": self.rings[rank].descriptor,
            "weights": self._weights,
            **links,
        }

    def read_weights(self) -> dict[str, torch.Tensor]:
        """The final weights that worker 0 left."""
        return read_tensors(Path(f"/proc/self/fd/{self._weights}"))

    def close(self) -> None:
        """Let go of everything; idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def work(context: RoleContext, job: WorkerJob) -> Mapping[str, Any]:
    """The whole life of a worker process, from joining to its report."""
    joined = time.monotonic_ns()
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        ring = stack.enter_context(EventRing.attach(context.descriptor("events")))
        around = _Process(context, ring)
        directory = RunDirectory.open(job.run_path, lock=False) if job.run_path is not None else None
        checkpoints = directory.checkpoints(job.keep_checkpoints) if directory is not None else None
        start = None
        if job.resume_step is not None:
            assert checkpoints is not None, "a run that is resumed has a directory"
            start = checkpoints.load(job.resume_step)
        train = _train_together if isinstance(job.strategy, Hogwild) else _train_by_exchange
        worker = stack.enter_context(train(context, job, around, checkpoints))
        around.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
        trained, told = worker(start)
        if context.rank == 0:
            _leave_weights(context.descriptor("weights"), trained.model)
        around.record(EventKind.LEAVE, time.monotonic_ns())
    return {
        "steps_done": trained.steps_done,
        "samples": trained.samples,
        "seconds": trained.seconds,
        "stopped_early": trained.stopped_early,
        **told,
    }


_Train = Callable[[Loaded | None], tuple[Trained, Mapping[str, Any]]]
"""Trains, and gives what else there is to tell."""


@contextmanager
def _train_by_exchange(
    context: RoleContext, job: WorkerJob, around: Surroundings, checkpoints: CheckpointStore | None
) -> Iterator[_Train]:
    with closing(_connect(context, job)) as exchange:

        def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
            trained = Trainer(job.plan, exchange, around, checkpoints).run(start)
            return trained, _told(exchange.traffic())

        yield train


@contextmanager
def _train_together(
    context: RoleContext, job: WorkerJob, around: Surroundings, checkpoints: CheckpointStore | None
) -> Iterator[_Train]:
    assert isinstance(job.strategy, Hogwild)
    group = _join(context, job)
    with closing(HogwildTrainer(job.plan, job.strategy.order, group, around, checkpoints)) as trainer:

        def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
            trained = trainer.run(start)
            return trained, {**_told(Traffic()), "overlap": dict(trainer.overlap)}

        yield train


def _told(traffic: Traffic) -> dict[str, Any]:
    return {"bytes_sent": traffic.bytes_sent, "messages_sent": traffic.messages_sent}


class _Process:
    """The surroundings of a worker that is a process: its ring, its line on the board, its channel."""

    def __init__(self, context: RoleContext, ring: EventRing) -> None:
        self.record = ring.record
        self.mark = context.mark
        self.note = context.send
        self.stop_requested = context.stop_requested


def _join(context: RoleContext, job: WorkerJob) -> SharedGroup:
    return SharedGroup(
        control=context.descriptor("control"),
        arena=context.descriptor("arena"),
        rank=context.rank,
        world=context.world,
        timeout_s=job.timeout_s,
    )


def _connect(context: RoleContext, job: WorkerJob) -> Exchange:
    group = _join(context, job)
    return exchange_for(job.strategy, group, lambda: _attach_links(context), job.timeout_s)


def exchange_for(
    strategy: Strategy, group: SharedGroup, open_links: Callable[[], Mapping[int, Link]], timeout_s: float
) -> Exchange:
    """One worker's end of `strategy` among the workers of one host, which share `group`.

    `open_links` is called where `needs_links`, for a link to each other worker.
    """
    if group.world == 1 and not isinstance(strategy, Central):
        group.close()
        return SingleExchange()  # nobody to exchange with
    match strategy:
        case Mirrored(buckets=buckets) | AllReduce(algorithm="direct", buckets=buckets):
            return AllReduceExchange(SharedCollective(group), buckets)
        case AllReduce(buckets=buckets):
            links = open_links()
            algorithm = _algorithm(strategy, group.world)
            executor = ScheduleExecutor(algorithm, group.rank, group.world, links, timeout_s)
            return AllReduceExchange(ScheduleCollective(executor, links, _arrival(group)), buckets)
        case Central(buckets=buckets):
            return CentralExchange(group, buckets)
        case other:
            raise AssertionError(f"{other} has no worker processes")


def needs_links(strategy: Strategy) -> bool:
    """Whether the workers of one host exchange over links, besides the memory they share."""
    return isinstance(strategy, AllReduce) and strategy.algorithm != "direct"


def _attach_links(context: RoleContext) -> Mapping[int, Link]:
    descriptors = {
        peer: LinkDescriptors(
            *(context.descriptor(f"link {peer} {part}") for part in LinkDescriptors._fields)
        )
        for peer in range(context.world)
        if peer != context.rank
    }
    return attach_mesh(context.rank, descriptors)


def _algorithm(strategy: AllReduce, world: int) -> Algorithm:
    if strategy.algorithm == "hierarchical":
        return grouped(strategy.group or world)  # one host is one group
    return ALGORITHMS[strategy.algorithm]


def _arrival(group: SharedGroup) -> Callable[[], Mapping[int, int]]:
    def arrive() -> Mapping[int, int]:
        group.barrier()
        waits = group.take_stats().waiting_ns
        return {peer: waited for peer, waited in enumerate(waits) if waited}

    return arrive


def _leave_weights(descriptor: int, model: nn.Module) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for chunk in encode_tensors(model.state_dict()):
            file.write(chunk)
