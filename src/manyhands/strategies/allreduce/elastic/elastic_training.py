"""Elastic training as `fit` requests it: sets up memory and processes, runs the launcher, returns the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from manyhands.data.store.tensorfile import read_tensors
from manyhands.engine.history_rows import RowsInOrder
from manyhands.engine.reporting import WorkerNote
from manyhands.engine.request import Request
from manyhands.engine.training import Result, Stage, Training
from manyhands.native.group.shared_group import warm
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.process_group import GroupMember
from manyhands.places.local.host import host_identity, threads_per_role
from manyhands.places.local.watchdog import Watched
from manyhands.places.run_commands import MORE_WORKERS
from manyhands.strategies.allreduce.elastic.elastic_launcher import ElasticLauncher, ElasticOutcome
from manyhands.strategies.allreduce.elastic.elastic_members import (
    AssembleElastic,
    ElasticKeeper,
    ElasticMembers,
    ExternalElasticMembers,
    LocalElasticMembers,
)
from manyhands.strategies.allreduce.elastic.elastic_membership import ElasticPlan
from manyhands.strategies.allreduce.elastic.linked import Wiring
from manyhands.strategies.allreduce.elastic.member_process import ElasticJob, take_slot, wiring_of
from manyhands.strategies.allreduce.strategy import AllReduce

__all__ = ["ElasticTraining"]


class FirstRows:
    """Passes every row of the history once: a worker that replaces worker 0 reports the newest rows again. Pure."""

    def __init__(self, steps_done: int = 0) -> None:
        self._reported = steps_done  # every step up to this one was reported
        self._ahead: set[int] = set()  # reported steps after a gap that another worker is about to fill
        self._evaluated: set[int] = set()

    def of(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that no worker has reported before."""
        return [row for row in rows if self._is_first(row["step"], "metrics" in row)]

    def _is_first(self, step: int, is_evaluation: bool) -> bool:
        if is_evaluation:
            reported, self._evaluated = step in self._evaluated, self._evaluated | {step}
            return not reported
        if step <= self._reported or step in self._ahead:
            return False
        self._ahead.add(step)
        while self._reported + 1 in self._ahead:
            self._reported += 1
            self._ahead.remove(self._reported)
        return True


class ElasticTraining(Training):
    """`allreduce elastic=yes`: worker processes that join and leave, led by the launcher."""

    can_take_part: ClassVar[bool] = True
    comes_again: ClassVar[bool] = True

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, AllReduce), "only allreduce leads here"
        self._strategy = request.strategy

    def run(self, stage: Stage) -> Result:
        """Train to the end while workers join and leave."""
        request, options, process_group = self._request, self._request.options, stage.process_group
        warm({torch.float64, *(parameter.dtype for parameter in self._model.parameters())})
        most = request.workers + (MORE_WORKERS if options.commands is not None else 0)
        if process_group is not None:
            most = process_group.place.world  # a later worker already has a rank
        begun = self._start.step if self._start is not None else 0
        order, first = RowsInOrder(begun), FirstRows(begun)

        def hear(note: WorkerNote) -> None:
            rows = first.of(dict(row) for row in note.rows)
            stage.hear(WorkerNote(rows=tuple(rows), saved=note.saved, notice=note.notice), order)

        with ExitStack() as stack:
            rings = [
                process_group.control_server.rings[slot]
                if process_group is not None and slot
                else stack.enter_context(EventRing.create(role=slot))
                for slot in range(most)
            ]
            weights = os.memfd_create("manyhands:weights", os.MFD_CLOEXEC)
            stack.callback(os.close, weights)
            named = {f"worker-{slot}": ring for slot, ring in enumerate(rings)}
            collector = stack.enter_context(stage.collector(named))
            launcher = ElasticLauncher(
                ElasticPlan(workers=request.workers, min_workers=options.min_workers or 1),
                rings,
                self._assemble(stage, rings, weights),
                timeout_s=options.timeout_s,
                on_note=hear,
                on_event=stage.take_event,
                stop_wanted=stage.stop_wanted,
                commands=options.commands,
                # A child that waits for externally started workers would otherwise look hung.
                watchdog_s=options.watchdog_s if process_group is None else 0.0,
            )
            try:
                with stage.view(collector):
                    outcome = launcher.run()
            finally:
                stage.take_rows(order.rest())
            collector.flush()
            observed = collector.summary()
            observed["per_worker"] = [
                one for one in observed["per_worker"] if one["worker"] < request.workers or one["steps"]
            ]
            self._model.load_state_dict(read_tensors(Path(f"/proc/self/fd/{weights}")))
        return self._result(outcome, observed)

    def take_part(self, member: GroupMember) -> None:
        """Be a worker of a run that another process leads."""
        line = member.line
        try:
            line.end(take_slot(member, self._job(None, wiring_of(member))))
        except Exception as error:
            if line.over is None:
                line.fail(error)
            raise

    def _assemble(self, stage: Stage, rings: Sequence[EventRing], weights: int) -> AssembleElastic:
        process_group, workers = stage.process_group, self._request.workers
        if process_group is None:
            job = self._job(stage.run_path)
            return lambda watched: LocalElasticMembers(job, rings, weights, workers, watched)
        here = 1 + sum(
            process_group.control_server.host_of(rank) == host_identity()
            for rank in process_group.control_server.members
        )
        job = replace(self._job(stage.run_path, wiring_of(process_group)), threads=threads_per_role(here))
        keeper = ElasticKeeper(weights, stage.checkpoints(), stage.say)

        def assemble(watched: Watched) -> AbstractContextManager[ElasticMembers]:
            child = LocalElasticMembers(job, rings, weights, 1, watched)
            return ExternalElasticMembers(process_group, child, keeper, self._start, stage.say)

        return assemble

    def _result(self, outcome: ElasticOutcome, observed: dict[str, Any]) -> Result:
        done = outcome.done
        return Result(
            model=self._model,
            steps_done=done.steps_done,
            samples=done.samples,
            seconds=done.seconds,
            stopped_early=done.stopped_early,
            sent=outcome.sent,
            observed={
                **observed,
                "membership": dict(outcome.membership),
                "recoveries": list(outcome.recoveries),
            },
        )

    def _job(self, run_path: Path | None, wiring: Wiring | None = None) -> ElasticJob:
        request = self._request
        return ElasticJob(
            plan=request.plan,
            strategy=self._strategy,
            timeout_s=request.options.timeout_s,
            threads=threads_per_role(request.workers),
            run_path=run_path,
            keep_checkpoints=request.options.keep_checkpoints,
            resume_step=self._start.step if self._start is not None else None,
            wiring=wiring,
        )
