"""A complete training on parameter servers, as `fit` requests it: sets up files and processes, returns the model."""

from __future__ import annotations

import json
import os
import queue
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.checkpoint import Snapshot
from manyhands.data.store.tensorfile import read_tensors
from manyhands.native.segment import Segment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.control_server import ControlServer
from manyhands.places.local.watchdog import Watched
from manyhands.places.place import Command
from manyhands.strategies.ps.digests import gradient_hash, layout_digest
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.ps_launcher import Launcher, LaunchOutcome
from manyhands.strategies.ps.live.ps_members import (
    Assemble,
    LocalMembers,
    PsRanks,
    RoleMembers,
    RunFiles,
    RunKeeper,
)
from manyhands.strategies.ps.live.reports import LossBook
from manyhands.strategies.ps.live.server_tables import final_bytes, final_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshots, ToCome, batches_to_come
from manyhands.strategies.ps.ps_messages import LEAD
from manyhands.strategies.ps.shard_layout import merge
from manyhands.strategies.ps.slots import SlotTable
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import RunRecord, write_record

_RING_EVENTS = 1 << 13


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The newest version of which every shard has a snapshot, and what was done by then."""

    version: int
    batches: int  # how many batches the lead shard has applied
    to_come: ToCome
    begun: int  # how many of the batches were trained before these shards existed


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


class RemoteMembers(NamedTuple):
    """The externally started members of a run, as the leader sees them."""

    control_server: ControlServer
    ranks: PsRanks
    say: Callable[[str], None]  # reports a sentence to the user


class ServerTraining:
    """The memory that launcher, servers and workers share, and the run itself; a context manager.

    The members are children of this process, unless `remote` says that they were started externally. `begun` is the
    number of batches that had been trained when the shards began.
    """

    def __init__(
        self,
        job: Job,
        *,
        most_workers: int,
        watchdog_s: float = 0.0,
        begun: int = 0,
        remote: RemoteMembers | None = None,
    ) -> None:
        self._job, self._most_workers, self._remote = job, most_workers, remote
        self._watchdog_s, self._begun = watchdog_s, begun
        self._stack = ExitStack()
        self._keeper: RunKeeper | None = None

    def __enter__(self) -> Self:
        remote = self._remote
        with ExitStack() as stack:
            self._computer, built, self._layout = self._job.build()
            self._model = built.model
            self._final = stack.enter_context(
                Segment.create(final_bytes(self._layout), "the trained parameters")
            )
            buffers = os.memfd_create("manyhands:buffers", os.MFD_CLOEXEC)
            stack.callback(os.close, buffers)
            workers, servers = self._most_workers, self._job.strategy.num_server_processes
            rings = [
                stack.enter_context(EventRing.create(role=role, capacity=_RING_EVENTS))
                for role in range(workers + servers)
            ]
            self.files = RunFiles(
                final=self._final.descriptor,
                buffers=buffers,
                rings=dict(enumerate(rings[:workers])),
                server_rings=rings[workers:],
            )
            if remote is not None:
                ranks = (*remote.ranks.workers, *remote.ranks.servers)
                stack.enter_context(
                    remote.control_server.recording_into(dict(zip(ranks, rings, strict=True)))
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self,
        *,
        known: Iterable[Mapping[str, Any]] = (),
        on_rows: Callable[[list[dict[str, Any]]], None],
        on_event: Callable[[dict[str, Any]], None],
        commands: queue.SimpleQueue[Command] | None = None,
    ) -> LaunchOutcome:
        """Train to the end; `known` is the history so far, whose rows are not reported again."""
        job, remote, files = self._job, self._remote, self.files
        layout = [
            {"shard": shard, "bytes": self._layout.range_bytes(shard)} for shard in range(self._layout.shards)
        ]
        on_event({"event": "layout", "shards": layout})
        assemble: Assemble = partial(LocalMembers, job, files)
        if remote is not None:
            keeper = self._keeper = RunKeeper(job, self._layout, files, remote.say)
            # The leader has a child if it also has a role. No watchdog: it can only observe processes of its host.
            child = LocalMembers(job, files, Watched(deadline_s=0.0))
            assemble = partial(
                RoleMembers, remote.control_server, remote.ranks, job, keeper, child, remote.say
            )
        launcher = Launcher(
            job,
            files,
            assemble,
            losses=LossBook(known),
            on_rows=on_rows,
            on_event=on_event,
            commands=commands,
            watchdog_s=self._watchdog_s,
        )
        failure = self._record(job, job.run_path) if job.run_path is not None else None
        outcome = launcher.run()
        if self._keeper is not None:
            lost = self._keeper.lost_records()
            outcome.notes += lost
            outcome.unrecorded += lost
        if failure is not None:
            outcome.notes.insert(0, failure)
            outcome.unrecorded.insert(0, failure)
        return outcome

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
            begun=self._begun,
        )
        try:
            write_record(run_path, record)
        except WriteFailed as error:
            return f"{error}: the run continues, but cannot be replayed or audited"
        return None

    def model(self) -> nn.Module:
        model = self._model
        memory = self._final.tensor(0, final_bytes(self._layout), torch.uint8)
        values = self._layout.views(memory[: self._layout.num_bytes]) | final_tables(self._layout, memory)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                named[name].copy_(value)
        model.load_state_dict(dict(self._job.buffers), strict=False)
        if os.fstat(self.files.buffers).st_size:
            model.load_state_dict(read_tensors(Path(f"/proc/self/fd/{self.files.buffers}")), strict=False)
        return model.cpu()

    def checkpoint(self, outcome: LaunchOutcome, score: float | None) -> Snapshot | None:
        """The final state of all shards as a regular checkpoint, from which any strategy can resume.

        None if a disk did not take the shards. A shard that lost updates ended at another version than the
        others.
        """
        job = self._job
        versions = {int(shard["shard"]): int(shard["version"]) for shard in outcome.shards}
        found = ShardSnapshots(job.run_path, job.strategy.servers).at(
            [versions[shard] for shard in sorted(versions)]
        )
        if found is None:
            return None
        states = [snapshot.state for snapshot in found]
        model, optimizer = merge(self._layout, states, self._model.state_dict())
        return Snapshot(
            step=job.plan.steps,
            model=model,
            optimizer=optimizer,
            extra={"seed": job.plan.seed},
            score=score,
            may_hold_infinity=frozenset(name for name, _ in self._model.named_buffers()),
        )

    def evaluate(self, model: nn.Module) -> dict[str, float] | None:
        evaluated = self._computer.evaluate(model.to(self._computer.device))
        model.cpu()
        return evaluated[0] if evaluated is not None else None


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
                name: shard["nbytes" if name == "bytes" else name]
                for name in ("shard", "bytes", "sha256", "version")
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
