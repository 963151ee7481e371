"""Workers as processes of the local cluster: what the launcher gives them, and what each child does.

The parent makes the shared memory, links and rings of a run (`WorkerFiles`). Each child attaches its ends, trains,
and leaves the final weights in a memory file that only worker 0 writes. Imports that only the parent needs, or a run
across hosts, are made where they are used: the template process imports this module while the first run waits.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import FileStore, Store

from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.data.store.rundir import RunDirectory
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.engine.computing import TrainingPlan, worker_environment
from manyhands.engine.device import device_of
from manyhands.engine.exchange import SentFor
from manyhands.engine.reporting import NOTES, ProcessContext, WorkerContext
from manyhands.engine.run import RowsInOrder
from manyhands.engine.training import Result, Stage, Training
from manyhands.engine.worker import Trained
from manyhands.engine.worker_resources import Resources
from manyhands.native.closeable import Closeable
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles, warm
from manyhands.native.threads import use_threads
from manyhands.observe.record.event_ring import BlackBoxes, EventRing
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import role_name
from manyhands.places.local.control import RoleContext
from manyhands.places.local.host import threads_per_role
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import Mesh, mesh_kind

if TYPE_CHECKING:
    from manyhands.engine.external_workers import LeadingWorker, MemberWorker
    from manyhands.places.external.process_group import GroupMember, ProcessGroup
    from manyhands.places.local.children import Role
    from manyhands.places.local.watchdog import Watched
    from manyhands.transport.liveness import RendezvousStore

__all__ = ["ProcessTraining", "Train", "WorkerJob"]

# Trains from a checkpoint or from nothing, and gives what else there is to report
Train = Callable[[Loaded | None], tuple[Trained, Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """The job of every worker process; the same for all of them."""

    plan: TrainingPlan
    strategy: Strategy
    workers: int
    timeout_s: float
    threads: int
    run_path: Path | None
    keep_checkpoints: int
    resume_step: int | None  # continue from the checkpoint of this step


class ProcessTraining(Training):
    """Trains in worker processes; a strategy defines what one worker does.

    The processes are started on this host, or were started externally: then each process of the run is one worker.
    """

    can_take_part = True

    @classmethod
    @abstractmethod
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> AbstractContextManager[Train]:
        """In a worker's process: the context of its trainer; leaving it releases everything."""

    @classmethod
    def helper(
        cls, strategy: Strategy, resources: Resources, worker_context: WorkerContext
    ) -> Mapping[str, Any]:
        """In a helper's process, where the strategy has helpers: its whole part; returns its report."""
        raise NotImplementedError(f"{strategy} has no helpers")

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """From the workers' final reports: the samples of the run, and extra entries of its summary."""
        return finished[0]["samples"], {}

    def notices(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """From the workers' final reports: sentences for the summary."""
        del finished
        return ()

    def run(self, stage: Stage) -> Result:
        """Start the workers, process their notes, and read the weights that worker 0 left."""
        from manyhands.places.local.supervisor import LocalCluster

        request = self._request
        rows = RowsInOrder(self._start.step if self._start is not None else 0)
        warm({torch.float64, *(parameter.dtype for parameter in self._model.parameters())})
        with WorkerFiles(request.workers, request.strategy) as files:
            rings = {self._file_name(rank): ring for rank, ring in enumerate(files.rings)}
            with stage.collector(rings, request.workers) as collector:
                cluster = LocalCluster(
                    self._roles(files, stage),
                    on_note=lambda _rank, payload: stage.hear(NOTES.read(payload), rows),
                    on_failure=files.abort,
                    stop_wanted=stage.stop_wanted,
                    watched=watched(request.options.watchdog_s, files.rings),
                )
                try:
                    with stage.view(collector), cluster:
                        finished = [message.payload for message in cluster.run()]
                finally:
                    stage.take_rows(rows.rest())
                collector.flush()
                observed = collector.summary()
            self._model.load_state_dict(read_tensors(Path(f"/proc/self/fd/{files.weights}")))
        return self._result(finished, observed)

    def _file_name(self, rank: int) -> str:
        """The event file's name of a process: `worker-0`, or `helper-0`."""
        kind, number = self._request.strategy.role_of(rank, self._request.workers)
        return f"{kind}-{number}"

    def _result(self, finished: Sequence[Mapping[str, Any]], observed: Mapping[str, Any]) -> Result:
        samples, besides = self.gather(finished)
        return Result(
            model=self._model,
            steps_done=finished[0]["steps_done"],
            samples=samples,
            seconds=finished[0]["seconds"],
            stopped_early=finished[0]["stopped_early"],
            sent=sum((SentFor.from_dict(one["sent"]) for one in finished), SentFor()),
            observed={**observed, **besides},
            notes=self.notices(finished),
        )

    def lead(self, stage: Stage, process_group: ProcessGroup) -> Result:
        """Train as worker 0 in this process, and listen to the others, which run the same loop."""
        from manyhands.engine.external_workers import ORDERS, BeginTraining, ControlListener, LeadingWorker

        rows = RowsInOrder(self._start.step if self._start is not None else 0)
        with ExitStack() as stack:
            ring = stack.enter_context(EventRing.create(role=0))
            others_rings = process_group.control_server.rings.items()
            rings = {"worker-0": ring, **{self._file_name(rank): theirs for rank, theirs in others_rings}}
            collector = stack.enter_context(stage.collector(rings, self._request.workers))
            listener = stack.enter_context(ControlListener(process_group))
            worker_context = LeadingWorker(stage, process_group, listener, ring, rows)
            begin = BeginTraining(resumes=self._start is not None, keeps=stage.directory is not None)
            try:
                with stage.view(collector), worker_context:
                    process_group.tell_all(ORDERS.write(begin))
                    if self._start is not None:
                        process_group.give("start", partial(pack_tree, self._start.tree))
                    store, checkpoints = process_group.control_server.store, stage.checkpoints()
                    own = self._part(process_group, store, worker_context, checkpoints, self._start)
                    listener.wait_for_all(process_group.timeout_s)
            finally:
                worker_context.hear_others()
                stage.take_rows(rows.rest())
            collector.flush()
            observed = collector.summary()
        others = [listener.finished[rank] for rank in range(1, process_group.place.world)]
        return self._result([own, *others], observed)

    def take_part(self, member: GroupMember) -> None:
        """Train as one worker of a run that another process leads, from its first message to the last step."""
        from manyhands.engine.external_workers import MemberWorker, wait_for_orders

        line = member.connection
        with MemberWorker(line) as worker_context:
            orders = wait_for_orders(member)
            start = Loaded.of(unpack_tree(line.take("start", member.timeout_s))) if orders.resumes else None
            # Saving is collective, though worker 0 alone writes.
            checkpoints = CheckpointStore(Path(os.devnull)) if orders.keeps else None
            line.end(self._part(member, line.store, worker_context, checkpoints, start))

    def _part(
        self,
        party: ProcessGroup | GroupMember,
        store: RendezvousStore,
        worker_context: LeadingWorker | MemberWorker,
        checkpoints: CheckpointStore | None,
        start: Loaded | None,
    ) -> dict[str, Any]:
        """One worker's part, in this process; returns its report. Worker 0's weights become the model's."""
        from manyhands.engine.external_workers import connect_worker

        joined = time.monotonic_ns()
        job = self._job(None)
        plan, timeout_s = job.plan, job.timeout_s
        connecting = connect_worker(
            party, store, job.strategy, device=plan.device, seed=plan.seed, timeout_s=timeout_s
        )
        with ExitStack() as stack:
            worker_links = stack.enter_context(connecting)
            worker_context.linked_by(worker_links)
            if party.place.rank >= job.workers:
                worker_context.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
                helped = self.helper(job.strategy, worker_links.resources, worker_context)
                worker_context.record(EventKind.LEAVE, time.monotonic_ns())
                return dict(helped)
            train = stack.enter_context(self.worker(job, worker_links.resources, worker_context, checkpoints))
            worker_context.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
            trained, report = train(start)
            if party.place.leads:
                self._model.load_state_dict(trained.state_dict())
            worker_context.record(EventKind.LEAVE, time.monotonic_ns())
        return _report(trained, report)

    def _job(self, run_path: Path | None) -> WorkerJob:
        request = self._request
        return WorkerJob(
            plan=request.plan,
            strategy=request.strategy,
            workers=request.workers,
            timeout_s=request.options.timeout_s,
            threads=threads_per_role(request.workers),
            run_path=run_path,
            keep_checkpoints=request.options.keep_checkpoints,
            resume_step=self._start.step if self._start is not None else None,
        )

    def _roles(self, files: WorkerFiles, stage: Stage) -> list[Role]:
        from manyhands.places.local.children import Role

        request = self._request
        job = self._job(stage.run_path)
        return [
            Role(
                name=role_name(self._file_name(rank)),
                target=partial(_work if rank < request.workers else _help, job=job, training=type(self)),
                descriptors=files.descriptors(rank),
                env=worker_environment(job.plan, job.threads, loads=rank < request.workers),
            )
            for rank in range(len(files.rings))
        ]


def watched(deadline_s: float, rings: Sequence[EventRing]) -> Watched:
    from manyhands.places.local.watchdog import Watched

    boxes = BlackBoxes(dict(enumerate(rings)))
    return Watched(deadline_s=deadline_s, count_events=boxes.counts, last_events=boxes.last)


class WorkerFiles(Closeable):
    """The resources that the workers of a run share, in the process that starts them; a context manager."""

    def __init__(self, workers: int, strategy: Strategy) -> None:
        self._stack, self._workers = ExitStack(), workers
        world = sum(strategy.processes(workers).values())
        with ExitStack() as stack:
            self.group = stack.enter_context(SharedGroupFiles.create(workers))
            self.rings = [stack.enter_context(EventRing.create(role=rank)) for rank in range(world)]
            self._mesh: Mesh | None = None
            if strategy.facts.uses_links:
                self._mesh = stack.enter_context(mesh_kind(network=strategy.uses_network)(world))
            self.weights = os.memfd_create("manyhands:weights", os.MFD_CLOEXEC)
            stack.callback(os.close, self.weights)
            self._store = os.memfd_create("manyhands:store", os.MFD_CLOEXEC)
            stack.callback(os.close, self._store)
            self._stack = stack.pop_all()

    def descriptors(self, rank: int) -> dict[str, int]:
        links = {}
        if self._mesh is not None:
            links = {
                f"link {peer} {part}": descriptor
                for peer, files in self._mesh.descriptors(rank).items()
                for part, descriptor in zip(self._mesh.parts, files, strict=True)
            }
        return {
            "control": self.group.control,
            "arena": self.group.arena,
            "events": self.rings[rank].descriptor,
            "weights": self.weights,
            "store": self._store,
            **links,
        }

    def abort(self, rank: int) -> None:
        """End every wait of the others, on memory and on links, because the process of `rank` has failed."""
        self.group.abort(rank if rank < self._workers else None)
        if self._mesh is not None:
            self._mesh.close()  # a lifeline kept open here would hide the death

    def close(self) -> None:
        self._stack.close()


def _work(context: RoleContext, job: WorkerJob, training: type[ProcessTraining]) -> Mapping[str, Any]:
    joined = time.monotonic_ns()
    use_threads(job.threads)
    with ExitStack() as stack:
        ring = stack.enter_context(EventRing.attach(context.descriptor("events")))
        worker_context = ProcessContext(context, ring)
        directory = RunDirectory.open(job.run_path, lock=False) if job.run_path is not None else None
        checkpoints = directory.checkpoints(job.keep_checkpoints) if directory is not None else None
        start = None
        if job.resume_step is not None:
            assert checkpoints is not None, "a run that is resumed has a directory"
            start = checkpoints.load(job.resume_step)
        train = stack.enter_context(
            training.worker(job, _resources(context, job), worker_context, checkpoints)
        )
        worker_context.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
        trained, report = train(start)
        if context.rank == 0:
            with os.fdopen(os.dup(context.descriptor("weights")), "wb") as file:
                for chunk in encode_tensors(trained.state_dict()):
                    file.write(chunk)
        worker_context.record(EventKind.LEAVE, time.monotonic_ns())
    return _report(trained, report)


def _help(context: RoleContext, job: WorkerJob, training: type[ProcessTraining]) -> Mapping[str, Any]:
    joined = time.monotonic_ns()
    use_threads(job.threads)
    with EventRing.attach(context.descriptor("events")) as ring:
        worker_context = ProcessContext(context, ring)
        worker_context.record(EventKind.JOIN, joined, time.monotonic_ns() - joined)
        report = training.helper(job.strategy, _resources(context, job), worker_context)
        worker_context.record(EventKind.LEAVE, time.monotonic_ns())
    return report


def _report(trained: Trained, report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "steps_done": trained.steps_done,
        "samples": trained.samples,
        "seconds": trained.seconds,
        "stopped_early": trained.stopped_early,
        **report,
    }


def _resources(context: RoleContext, job: WorkerJob) -> Resources:
    def group() -> SharedGroup:
        return SharedGroup(
            control=context.descriptor("control"),
            arena=context.descriptor("arena"),
            rank=context.rank,
            world=job.workers,
            timeout_s=job.timeout_s,
        )

    def links() -> Mapping[int, Link]:
        kind = mesh_kind(network=job.strategy.uses_network)
        descriptors = {
            peer: [context.descriptor(f"link {peer} {part}") for part in kind.parts]
            for peer in range(context.world)
            if peer != context.rank
        }
        return kind.attach(context.rank, descriptors)

    def torch_store() -> Store:
        store = FileStore(f"/proc/self/fd/{context.descriptor('store')}", context.world)
        store.set_timeout(timedelta(seconds=job.timeout_s))
        return store

    return Resources(
        rank=context.rank,
        world=job.workers,
        helpers=context.world - job.workers,
        torch_store=torch_store,
        timeout_s=job.timeout_s,
        group=group,
        links=links,
        seed=job.plan.seed,
        device=device_of(job.plan.device, context.rank),
    )
