"""Workers as processes of the local cluster: what the launcher gives them, and what each child does.

The parent makes the shared memory, links and rings of a run (`WorkerFiles`). Each child attaches its ends, trains,
and leaves the final weights in a memory file that only worker 0 writes. Imports that only the parent needs, or a run
across hosts, are made where they are used: the template process imports this module while the first run waits.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
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
from manyhands.engine.exchange import Exchange, Resources, SentFor
from manyhands.engine.reporting import NOTES, ProcessContext, WorkerContext
from manyhands.engine.run import RowsInOrder
from manyhands.engine.text_speed import device_use, largest_use
from manyhands.engine.training import Result, Stage, Training, training_class
from manyhands.engine.worker import Trained, Trainer
from manyhands.errors import UserError
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
from manyhands.wire.choice import CHOSEN, codec_sentence
from manyhands.wire.names import RAW, auto_error

if TYPE_CHECKING:
    from manyhands.engine.external_workers import LeadingWorker, MemberWorker
    from manyhands.places.external.process_group import GroupMember, ProcessGroup
    from manyhands.transport.liveness import RendezvousStore

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
    """Trains in worker processes, started here or externally; a strategy defines what one worker does."""

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

    @classmethod
    def loop_exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        """One worker's exchange in a loop of the user's own."""
        raise NotImplementedError(f"{strategy} is not for a loop of one's own, or joins it in its own way")

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """From the workers' final reports: the samples of the run, and extra entries of its summary."""
        return finished[0]["samples"], {}

    def notices(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """From the workers' final reports: sentences for the summary."""
        del finished
        return ()

    def run(self, stage: Stage) -> Result:
        from manyhands.places.local.children import Role
        from manyhands.places.local.supervisor import LocalCluster
        from manyhands.places.local.watchdog import Watched

        request, job = self._request, self._job(stage.run_path)
        rows = RowsInOrder(self._start.step if self._start is not None else 0)
        warm({torch.float64, *(parameter.dtype for parameter in self._model.parameters())})
        with WorkerFiles(request.workers, request.strategy) as files:
            rings = {self._file_name(rank): ring for rank, ring in enumerate(files.rings)}
            boxes = BlackBoxes(dict(enumerate(files.rings)))
            deadline_s = request.options.watchdog_s
            roles = [
                Role(
                    name=role_name(name),
                    target=partial(_work, job=job, training=type(self)),
                    descriptors=files.descriptors(rank),
                    env=worker_environment(job.plan, job.threads, loads=rank < request.workers),
                )
                for rank, name in enumerate(rings)
            ]
            with stage.collector(rings, request.workers) as collector:
                cluster = LocalCluster(
                    roles,
                    on_note=lambda _rank, payload: stage.hear(NOTES.read(payload), rows),
                    on_failure=files.abort,
                    stop_wanted=stage.stop_wanted,
                    watched=Watched(deadline_s=deadline_s, count_events=boxes.counts, last_events=boxes.last),
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
            observed={**observed, **largest_use(finished), **besides},
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

        connection, start = member.connection, None
        with MemberWorker(connection) as worker_context:
            orders = wait_for_orders(member)
            if orders.resumes:
                start = Loaded.of(unpack_tree(connection.take("start", member.timeout_s)))
            # Saving is collective, though worker 0 alone writes.
            checkpoints = CheckpointStore(Path(os.devnull)) if orders.keeps else None
            connection.end(self._part(member, connection.store, worker_context, checkpoints, start))

    def _part(
        self,
        party: ProcessGroup | GroupMember,
        store: RendezvousStore,
        worker_context: LeadingWorker | MemberWorker,
        checkpoints: CheckpointStore | None,
        start: Loaded | None,
    ) -> Mapping[str, Any]:
        from manyhands.engine.external_workers import connect_worker

        joined_ns, job = time.monotonic_ns(), self._job(None)
        with connect_worker(
            party, store, job.strategy, device=job.plan.device, seed=job.plan.seed, timeout_s=job.timeout_s
        ) as worker_links:
            worker_context.connect(worker_links)
            part = partial(_take_part, type(self), job, worker_links.resources, worker_context)
            return part(checkpoints, start, joined_ns, self._model.load_state_dict)

    @property
    def _threads(self) -> int:
        """Of torch, in each process."""
        return threads_per_role(self._request.workers)

    def _job(self, run_path: Path | None) -> WorkerJob:
        request = self._request
        return WorkerJob(
            plan=request.plan,
            strategy=request.strategy,
            workers=request.workers,
            timeout_s=request.options.timeout_s,
            threads=self._threads,
            run_path=run_path,
            keep_checkpoints=request.options.keep_checkpoints,
            resume_step=self._start.step if self._start is not None else None,
        )


class ExchangeTraining(ProcessTraining):
    """Trains by the common loop with the strategy's exchange; a codec that is chosen stands in the summary."""

    @property
    def _chooses(self) -> bool:
        return auto_error(getattr(self._request.strategy, "codec", RAW)) is not None

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, CHOSEN: finished[0].get(CHOSEN)} if self._chooses else besides

    def notices(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return (codec_sentence(finished[0].get(CHOSEN)),) if self._chooses else ()

    @classmethod
    @abstractmethod
    def exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        """One worker's exchange of `strategy`, which is of this training's kind."""

    @classmethod
    def loop_exchange(cls, strategy: Any, resources: Resources) -> Exchange:
        return cls.exchange(strategy, resources)

    @classmethod
    def exchange_across_hosts(cls, strategy: Any, resources: Resources) -> tuple[Exchange, Any]:
        """Among several hosts: one worker's end, and a collective for small words over the links, or None."""
        return cls.exchange(strategy, resources), None

    @classmethod
    def end(cls, strategy: Any, resources: Resources) -> Exchange:
        if not resources.several_hosts:
            return cls.exchange(strategy, resources)
        return cls.exchange_across_hosts(strategy.across_hosts(resources.hosts), resources)[0]

    @classmethod
    def worker(
        cls,
        job: WorkerJob,
        resources: Resources,
        worker_context: WorkerContext,
        checkpoints: CheckpointStore | None,
    ) -> AbstractContextManager[Train]:
        return training_by(cls.end(job.strategy, resources), job.plan, worker_context, checkpoints)


@contextmanager
def training_by(
    exchange: Exchange,
    plan: TrainingPlan,
    worker_context: WorkerContext,
    checkpoints: CheckpointStore | None,
) -> Iterator[Train]:
    """One worker's trainer with this exchange, which is closed at the end."""
    with closing(exchange):

        def train(start: Loaded | None) -> tuple[Trained, Mapping[str, Any]]:
            trainer = Trainer(plan, exchange, worker_context, checkpoints)
            trained = trainer.run(start)
            return trained, {"sent": trainer.sent().to_dict(), **exchange.summary()}

        yield train


def loop_exchange(strategy: Strategy, resources: Resources) -> Exchange:
    """One worker's exchange in a loop of the user's own; UserError where the strategy is not for one."""
    kind = training_class(strategy)
    if strategy.facts.instead_of_own_loop or not issubclass(kind, ProcessTraining):
        kind = exchanging(strategy)
    return kind.loop_exchange(strategy, resources)


def exchanging(strategy: Strategy) -> type[ExchangeTraining]:
    """The training of a strategy that is one exchange; UserError, naming alternatives, for any other."""
    kind = training_class(strategy)
    if not issubclass(kind, ExchangeTraining) or strategy.facts.instead_of_own_loop:
        raise UserError(
            f"strategy={strategy} is not for a loop of your own; use mirrored, central or allreduce there, "
            f"or {strategy.facts.instead_of_own_loop}"
        )
    return kind


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
    def keep(weights: Mapping[str, torch.Tensor]) -> None:
        with os.fdopen(os.dup(context.descriptor("weights")), "wb") as file:
            for chunk in encode_tensors(weights):
                file.write(chunk)

    joined_ns = time.monotonic_ns()
    use_threads(job.threads)
    with EventRing.attach(context.descriptor("events")) as ring:
        checkpoints = start = None
        if job.run_path is not None and context.rank < job.workers:
            checkpoints = RunDirectory.open(job.run_path, lock=False).checkpoints(job.keep_checkpoints)
            start = checkpoints.load(job.resume_step) if job.resume_step is not None else None
        part = partial(_take_part, training, job, _resources(context, job), ProcessContext(context, ring))
        return part(checkpoints, start, joined_ns, keep)


def _take_part(
    training: type[ProcessTraining],
    job: WorkerJob,
    resources: Resources,
    worker_context: WorkerContext,
    checkpoints: CheckpointStore | None,
    start: Loaded | None,
    joined_ns: int,
    keep: Callable[[Mapping[str, torch.Tensor]], object],
) -> Mapping[str, Any]:
    """One process's part, of a worker or a helper; returns its report. Worker 0 gives its weights to `keep`."""

    def joined() -> None:
        worker_context.record(EventKind.JOIN, joined_ns, time.monotonic_ns() - joined_ns)

    if resources.rank >= job.workers:
        joined()
        report = training.helper(job.strategy, resources, worker_context)
        worker_context.record(EventKind.LEAVE, time.monotonic_ns())
        return report
    with training.worker(job, resources, worker_context, checkpoints) as train:
        joined()
        trained, report = train(start)
        if resources.rank == 0:
            keep(trained.state_dict())
        worker_context.record(EventKind.LEAVE, time.monotonic_ns())
    done = {"steps_done": trained.steps_done, "samples": trained.samples, "seconds": trained.seconds}
    used = device_use(device_of(job.plan.device, resources.rank))
    return {**done, **used, "stopped_early": trained.stopped_early, **report}


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
