"""`ps`: servers and workers as processes that may join and leave, led by the launcher.

A run may change its strategy, as a regular checkpoint becomes snapshots of shards and these a checkpoint again:

    checkpoints/step-00000040  ──onto_shards──►  shards/*/step-00000040    a run that another strategy began
                               ◄──hand_over────                            … or ps with other servers or workers

A checkpoint says one thing of the data: the first `step` batches have been trained on. Shards say it too where all
updates of a batch make one step. Otherwise they stop with some batches done and earlier ones not, and no other
strategy can resume from that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.rundir import RunDirectory, fingerprint
from manyhands.data.store.state_tree import restore_optimizer
from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.engine.dynamo import optimizer_of
from manyhands.engine.exchange import SentFor, Traffic
from manyhands.engine.request import Request
from manyhands.engine.training import Result, Stage, Training
from manyhands.errors import UserError
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.external.specification import listening_at
from manyhands.places.local.host import threads_per_role
from manyhands.places.place import MORE_WORKERS
from manyhands.strategies.ps.live.live_training import (
    RemoteMembers,
    ResumePoint,
    ServerTraining,
    resume_point,
    server_summary,
)
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_members import ps_ranks
from manyhands.strategies.ps.live.remote import take_part
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, ShardSnapshots
from manyhands.strategies.ps.live.worker_state import ResidualMemory
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.shard_layout import FlatLayout, merge, split
from manyhands.strategies.ps.shard_replica import ShardReplica
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import clear_records
from manyhands.task import Task


class PsTraining(Training):
    """Training on parameter servers; resumes from the shards' snapshots, and also leaves a regular checkpoint."""

    can_take_part: ClassVar[bool] = True
    comes_again: ClassVar[bool] = True

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, Ps), "the registry leads here from ps alone"
        self._strategy = request.strategy
        if self._strategy.averages and request.plan.task.sparse:
            raise UserError(
                f"strategy={self._strategy}: a worker has only some rows of task.sparse and cannot step a table; "
                f"leave push={self._strategy.push} out, or sparse"
            )
        self._point: ResumePoint | None = None
        self._steps_anew = False
        self._buffers: dict[str, Tensor] = {}

    def resume(self, directory: RunDirectory, config: Mapping[str, Any]) -> int | None:
        """Resume from the shards, or from the checkpoint of a run with another strategy or number of workers."""
        strategy, workers = self._strategy, self._request.workers
        start = _checkpoint(directory)
        if start is not None:
            names = {name for name, _ in self._model.named_buffers()}
            self._buffers = {name: value for name, value in start.model.items() if name in names}
        if any(directory.config[name] != config[name] for name in ("strategy", "workers")):
            if start is not None:
                self._require_steps_left(directory, start.step)
            self._start = start
            onto_shards(directory, start, self._request.plan, strategy, workers)
        point = self._point = resume_point(directory.path, strategy)
        if point is not None:
            self._require_steps_left(directory, point.batches)
            residuals = ResidualMemory(directory.path, strategy, workers)
            kept = all(residuals.has(point.batches, part) for part in range(workers))
            self._steps_anew = strategy.averages and not kept
        # The run must not see the files of a later, discarded history: the summary of an earlier end, snapshots of
        # later versions, which a shard must never go back to, and, if it begins again, the records.
        directory.remove_summary()
        ShardSnapshots(directory.path, strategy.servers).remove_after(
            point.version if point is not None else -1
        )
        ResidualMemory.remove_after(directory.path, point.to_come.start if point is not None else -1)
        if point is None:
            clear_records(directory.path)
        directory.metrics.keep(point.to_come.wants if point is not None else lambda _: False)
        return point.batches if point is not None else None

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the base class, and one if workers' optimizers start without their saved state."""
        if not self._steps_anew:
            return super().notes
        why = (
            "no process has the state that belongs to the parameters"
            if self._strategy.consistency.lockstep
            else f"with consistency={self._strategy.consistency} no saved state matches the parameters"
        )
        return (*super().notes, f"the workers' optimizers start without state: {why}")

    @classmethod
    def hand_over(cls, directory: RunDirectory, plan: TrainingPlan, strategy: Ps) -> None:
        """Write a checkpoint of the shards, if they are ahead of the newest one: they only fit what wrote them.

        UserError if the shards stopped with batches missing between those that are done.
        """
        point, kept = resume_point(directory.path, strategy), _checkpoint(directory)
        if point is None or (kept is not None and point.to_come.start <= kept.step):
            return
        if not strategy.consistency.stepwise:
            raise UserError(
                f"{directory.path} cannot be resumed with another strategy or number of workers yet: it stopped in the "
                f"middle of consistency={strategy.consistency}, where batches are not computed in order; resume it "
                f"with {str(strategy)!r} and workers={directory.config['workers']}, and change them after that"
            )
        found = ShardSnapshots(directory.path, strategy.servers).at([point.version] * strategy.servers)
        assert found is not None, "the point is of these snapshots"
        built, layout = _built(plan, strategy, point.to_come.start)
        if kept is not None:
            built.model.load_state_dict(kept.model)  # shards have no buffers
        model, optimizer = merge(layout, [one.state for one in found], built.model.state_dict())
        directory.checkpoints().save(
            Snapshot(
                step=point.to_come.start,
                model=model,
                optimizer=optimizer,
                extra={"seed": plan.seed},
                may_hold_infinity=frozenset(name for name, _ in built.model.named_buffers()),
            )
        )

    def kept_step(self, directory: RunDirectory) -> int:
        """The number of batches in the newest snapshots that all shards have."""
        point = resume_point(directory.path, self._strategy)
        return point.batches if point is not None else 0

    @classmethod
    def kept(cls, directory: RunDirectory, task: Task, strategy: Ps) -> tuple[int, dict[str, Tensor]] | None:
        """The parameters in the newest snapshots that all shards have, and their number of batches."""
        found = ShardSnapshots(directory.path, strategy.servers).newest_whole()
        if found is None:
            return None
        model = task.model()
        optimizer = optimizer_of(task, model)
        layout = FlatLayout.of(model, optimizer, strategy.servers, task.sparse, strategy.facts.stepping)
        values, _ = merge(layout, [one.state for one in found], model.state_dict())
        return found[0].state.batches, values

    def run(self, stage: Stage) -> Result:
        """Train to the end, evaluate, and leave a checkpoint."""
        later = MORE_WORKERS if self._request.options.commands is not None else 0
        return self._run(stage, self._job(), self._request.workers + later)

    def lead(self, stage: Stage, process_group: ProcessGroup) -> Result:
        """`run` with members that were started externally; those that come later have a rank already."""
        place, address = process_group.place, process_group.address
        remote = RemoteMembers(
            control_server=process_group.control_server, ranks=ps_ranks(self._strategy, place), say=stage.say
        )
        job = self._job(  # of the leader's child, if it has one, as of the others
            strategy=replace(self._strategy, link="tcp"),
            security=process_group.security,
            listens_at=f"tcp:{address}:0" if address else "",
            by_host=True,
        )
        return self._run(stage, job, self._request.workers + place.later, remote)

    def _run(self, stage: Stage, job: Job, most_workers: int, remote: RemoteMembers | None = None) -> Result:
        point, options, steps = self._point, self._request.options, job.plan.steps
        job = replace(
            job,
            # Servers compute while workers do; more threads than cores stop each other at every barrier.
            threads=threads_per_role(job.workers + self._strategy.servers),
            run_path=stage.run_path,
            resume_version=point.version if point is not None else None,
            buffers=self._buffers,
        )
        training = ServerTraining(
            job,
            most_workers=most_workers,
            watchdog_s=options.watchdog_s,
            begun=point.begun if point is not None else 0,
            remote=remote,
        )
        with training, ExitStack() as stack:
            rings = {f"worker-{slot}": ring for slot, ring in training.files.rings.items()}
            rings |= {f"server-{place}": ring for place, ring in enumerate(training.files.server_rings)}
            collector = stack.enter_context(stage.collector(rings, most_workers))
            with stage.view(collector):
                outcome = training.run(
                    known=stage.history,
                    on_rows=stage.take_rows,
                    on_event=stage.take_event,
                    commands=options.commands,
                )
            collector.flush()
            observed = collector.summary()
            workers = observed["per_worker"] = [
                w for w in observed["per_worker"] if w["worker"] < job.workers or w["steps"]
            ]
            model = training.model()
            metrics = training.evaluate(model)
            evaluated = any("metrics" in row and row["step"] == steps for row in stage.history)
            if metrics is not None and not evaluated:
                stage.take_rows([{"step": steps, "metrics": metrics, "at_s": outcome.seconds}])
            if stage.directory is not None:
                _save(stage, training.checkpoint(outcome, (metrics or {}).get("evaluation_loss")))
        counted = ("bytes_sent", "messages_sent")
        in_steps = Traffic(**{name: sum(worker[name] for worker in workers) for name in counted})
        whole = Traffic(**{name: outcome.totals[name] for name in counted})
        return Result(
            model=model,
            steps_done=steps,
            seconds=outcome.seconds,
            samples=outcome.totals["samples"],
            sent=SentFor(gradients=in_steps, control=whole - in_steps),
            observed={**observed, **server_summary(outcome)},
            notes=tuple(outcome.notes),
        )

    def take_part(self, member: GroupMember) -> None:
        line, place = member.connection, member.place
        addresses = {"listens_at": f"tcp:{member.address}:0"} if member.address else {}
        if place.cluster is not None:
            address = place.cluster.address(place.cluster.ranked[place.rank])
            addresses = {"listens_at": listening_at(address), "reached_at": f"tcp:{address}"}
        strategy = replace(self._strategy, link="tcp")
        try:
            line.end(
                take_part(
                    line, self._job(strategy=strategy, security=member.security, by_host=True, **addresses)
                )
            )
        except BaseException as error:
            line.fail(error)
            raise

    def _job(self, **given: Any) -> Job:
        """What every process of this run is started with."""
        request, options = self._request, self._request.options
        fields = {
            "plan": request.plan,
            "strategy": self._strategy,
            "fingerprint": fingerprint(request.config(self._model)).digest,
            "workers": request.workers,
            "timeout_s": options.timeout_s,
            "keep_checkpoints": options.keep_checkpoints,
            "skip_nonfinite": options.skip_nonfinite,
        }
        return Job(**{**fields, **given})


