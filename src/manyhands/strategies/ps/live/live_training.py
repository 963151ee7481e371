"""A complete training on parameter servers, as `fit` requests it: sets up files and processes, returns the model."""

from __future__ import annotations

import json
import os
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import Snapshot
from manyhands.data.store.rundir import RunDirectory
from manyhands.data.store.tensorfile import read_tensors
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.process_group import ProcessGroup
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.watchdog import Watched
from manyhands.places.place import Command
from manyhands.strategies.ps.digests import gradient_hash, layout_digest
from manyhands.strategies.ps.external_roles import PsRanks
from manyhands.strategies.ps.live.losses import LossBook
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_launcher import Launcher, LaunchOutcome, new_token
from manyhands.strategies.ps.live.ps_members import Assemble, LocalMembers, RunFiles
from manyhands.strategies.ps.live.role_members import RoleMembers, RunKeeper
from manyhands.strategies.ps.live.server_tables import final_bytes, final_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshots, ToCome, batches_to_come
from manyhands.strategies.ps.live.worker_state import ResidualMemory
from manyhands.strategies.ps.ps_messages import LEAD
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_state import merge
from manyhands.strategies.ps.slots import SlotTable
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import RunRecord, clear_records, write_record

__all__ = [
    "RemoteMembers",
    "ResumePoint",
    "ServerTraining",
    "TrainingRequest",
    "forget_after",
    "resume_point",
    "server_summary",
]

_RING_EVENTS = 1 << 13


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The newest version of which every shard has a snapshot, and what was done by then."""

    version: int
    batches: int
    """How many batches the lead shard has applied."""

    to_come: ToCome
    begun: int
    """How many of the batches were trained before these shards existed."""


def resume_point(run_path: Path, strategy: Ps) -> ResumePoint | None:
    """Where a run on parameter servers can resume; None if no snapshot was written yet."""
    snapshots = ShardSnapshots(run_path, strategy.servers).newest_whole()
    if snapshots is None:
        return None
    cores = [json.loads(snapshot.core)["core"] for snapshot in snapshots]
    return ResumePoint(
        version=snapshots[0].version,
        batches=snapshots[0].state.batches,
        to_come=batches_to_come(strategy.consistency, cores),
        begun=SlotTable.from_state(cores[LEAD]["table"]).generations[0].base,
    )


def forget_after(run_path: Path, strategy: Ps, point: ResumePoint | None) -> None:
    """Remove what a run that resumes from `point` must not see: the files of a later, discarded history.

    That is the summary of an earlier end, snapshots of later versions, which a shard must never go back to, and,
    without a point, the records, since the run begins again. WriteFailed if something could not be removed.
    """
    RunDirectory.open(run_path, lock=False).remove_summary()
    ShardSnapshots(run_path, strategy.servers).remove_after(point.version if point is not None else -1)
    ResidualMemory.remove_after(run_path, point.to_come.start if point is not None else -1)
    if point is None:
        clear_records(run_path)


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """What to train, and how."""

    plan: TrainingPlan
    strategy: Ps
    workers: int
    most_workers: int
    """The maximum number of slots, added ones included."""

    timeout_s: float
    watchdog_s: float
    run_path: Path | None
    keep_checkpoints: int
    resume_version: int | None
    begun: int
    """How many batches had been trained when the shards began."""

    buffers: Mapping[str, Tensor]
    """The model's buffers at the point of resumption, by name; empty for a new run or a model without buffers."""

    skip_nonfinite: bool
    fingerprint: str
    remote: RemoteMembers | None = None
    """The externally started servers and workers; None if they are children of this process."""


@dataclass(frozen=True, kw_only=True)
class RemoteMembers:
    """The externally started members of a run, as the leader sees them."""

    process_group: ProcessGroup
    ranks: PsRanks
    say: Callable[[str], None]
    """Reports a sentence to the user."""


