"""What `auto` decides: with which strategy a run begins, whether a plan is worth it, and which plans are tried."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from manyhands.engine.request import Length, Request
from manyhands.engine.training import training_class
from manyhands.errors import UserError
from manyhands.facts import LinkRate, Machines, TaskProfile
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.machine_record import MachineRecord
from manyhands.foresight.plan.plan_search import PlanRow, Question, predicted_rows
from manyhands.foresight.plan.step_costs import usual_costs
from manyhands.foresight.plan.track_record import SeenStep, TrackRecord, cost_class
from manyhands.strategies.auto.promised import Must
from manyhands.strategies.auto.strategy import Auto
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["AutoChoice"]

_BEGINS_WITH = "mirrored"
_USUAL_LATENCY_S = 5e-5  # between hosts, where only the time of the first steps is known
_SLOWEST, _FASTEST = 1e5, 1e11  # bytes per second, between which a link's rate is found


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """The decisions of one run."""

    request: Request
    auto: Auto
    hosts: int = 1
    starts_processes: bool = True
    """Whether the run starts its processes, and may have other ones for each plan."""

    @property
    def record(self) -> MachineRecord:
        return MachineRecord.of_this_machine(self.request.plan.device)

    @property
    def why_not(self) -> str:
        """Why nothing can be planned, as a part of a sentence; empty where it can."""
        task = self.task
        if self.request.workers == 1 and not self.auto.text:
            return "there is one worker"
        if task.streams:
            return f"data is {task.stream_name}, whose samples cannot be drawn twice"
        return ""

    @property
    def first(self) -> Strategy:
        """With which the run begins."""
        among = self.auto.candidates(Machines(per_host=self.request.workers))
        return among[0] if among is not None else Strategy.parse(_BEGINS_WITH)

    def refuses(self, strategy: Strategy, workers: int) -> str:
        """Why this run cannot be trained so; empty where it can."""
        plan = self.request.plan
        if not self.starts_processes and strategy.processes(workers) != {"worker": self.request.workers}:
            return "the run's processes were started for other roles"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of the plan that is chosen are said then
                made = Request.make(
                    plan.task,
                    strategy,
                    workers,
                    Length(steps=plan.steps),
                    plan.seed,
                    self.request.options,
                    plan.device,
                )
                kind = training_class(strategy)
                if not self.starts_processes and not kind.can_take_part:
                    return "it starts processes of its own"
                kind(made, plan.task.model())
        except UserError as error:
            return str(error)
        return ""

    @property
    def task(self) -> Task:
        task = self.request.plan.task
        assert isinstance(task, Task), "compiled tasks are refused"
        return task

    def rows(
        self, profile_of: Callable[[int, int], TaskProfile], noise: float, first_s: float
    ) -> Sequence[PlanRow]:
        """The plans that may be tried, the fastest first; `first_s` is a step of the strategy that the run began with.

        `profile_of` has the task's for so many workers on a host, whose cores so many processes share.
        """
        workers = self.request.workers
        per_host = workers // self.hosts
        here = Machines(per_host=per_host)
        costs = {**usual_costs(here), **(self.record.costs(workers) or {})}
        machines = Machines(hosts=self.hosts, per_host=per_host, costs=costs)
        if self.hosts > 1:
            machines = self._with_links(machines, profile_of(per_host, per_host), first_s)

        def machines_of(count: int) -> Machines:
            return machines if count == workers else Machines(per_host=count, costs=machines.costs)

        among = self.auto.candidates(machines)
        question = Question(
            profile_of=profile_of,
            cluster=DescribedCluster(machines=machines, measured=True),
            machines_of=machines_of,
            workers=(workers,),
            steps=self.request.plan.steps,
            refuses=self.refuses,
            must=Must.parse(self.auto.must),
            strategies=tuple(among) if among is not None else tuple(STRATEGIES),
            record=TrackRecord(pairs=self.record.pairs(workers), noise=noise),
        )
        found = [row for row in predicted_rows(question) if row.is_open]
        return sorted(found, key=lambda row: row.seconds or math.inf)

    def remember(self, seen: Sequence[tuple[PlanRow, float]]) -> None:
        """Predictions, and what was seen of them: the next plan of this machine is corrected by them."""
        pairs = [
            SeenStep(kind=cost_class(row.strategy), predicted_s=row.uncorrected_s, seen_s=seen_s)
            for row, seen_s in seen
            if row.predicted is not None and math.isfinite(seen_s)
        ]
        if pairs and self.hosts == 1:
            self.record.add_pairs(self.request.workers, pairs)

    def _with_links(self, machines: Machines, profile: TaskProfile, first_s: float) -> Machines:
        """The machines whose links between hosts are as fast as makes the first strategy's steps last `first_s`."""

        def over(rate: float) -> Machines:
            return replace(machines, between=LinkRate(latency_s=_USUAL_LATENCY_S, bytes_per_s=rate))

        def step_s(rate: float) -> float:
            step = self.first.predict(profile, over(rate))
            return step.seconds if step is not None else first_s

        low, high = _SLOWEST, _FASTEST
        for _ in range(30):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if step_s(middle) > first_s else (low, middle)
        return over(high)
