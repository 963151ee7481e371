"""`plan`: measure the task and the machines, predict every plan, and try the best ones if that is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from manyhands.data.batches import BatchPlan
from manyhands.errors import UserError, first_line
from manyhands.facts import Machines, StepCosts, TaskProfile
from manyhands.foresight.estimate import Estimate, estimate, refusal
from manyhands.foresight.plan.codec_rates import codec_rates
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.device_profile import device_profile
from manyhands.foresight.plan.machine_record import MachineRecord
from manyhands.foresight.plan.plan_search import (
    PlanLimits,
    PlanRow,
    Question,
    RankedPlans,
    candidates,
    make_plan,
    worth_trying,
)
from manyhands.foresight.plan.step_costs import measured_costs, try_steps, usual_costs
from manyhands.foresight.plan.task_profile import TaskProfiles
from manyhands.foresight.plan.track_record import SeenStep, TrackRecord, cost_class
from manyhands.strategies.auto.promised import Must
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy, check_count
from manyhands.task import Task
from manyhands.wire.names import RAW

__all__ = ["PlanRequirements", "TaskPlan", "TriedPlan", "plan"]

_NOISY = 0.5  # (90th - 10th percentile) / median of single steps
_TRIAL_S = 2.0  # of a plan that is tried, in each of several rounds
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequirements(PlanLimits):
    """What a plan must keep to, and among which strategies it is chosen."""

    must: str = "equal"
    """Promises, separated by commas: equal (to one process), sync, survives=1 (lost processes); or none."""
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    """Words, with whose usual settings a plan is made, and texts, which are considered as they are."""
    memory: int = 0
    """Bytes of each worker; 0: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedPlan:
    """A plan that was run for some steps; seconds of a step."""

    row: PlanRow
    seen_s: float


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """Every plan for a task with what is predicted of it, and the one that is chosen."""

    task: Task
    cluster: DescribedCluster
    steps: int  # that are wanted
    ranked: RankedPlans
    chosen: PlanRow
    device: str = "cpu"
    tried: tuple[TriedPlan, ...] = ()  # the fastest first
    notes: tuple[str, ...] = ()
    question: Question | None = None  # that `ranked` answers

    @property
    def strategy(self) -> Strategy:
        return self.chosen.to_run

    @property
    def workers(self) -> int:
        return self.chosen.workers


def plan(
    task: Task,
    *,
    workers: int | Sequence[int] | None = None,
    cluster: DescribedCluster | str | Path | None = None,
    required: PlanRequirements | None = None,
    steps: int | None = None,
    verify: int = 0,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
) -> TaskPlan:
    """Predict how long a step of `task` takes under every strategy, and choose.

    `workers` are how many there may be: one number, or several of which the best is chosen. `cluster` describes other
    machines (a file, or its value); without it, the plan is for this machine, which is measured once for each number of
    workers. `verify` tries the best so many plans for some seconds. `steps` are those that are wanted, by default the
    task's usual length.

    Raises UserError where no plan keeps what it must and fits; it names the nearest, and what that lacks.
    """
    required = required or PlanRequirements()
    asked = _Asked(
        task=task,
        described=_described(cluster, required.memory),
        workers=_counts(workers, cluster),
        required=required,
        steps=steps or _usual_steps(task),
        device=device,
        say=say,
    )
    if verify < 0:
        raise UserError(f"verify={verify} must be at least 0")
    if verify and asked.described is not None:
        raise UserError("verify tries plans on this machine; leave the cluster out")
    Must.parse(required.must)
    for text in required.strategies:
        Strategy.parse(text)
    if required.price is not None and not (asked.described and asked.described.price):
        raise UserError(
            "budget is a price, but the cluster has none; add price = 2.5 (of a host, per hour) to its file, or give "
            "a time with its unit, such as 2h"
        )
    return asked.planned(verify)


def _counts(workers: int | Sequence[int] | None, cluster: object) -> tuple[int, ...] | None:
    if workers is None:
        return None if cluster is not None else (2,)
    counts = (workers,) if isinstance(workers, int) else tuple(workers)
    for count in counts:
        check_count("workers", count)
    if not counts:
        raise UserError("workers is empty; give at least one number")
    return counts


def _described(cluster: DescribedCluster | str | Path | None, memory: int) -> DescribedCluster | None:
    if cluster is None:
        return None
    found = cluster if isinstance(cluster, DescribedCluster) else DescribedCluster.from_file(Path(cluster))
    return replace(found, memory=memory) if memory else found