class ServerTraining:
    """The memory that launcher, servers and workers share, and the run itself; a context manager."""

    def __init__(self, request: TrainingRequest) -> None:
        self._request = request
        self._stack = ExitStack()
        self.rings: dict[int, EventRing] = {}
        """By slot."""

        self.server_rings: list[EventRing] = []
        self._keeper: RunKeeper | None = None

    def __enter__(self) -> Self:
        request = self._request
        with ExitStack() as stack:
            self._computer = Computer(request.plan, 0)
            built = self._computer.build()
            strategy, sparse = request.strategy, request.plan.task.sparse
            self._layout = FlatLayout.of(
                built.model, built.optimizer, strategy.servers, sparse, strategy.facts.stepping
            )
            self._model = built.model
            self._final = stack.enter_context(
                Segment.create(final_bytes(self._layout), "the trained parameters")
            )
            self._buffers = os.memfd_create("manyhands:buffers", os.MFD_CLOEXEC)
            stack.callback(os.close, self._buffers)
            for slot in range(request.most_workers):
                self.rings[slot] = stack.enter_context(EventRing.create(role=slot, capacity=_RING_EVENTS))
            for place in range(request.strategy.num_server_processes):
                ring = EventRing.create(role=request.most_workers + place, capacity=_RING_EVENTS)
                self.server_rings.append(stack.enter_context(ring))
            if request.remote is not None:
                control_server = request.remote.process_group.control_server
                stack.enter_context(control_server.recording_into(self._rings_by_rank(request.remote)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _rings_by_rank(self, remote: RemoteMembers) -> dict[int, EventRing]:
        rings = dict(zip(remote.ranks.workers, self.rings.values(), strict=True))
        return rings | dict(zip(remote.ranks.servers, self.server_rings, strict=True))

    def run(
        self,
        *,
        known: Iterable[Mapping[str, Any]] = (),
        on_rows: Callable[[list[dict[str, Any]]], None],
        on_event: Callable[[dict[str, Any]], None],
        commands: queue.SimpleQueue[Command] | None = None,
    ) -> LaunchOutcome:
        """Train to the end; `known` is the history so far, whose rows are not reported again."""
        request, remote = self._request, self._request.remote
        job = Job(
            plan=request.plan,
            strategy=request.strategy if remote is None else replace(request.strategy, link="tcp"),
            token=new_token(),
            fingerprint=request.fingerprint,
            workers=request.workers,
            timeout_s=request.timeout_s,
            threads=threads_per_role(request.workers),
            run_path=request.run_path,
            keep_checkpoints=request.keep_checkpoints,
            resume_version=request.resume_version,
            buffers=request.buffers,
            skip_nonfinite=request.skip_nonfinite,
            **({} if remote is None else _where(remote.process_group)),
        )
        files = RunFiles(
            final=self._final.descriptor,
            buffers=self._buffers,
            rings=self.rings,
            server_rings=self.server_rings,
        )
        layout = [
            {"shard": shard, "bytes": self._layout.range_bytes(shard)} for shard in range(self._layout.shards)
        ]
        on_event({"event": "layout", "shards": layout})
        launcher = Launcher(
            job,
            files,
            partial(LocalMembers, job, files) if remote is None else self._assembled(remote, job, files),
            losses=LossBook(known),
            on_rows=on_rows,
            on_event=on_event,
            commands=commands,
            watchdog_s=request.watchdog_s,
        )
        failure = self._record(job, request.run_path) if request.run_path is not None else None
        outcome = launcher.run()
        if self._keeper is not None:
            lost = self._keeper.lost_records()
            outcome.notes += lost
            outcome.unrecorded += lost
        if failure is not None:
            outcome.notes.insert(0, failure)
            outcome.unrecorded.insert(0, failure)
        return outcome

    def _assembled(self, remote: RemoteMembers, job: Job, files: RunFiles) -> Assemble:
        """The members on control connections, and a child of this process if the leader also has a role.

        They have no watchdog: it can only observe processes of its host.
        """
        keeper = self._keeper = RunKeeper(job, self._layout, files, remote.say)
        child = LocalMembers(job, files, Watched(deadline_s=0.0))
        control_server = remote.process_group.control_server
        return lambda _: RoleMembers(control_server, remote.ranks, job, keeper, child, remote.say)

    def _record(self, job: Job, run_path: Path) -> str | None:
        """Write what a replay needs to know, and compile the gradient hash once for all workers.

        A failed write costs the record and not the run: returns the sentence that reports it.
        """
        nothing = self._layout.range_in(torch.zeros(self._layout.range_bytes(0), dtype=torch.uint8), 0)
        gradient_hash(torch.ones(len(nothing.pieces), dtype=torch.uint8), nothing)
        record = RunRecord(
            torch=torch.__version__,
            cpu=torch.backends.cpu.get_cpu_capability(),
            threads=job.threads,
            strategy=str(job.strategy),
            workers=job.workers,
            steps=job.plan.steps,
            seed=job.plan.seed,
            device=job.plan.device,
            autocast=job.plan.autocast,
            layout=layout_digest(self._layout),
            begun=self._request.begun,
        )
        try:
            write_record(run_path, record)
        except WriteFailed as error:
            return f"{error}: the run goes on, and can be neither replayed nor audited"
        return None

    def model(self) -> nn.Module:
        model = self._model
        memory = self._final.tensor(0, final_bytes(self._layout), torch.uint8)
        values = self._layout.views(memory[: self._layout.num_bytes]) | final_tables(self._layout, memory)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                named[name].copy_(value)
        model.load_state_dict(dict(self._request.buffers), strict=False)
        if os.fstat(self._buffers).st_size:
            model.load_state_dict(read_tensors(Path(f"/proc/self/fd/{self._buffers}")), strict=False)
        return model.cpu()

    def checkpoint(self, outcome: LaunchOutcome, score: float | None) -> Snapshot | None:
        """The final state of all shards as a regular checkpoint, from which any strategy can resume.

        None if a disk did not take the shards. A shard that lost updates ended at another version than the
        others.
        """
        request = self._request
        versions = {int(shard["shard"]): int(shard["version"]) for shard in outcome.shards}
        found = ShardSnapshots(request.run_path, request.strategy.servers).at(
            [versions[shard] for shard in sorted(versions)]
        )
        if found is None:
            return None
        states = [snapshot.state for snapshot in found]
        model, optimizer = merge(self._layout, states, self._model.state_dict())
        return Snapshot(
            step=request.plan.steps,
            model=model,
            optimizer=optimizer,
            extra={"seed": request.plan.seed},
            score=score,
            may_hold_infinity=frozenset(name for name, _ in self._model.named_buffers()),
        )

    def evaluate(self, model: nn.Module) -> dict[str, float] | None:
        """The metrics of the trained model; None where the task has no evaluation data."""
        evaluated = self._computer.evaluate(model.to(self._computer.device))
        model.cpu()
        return evaluated[0] if evaluated is not None else None


def _where(process_group: ProcessGroup) -> dict[str, Any]:
    """The job fields for a child that serves beside the leader."""
    listens_at = f"tcp:{process_group.address}:0" if process_group.address else ""
    return {"security": process_group.security, "listens_at": listens_at}


def server_summary(outcome: LaunchOutcome) -> dict[str, Any]:
    """The servers' part of a run's summary: shards and their memory, staleness, deaths and recoveries."""
    shards = sorted(outcome.shards, key=lambda shard: int(shard["shard"]))
    staleness: Counter[int] = Counter()
    for shard in shards:
        staleness.update(dict(shard["staleness"]))
    updates = sum(staleness.values())
    return {
        "servers": [
            {
                "shard": shard["shard"],
                "bytes": shard["nbytes"],
                "sha256": shard["sha256"],
                "version": shard["version"],
            }
            for shard in shards
        ],
        "recorded": dict(sorted(outcome.recorded.items())),
        "unrecorded": outcome.unrecorded,
        "staleness": {
            "mean": sum(value * count for value, count in staleness.items()) / updates if updates else 0.0,
            "max": max(staleness, default=0),
            "histogram": {str(value): staleness[value] for value in sorted(staleness)},
        },
        "recoveries": outcome.recoveries,
    }
