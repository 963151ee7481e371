"""`ps`: servers and workers as processes that may join and leave, led by the launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import NoCheckpoint, Snapshot
from manyhands.data.store.rundir import RunDirectory, fingerprint
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.dynamo import optimizer_of
from manyhands.engine.exchange import SentFor, Traffic
from manyhands.engine.request import Request
from manyhands.engine.training import Result, Stage, Training
from manyhands.errors import UserError
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.external.specification import listening_at
from manyhands.places.place import MORE_WORKERS
from manyhands.strategies.ps.external_roles import ps_ranks
from manyhands.strategies.ps.live.handover import off_shards, onto_shards
from manyhands.strategies.ps.live.live_training import (
    RemoteMembers,
    ResumePoint,
    ServerTraining,
    TrainingRequest,
    forget_after,
    resume_point,
    server_summary,
)
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.remote import take_part
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.live.worker_state import ResidualMemory
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_state import merge
from manyhands.strategies.ps.strategy import Ps
from manyhands.task import Task

__all__ = ["PsTraining"]


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
                f"strategy={self._strategy}: a worker has some rows of task.sparse, and no whole table to step; leave "
                f"push={self._strategy.push} out, or sparse"
            )
        self._point: ResumePoint | None = None
        self._steps_anew = False
        self._buffers: dict[str, Tensor] = {}

    def resume(self, directory: RunDirectory, config: Mapping[str, Any]) -> int | None:
        """Resume from the shards, or from the checkpoint of a run with another strategy or number of workers."""
        try:
            start = directory.checkpoints().load()
        except NoCheckpoint:
            start = None
        if start is not None:
            names = {name for name, _ in self._model.named_buffers()}
            self._buffers = {name: value for name, value in start.model.items() if name in names}
        if any(directory.config[name] != config[name] for name in ("strategy", "workers")):
            if start is not None:
                self._require_steps_left(directory, start.step)
            self._start = start
            onto_shards(directory, start, self._request.plan, self._strategy, self._request.workers)
        point = self._point = resume_point(directory.path, self._strategy)
        if point is not None:
            self._require_steps_left(directory, point.batches)
            self._steps_anew = self._strategy.averages and not self._optimizers_are_kept(directory, point)
        forget_after(directory.path, self._strategy, point)
        directory.metrics.keep(point.to_come.wants if point is not None else lambda _: False)
        return point.batches if point is not None else None

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the base class, and one if workers' optimizers start without their saved state."""
        said = super().notes
        if not self._steps_anew:
            return said
        why = (
            "nobody has the state that belongs to the parameters"
            if self._strategy.consistency.lockstep
            else f"under consistency={self._strategy.consistency} no state of theirs belongs to the parameters"
        )
        return (*said, f"the workers' optimizers begin anew: {why}")

    def _optimizers_are_kept(self, directory: RunDirectory, point: ResumePoint) -> bool:
        workers = self._request.workers
        residuals = ResidualMemory(directory.path, self._strategy, workers)
        return all(residuals.has(point.batches, part) for part in range(workers))

    @classmethod
    def hand_over(cls, directory: RunDirectory, plan: TrainingPlan, strategy: Ps) -> None:
        """Leave a regular checkpoint: shards only fit the strategy and number of workers that wrote them."""
        off_shards(directory, plan, strategy)

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
        return self._run(stage, self._request.workers + later)

    def lead(self, stage: Stage, process_group: ProcessGroup) -> Result:
        """`run` with members that were started externally; those that come later have a rank already."""
        place = process_group.place
        remote = RemoteMembers(
            process_group=process_group, ranks=ps_ranks(self._strategy, place), say=stage.say
        )
        return self._run(stage, self._request.workers + place.later, remote)

    def _run(self, stage: Stage, most_workers: int, remote: RemoteMembers | None = None) -> Result:
        request, options = self._request, self._request.options
        training = ServerTraining(self._asked(stage, most_workers, remote))
        with training, ExitStack() as stack:
            rings = {f"worker-{slot}": ring for slot, ring in training.rings.items()}
            rings |= {f"server-{place}": ring for place, ring in enumerate(training.server_rings)}
            collector = stack.enter_context(stage.collector(rings, len(training.rings)))
            with stage.view(collector):
                outcome = training.run(
                    known=stage.history,
                    on_rows=stage.take_rows,
                    on_event=stage.take_event,
                    commands=options.commands,
                )
            collector.flush()
            observed = collector.summary()
            observed["per_worker"] = [
                w for w in observed["per_worker"] if w["worker"] < request.workers or w["steps"]
            ]
            model = training.model()
            metrics = training.evaluate(model)
            evaluated = any("metrics" in row and row["step"] == request.plan.steps for row in stage.history)
            if metrics is not None and not evaluated:
                stage.take_rows([{"step": request.plan.steps, "metrics": metrics, "at_s": outcome.seconds}])
            if stage.directory is not None:
                self._save(stage, training.checkpoint(outcome, (metrics or {}).get("evaluation_loss")))
        return Result(
            model=model,
            steps_done=request.plan.steps,
            seconds=outcome.seconds,
            samples=outcome.totals["samples"],
            sent=_sent(outcome.totals, observed["per_worker"]),
            observed={**observed, **server_summary(outcome)},
            notes=tuple(outcome.notes),
        )

    def take_part(self, member: GroupMember) -> None:
        """Serve or work, as the leader assigns."""
        line, options = member.connection, self._request.options
        job = Job(
            plan=self._request.plan,
            strategy=replace(self._strategy, link="tcp"),
            token="",
            fingerprint=self._fingerprint(),
            workers=self._request.workers,
            timeout_s=options.timeout_s,
            threads=1,
            run_path=None,
            keep_checkpoints=options.keep_checkpoints,
            resume_version=None,
            skip_nonfinite=options.skip_nonfinite,
            security=member.security,
            **_addresses(member),
        )
        try:
            line.end(take_part(line, job))
        except BaseException as error:
            line.fail(error)
            raise

    def _save(self, stage: Stage, snapshot: Snapshot | None) -> None:
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

    def _asked(self, stage: Stage, most_workers: int, remote: RemoteMembers | None) -> TrainingRequest:
        request, options = self._request, self._request.options
        return TrainingRequest(
            plan=request.plan,
            strategy=self._strategy,
            workers=request.workers,
            most_workers=most_workers,
            timeout_s=options.timeout_s,
            watchdog_s=options.watchdog_s,
            run_path=stage.run_path,
            keep_checkpoints=options.keep_checkpoints,
            skip_nonfinite=options.skip_nonfinite,
            resume_version=self._point.version if self._point is not None else None,
            begun=self._point.begun if self._point is not None else 0,
            buffers=self._buffers,
            fingerprint=self._fingerprint(),
            remote=remote,
        )

    def _fingerprint(self) -> str:
        return fingerprint(self._request.config(self._model)).digest


def _sent(totals: Mapping[str, int], per_worker: Sequence[Mapping[str, Any]]) -> SentFor:
    """The traffic that workers attributed to their steps, and the remaining control traffic."""
    steps = Traffic(
        **{name: sum(worker[name] for worker in per_worker) for name in ("bytes_sent", "messages_sent")}
    )
    whole = Traffic(bytes_sent=totals["bytes_sent"], messages_sent=totals["messages_sent"])
    return SentFor(gradients=steps, control=whole - steps)


def _addresses(member: GroupMember) -> dict[str, Any]:
    """Where this process listens if it serves, and where others reach it."""
    place = member.place
    if place.cluster is not None:
        address = place.cluster.address(place.cluster.ranked[place.rank])
        return {"listens_at": listening_at(address), "reached_at": f"tcp:{address}"}
    return {"listens_at": f"tcp:{member.address}:0"} if member.address else {}
