"""`manyhands plan TASK`: which strategy is the fastest on these machines, or on others that a file describes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import Seed, json_option, option, print_next, task_commands, write_json
from manyhands.cli.runs import start_own_workers, status_line
from manyhands.errors import UserError, format_bytes, num_of
from manyhands.lab.sweep.trials import flag
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy, check_choice, check_count, parse_size
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.facts import TaskProfile
    from manyhands.foresight.estimate import Estimate
    from manyhands.foresight.plan.described_cluster import DescribedCluster
    from manyhands.foresight.plan.plan_search import PlanRow, Question, RankedPlans
    from manyhands.lab.plan.tried_plans import Tried
    from manyhands.task import Task

__all__ = ["plan_app"]


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    workers: int | None = option(None, "Workers in all.", shown="2, or those of the cluster")
    cluster: Path | None = option(
        None,
        "Describe other machines in this TOML file; the task is measured here.",
        metavar="FILE",
        shown="here",
    )
    must: str = option(
        "equal", "Promises of the plan, separated by commas: equal (to one process), sync, survives; or none."
    )
    memory: str | None = option(None, "Memory of each worker, such as 4GiB.", shown="any, or the cluster's")
    strategies: str | None = option(
        None, "Strategies to consider, separated by semicolons; with settings, just these.", shown="all"
    )
    verify: int = option(0, "Try the best so many for some steps here, and choose by what was seen.")
    steps: int = option(30, "Steps of each trial of --verify.")
    seed: Seed = 0
    json_file: Path | None = json_option("Write the plan to this file, for `train --plan`.")


def _plan(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _PlanOptions) -> None:
    from manyhands.foresight.estimate import estimate
    from manyhands.foresight.plan.plan_file import plan_record
    from manyhands.foresight.plan.plan_search import MUSTS, make_plan

    if common.verify and common.cluster is not None:
        raise UserError("--verify tries plans on this machine; leave --cluster out")
    if common.verify < 0:
        raise UserError(f"--verify {common.verify} must be at least 0")
    for name in ("workers", "steps"):
        if getattr(common, name) is not None:
            check_count(name, getattr(common, name))
    # Mistakes are said before anything is measured.
    must = tuple(word.strip() for word in common.must.split(",") if word.strip() not in ("", "none"))
    for name in must:
        check_choice("must", name, MUSTS)
    for text in _asked(common):
        Strategy.parse(text)
    cluster = _described(common)
    workers = common.workers or (cluster.machines.workers if cluster is not None else 2)
    with status_line() as say:
        say("reading the data")
        task = entry.build(**task_options)
        found = estimate(task, say)
        if cluster is None:
            say(f"measuring the links between {num_of(workers, 'worker')}")
            cluster = _here(workers, common)
        question, noise = _question(task, found, cluster, workers, must, common)
        say("measuring the task, and playing each plan")
        plan = make_plan(question)
        tried = _tried(task, plan, common) if common.verify else ()
    _show(entry.name, plan, cluster, workers, noise(), tried)
    chosen = tried[0].strategy if tried else str(plan.rows[0].strategy)
    of_chosen = next(row.workers for row in plan.rows if str(row.strategy) == chosen)
    options = {flag(name).removeprefix("--"): str(value) for name, value in task_options.items()}
    write_json(
        common.json_file, plan_record(entry.name, options, plan, chosen, [asdict(one) for one in tried])
    )
    if common.cluster is None:
        words = [part for name, value in options.items() for part in (f"--{name}", value)]
        print_next(train_so=("train", entry.name, *words, "--workers", of_chosen, "--strategy", chosen))


def _asked(common: _PlanOptions) -> tuple[str, ...]:
    if common.strategies is None:
        return tuple(STRATEGIES)
    return tuple(text for text in common.strategies.split(";") if text.strip())


def _described(common: _PlanOptions) -> DescribedCluster | None:
    from manyhands.foresight.plan.described_cluster import DescribedCluster

    if common.cluster is None:
        return None
    found = DescribedCluster.from_file(common.cluster)
    return replace(found, memory=parse_size(common.memory)) if common.memory else found


def _here(workers: int, common: _PlanOptions) -> DescribedCluster:
    from manyhands.foresight.plan.described_cluster import DescribedCluster
    from manyhands.lab.plan.measured_host import measured_host

    memory = parse_size(common.memory) if common.memory else 0
    return DescribedCluster(machines=measured_host(workers), memory=memory, measured=True)


def _question(
    task: Task,
    found: Estimate,
    cluster: DescribedCluster,
    workers: int,
    must: tuple[str, ...],
    common: _PlanOptions,
) -> tuple[Question, Any]:
    from manyhands.foresight.estimate import refusal
    from manyhands.foresight.plan.plan_search import Question
    from manyhands.foresight.plan.task_profile import measure_profile

    cores, noises = len(os.sched_getaffinity(0)), [0.0]

    @cache
    def of_threads(threads: int) -> TaskProfile:
        measured = measure_profile(task, found.footprint, threads)
        noises.append(measured.noise)
        return measured.profile

    def profile_of(per_host: int) -> TaskProfile:
        """Of a worker that has its share of the cores; of other machines, of this one as a whole."""
        if not cluster.measured:
            return of_threads(cores)
        own = of_threads(max(1, cores // per_host))
        return replace(cluster, speed=min(1.0, cores / per_host)).scaled(own)

    def refuses(strategy: Strategy, count: int) -> str:
        if cluster.measured and strategy.uses_network:
            return "not modelled: loopback TCP is not measured"
        return refusal(task, strategy, count, found)

    question = Question(
        profile_of=profile_of,
        cluster=cluster,
        workers=workers,
        refuses=refuses,
        must=must,
        strategies=_asked(common),
    )
    return question, lambda: max(noises)


def _tried(task: Task, plan: RankedPlans, common: _PlanOptions) -> Sequence[Tried]:
    from manyhands.lab.plan.tried_plans import try_plans

    rows = [row for row in plan.rows if row.predicted is not None and _may_be_chosen(row)]
    return try_plans(task, rows[: common.verify], steps=common.steps, seed=common.seed)


def _may_be_chosen(row: PlanRow) -> bool:
    return not row.reason.startswith(("ruled out", "does not fit"))


_HEAD = ("plan", "step", "computing", "exchange", "waiting", "optimizer", "memory", "sends")


def _show(
    task: str,
    plan: RankedPlans,
    cluster: DescribedCluster,
    workers: int,
    noise: float,
    tried: Sequence[Tried],
) -> None:
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 140
    machines = cluster.machines
    where = "this machine" if cluster.measured else f"{num_of(machines.hosts, 'host')} of {machines.per_host}"
    out.print(f"{task} on {num_of(workers, 'worker')} · {where}", markup=False)
    with_price = any(row.price is not None for row in plan.rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate((*_HEAD, *(["1,000 steps"] if with_price else []))):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place))
    table.add_column("why not")
    for row in plan.rows:
        price = [] if not with_price else ["–" if row.price is None else f"{row.price:.4g}"]
        table.add_row(
            str(row.strategy),
            *_times(row),
            *_sizes(row),
            *price,
            row.reason,
        )
    out.print(table)
    for sentence in (*plan.sensitivities, *_about(cluster, noise, tried)):
        out.print(sentence, markup=False, soft_wrap=True)


def _times(row: PlanRow) -> list[str]:
    step = row.predicted
    if step is None:
        return ["–"] * 5
    parts = (step.compute_s, step.exchange_s, step.waiting_s, step.optimizer_s)
    return [
        _milliseconds(step.seconds),
        *(_milliseconds(part / step.batches) if part else "–" for part in parts),
    ]


def _sizes(row: PlanRow) -> list[str]:
    sent = "?" if row.sent is None else format_bytes(row.sent) if row.sent else "–"
    return [format_bytes(row.memory) if row.memory else "–", sent]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


_NOISY = 0.25


def _about(cluster: DescribedCluster, noise: float, tried: Sequence[Tried]) -> list[str]:
    said = []
    if noise > _NOISY:
        said.append(
            f"The measurements of the task differed by {100 * noise:.0f} %: other programs use this machine, and "
            "predictions are as uncertain."
        )
    if not cluster.measured:
        said.append(
            "Nothing was run on these machines: times are scaled from this one by speed in the cluster file."
        )
    for one in tried:
        said.append(
            f"{one.strategy}: {_milliseconds(one.seen_s)} a step were seen, {_milliseconds(one.predicted_s)} predicted "
            f"({100 * (one.predicted_s / one.seen_s - 1):+.0f} %)."
        )
    if cluster.measured and not tried:
        said.append("Nothing was tried; --verify 3 runs the best three for some steps.")
    return said


plan_app = task_commands(_plan, "Plan the training of {help}.", callback=start_own_workers)