def _save(stage: Stage, snapshot: Snapshot | None) -> None:
    """Write the last checkpoint; a full disk costs the checkpoint and not the trained model."""
    checkpoints = stage.checkpoints()
    if checkpoints is None:
        return
    if snapshot is None:
        stage.say("the last checkpoint is missing: not every server could write its part of it")
        return
    try:
        stage.take_checkpoint(snapshot.step, checkpoints.save(snapshot))
    except WriteFailed as error:
        stage.say(str(error))


def _checkpoint(directory: RunDirectory) -> Loaded | None:
    try:
        return directory.checkpoints().load()
    except NoCheckpoint:
        return None


def onto_shards(
    directory: RunDirectory, start: Loaded | None, plan: TrainingPlan, strategy: Ps, workers: int
) -> None:
    """Make `start` the state from which the shards of `strategy` continue; other shards' files are removed.

    Takes the tensors out of `start`; without one, the run begins again. UserError if it is of another optimizer,
    WriteFailed if the disk does not take it.
    """
    states = []
    if start is not None:
        built, layout = _built(plan, strategy, start.step)
        built.model.load_state_dict(start.model)
        restore_optimizer(built.optimizer, start.optimizer)
        model, optimizer = built.model.state_dict(), built.optimizer.state_dict()
        states = [split(layout, shard, model, optimizer, start.step) for shard in range(layout.shards)]
    snapshots = ShardSnapshots(directory.path, strategy.servers)
    snapshots.remove_after(-1)
    ResidualMemory.remove_after(directory.path, -1)
    clear_records(directory.path)
    for shard, state in enumerate(states):
        config = ShardConfig(
            shard=shard,
            num_shards=strategy.servers,
            policy=strategy.consistency,
            steps=plan.steps,
            slots=tuple(range(workers)),
        )
        replica = ShardReplica(config, member=0)
        replica.core = ShardCore(config, state.batches)
        core = json.dumps(replica.state())
        snapshots.save(shard, ShardSnapshot(version=state.batches, state=state, held={}, core=core))


def _built(plan: TrainingPlan, strategy: Ps, step: int) -> tuple[Built, FlatLayout]:
    computer = Computer(replace(plan, device="cpu"), 0)
    built = computer.build(step)
    model, sparse = built.model, computer.task.sparse
    return built, FlatLayout.of(model, built.optimizer, strategy.servers, sparse, strategy.facts.stepping)