def _usual_steps(task: Task) -> int:
    if task.streams:
        return 1000
    return task.epochs * BatchPlan(task.samples, task.batch_size, 0).batches_per_epoch


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What was asked for, checked."""

    task: Task
    described: DescribedCluster | None
    workers: tuple[int, ...] | None
    required: PlanRequirements
    steps: int
    device: str
    say: Callable[[str], None]

    def planned(self, verify: int) -> TaskPlan:
        found = estimate(self.task, self.say)
        record = MachineRecord.of_this_machine(self.device)
        counts = self.workers or (self.described.machines.workers if self.described else 2,)
        cluster = self.described or DescribedCluster(
            machines=Machines(per_host=max(counts)), memory=self.required.memory, measured=True
        )
        profiles = TaskProfiles(self.task, found, device=self.device, say=self.say)
        profile_of = self._profile_of(found, profiles)
        for count in counts:
            profile_of(count, count)
        machines_of = self._machines(record, counts) if cluster.measured else cluster.of_workers
        pairs = record.pairs(max(counts)) if cluster.measured else ()
        question = Question(
            profile_of=profile_of,
            machines_of=machines_of,
            cluster=cluster,
            workers=counts,
            steps=self.steps,
            refuses=lambda strategy, count: refusal(self.task, strategy, count, found),
            must=Must.parse(self.required.must),
            strategies=self.required.strategies,
            limits=self.required,
            record=TrackRecord(pairs=pairs, noise=profiles.noise),
        )
        question = self._with_codecs(question)
        self.say("predicting each plan")
        ranked = make_plan(question)
        tried, failed = self._tried(worth_trying(ranked.finalists, verify), record)
        left = [row for row in ranked.finalists if row not in failed]
        return TaskPlan(
            task=self.task,
            cluster=cluster,
            steps=self.steps,
            ranked=ranked,
            chosen=tried[0].row if tried else (left or ranked.finalists)[0],
            device=self.device,
            tried=tried,
            notes=(*_remarks(cluster, profiles.noise, bool(tried or failed)), *failed.values()),
            question=question,
        )

    def _profile_of(self, found: Estimate, profiles: TaskProfiles) -> Callable[[int, int], TaskProfile]:
        described = self.described
        if described is None:
            return profiles.of
        if described.device is not None:
            self.say(f"counting the operations of the task's layers, for {described.device.name}")
            by_roofline = device_profile(described.device, found.footprint)
            return lambda _workers, _processes: by_roofline
        return lambda _workers, _processes: profiles.of(1, 1)  # of other machines, this one as a whole

    def _machines(self, record: MachineRecord, counts: Sequence[int]) -> Callable[[int], Machines]:
        @cache
        def costs_of(workers: int) -> dict[str, StepCosts]:
            machines = Machines(per_host=workers)
            costs = record.costs(workers)
            if costs is None:
                costs = measured_costs(machines, self.say, device=self.device)
                record.keep_costs(workers, costs)
            return {**usual_costs(machines), **costs}

        def here(workers: int) -> Machines:
            """With the costs of the workers that were asked for, among which those of `single` are."""
            return Machines(per_host=workers, costs=costs_of(workers if workers in counts else max(counts)))

        return here

    def _with_codecs(self, question: Question) -> Question:
        """With how fast workers encode and decode; of a described device that is not known."""
        codecs = [getattr(strategy, "codec", RAW) for strategy, _ in candidates(question)]
        cluster, machines_of = question.cluster, question.machines_of
        if cluster.device is not None or machines_of is None or not any(one != RAW for one in codecs):
            return question
        rates = codec_rates(codecs)
        return replace(
            question,
            cluster=replace(cluster, machines=cluster.scaled_codecs(rates)),
            machines_of=lambda workers: replace(
                machines_of(workers), codecs=cluster.scaled_codecs(rates).codecs
            ),
        )

    def _tried(
        self, rows: Sequence[PlanRow], record: MachineRecord
    ) -> tuple[tuple[TriedPlan, ...], dict[PlanRow, str]]:
        """Plans, each run for a moment in several rounds; and a sentence of each that failed."""
        seen: dict[PlanRow, list[float]] = {}
        failed: dict[PlanRow, str] = {}
        for _ in range(_ROUNDS):
            for row in [one for one in rows if one not in failed]:
                self.say(f"trying {row.strategy}")
                try:
                    took_s = try_steps(self.task, row.to_run, row.workers, _TRIAL_S, row.seconds, self.device)
                except Exception as error:  # whatever a task raises: the other plans are still worth seeing
                    failed[row] = f"{row.name} failed when it was tried: {first_line(error)}."
                else:
                    seen.setdefault(row, []).extend([took_s] if took_s is not None else [])
        tried = [
            TriedPlan(row=row, seen_s=min(times))
            for row, times in seen.items()
            if row not in failed and times
        ]
        for one in tried:
            pair = SeenStep(
                kind=cost_class(one.row.strategy), predicted_s=one.row.uncorrected_s, seen_s=one.seen_s
            )
            record.add_pairs(one.row.workers, [pair])
        return tuple(sorted(tried, key=lambda one: one.seen_s)), failed


def _remarks(cluster: DescribedCluster, noise: float, tried: bool) -> list[str]:
    said = []
    if noise > _NOISY:
        said.append(
            f"Single steps of the task differed by {100 * noise:.0f} % when it was measured; the errors that are shown "
            "are wider for it."
        )
    if cluster.device is not None:
        device, without = cluster.device, "loading data is"
        if not device.launch_s:
            without = f"loading data and launching operations (launch in [devices.{device.name}]) are"
        said.append(
            f"Computing is the roofline of {device}, operation by operation, and not measured; {without} not in it."
        )
    if not cluster.measured:
        said.append(
            "Nothing was run on these machines: ± is how far predictions are off on machines that were measured."
        )
    elif not tried:
        said.append("Nothing was tried; --verify 3 runs the best three for some seconds.")
    return said
