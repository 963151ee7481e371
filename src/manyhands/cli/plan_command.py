"""`manyhands plan TASK`: which strategy is the fastest on these machines, or on others that a file describes."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from manyhands.cli.command_options import (
    Seed,
    command_anywhere,
    json_option,
    option,
    print_next,
    task_commands,
    write_json,
)
from manyhands.cli.lazy_commands import prepare_workers
from manyhands.cli.runs import ended_by_signal, keep_findings, start_own_workers, status_line
from manyhands.data.store.atomic import require_empty
from manyhands.errors import UserError, num_of
from manyhands.lab.sweep.trials import flag, parse_values
from manyhands.strategies.auto.promised import Must
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import check_count, parse_size
from manyhands.workloads.builtin_task import BuiltinTask

if TYPE_CHECKING:
    from manyhands.foresight.plan.planning import PlanRequirements, TaskPlan

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class _PlanOptions:
    workers: str | None = option(
        None, "Workers in all; several numbers, as in 1,2,4, to choose among.", shown="2, or the cluster's"
    )
    devices: str | None = option(None, "GPUs of this machine, one for each worker, as in 0,2.", shown="CPU")
    cluster: Path | None = option(
        None, "Describe other machines in this TOML file.", metavar="FILE", shown="this machine"
    )
    hosts: Path | None = option(
        None, "Hosts, a line each: NAME slots=WORKERS; with --cluster for their links.", metavar="FILE"
    )
    must: str = option(
        "equal",
        "Promises, separated by commas: equal (to one process), sync, survives=1 (lost processes); or none.",
    )
    memory: str | None = option(None, "Memory of each worker, such as 4GiB.", shown="any, or the cluster's")
    budget: str | None = option(
        None, "The most that the steps may cost, in the cluster's price, or take, such as 2h or 90s."
    )
    strategies: str | None = option(
        None, "Strategies to consider, separated by semicolons; with settings, just these.", shown="all"
    )
    steps: int | None = option(None, "Global batches that are wanted.", shown="the task's usual length")
    verify: int = option(0, "Try the best so many for some seconds here, and choose by what was seen.")
    measure: bool = option(False, "Measure this machine again.", "--measure")
    seed: Seed = 0
    out: Path | None = option(None, "Write a page about the plans into this directory.")
    json_file: Path | None = json_option("Write the plan to this file, for `train --plan`.")


def _plan(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _PlanOptions) -> None:
    # Mistakes are said before anything is imported or measured.
    workers, devices = _counts(common.workers), _gpus(common.devices)
    if common.steps is not None:
        check_count("steps", common.steps)
    if common.out is not None:
        require_empty(common.out)
    if common.verify and common.cluster is not None:
        raise UserError("verify tries plans on this machine; leave the cluster out")
    Must.parse(common.must)
    required, cluster = _required(common), _cluster(common)
    if cluster is None or cluster.device is None:  # the task is measured
        prepare_workers([entry.name])
    with ended_by_signal(lambda: f"plan again with: {command_anywhere(sys.argv)}"), status_line() as say:
        from manyhands.foresight.plan.machine_record import MachineRecord
        from manyhands.foresight.plan.planning import plan

        device = "cuda" if devices else "cpu"
        if common.measure:
            MachineRecord.of_this_machine(device).forget_costs()
        say("reading the data")
        found = plan(
            entry.build(**task_options),
            workers=len(devices) if devices and workers is None else workers,
            cluster=cluster,
            required=required,
            steps=common.steps,
            verify=common.verify,
            device=device,
            say=say,
        )
    _show(entry.name, found)
    options = {flag(name).removeprefix("--"): str(value) for name, value in task_options.items()}
    _write(entry.name, options, found, common)
    if found.cluster.measured:
        words = [part for name, value in options.items() for part in (f"--{name}", value)]
        on = ["--device", "cuda"] if devices else []
        chosen = ("--workers", found.workers, "--strategy", found.strategy)
        print_next(train_so=("train", entry.name, *words, *on, *chosen))


def _counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    counts = []
    for value in parse_values(text, ","):
        if not value.lstrip("-").isdecimal():
            raise UserError(f"--workers {value!r} is not an integer; write several as 1,2,4")
        counts.append(int(value))
        check_count("workers", counts[-1])
    return counts


def _gpus(text: str | None) -> list[int]:
    """The GPUs that are asked for; the command begins again as a process that sees no others."""
    if text is None or text == "cpu":
        return []
    from manyhands.engine.device import num_gpus

    values = parse_values(text, ",")
    for value in values:
        if not value.lstrip("-").isdecimal():
            raise UserError(f"--devices {value!r} is not the number of a GPU; write several as 0,2")
    numbers = [int(value) for value in values]
    seen = ",".join(map(str, numbers))
    if os.environ.get(_GPUS) != seen:
        there = num_gpus()
        for number in numbers:
            if not 0 <= number < there:
                raise UserError(
                    f"--devices {number}: this machine has {num_of(there, 'GPU')}, numbered from 0"
                )
        os.environ[_GPUS] = seen
        os.execv(sys.executable, [sys.executable, "-m", "manyhands", *sys.argv[1:]])
    return numbers


def _required(common: _PlanOptions) -> PlanRequirements:
    """The budget is a price, or a duration with its unit."""
    from manyhands.foresight.plan.described_cluster import parse_budget
    from manyhands.foresight.plan.planning import PlanRequirements

    given = common.strategies
    found = PlanRequirements(
        must=common.must,
        strategies=tuple(STRATEGIES) if given is None else tuple(t for t in given.split(";") if t.strip()),
        memory=parse_size(common.memory) if common.memory else 0,
    )
    if common.budget is None:
        return found
    try:
        price = float(common.budget)
    except ValueError:
        price = math.nan
    if price > 0:
        return replace(found, price=price)
    return replace(found, seconds=parse_budget(common.budget))


def _cluster(common: _PlanOptions) -> Any:
    from manyhands.foresight.plan.described_cluster import DescribedCluster
    from manyhands.foresight.plan.host_list import with_hosts

    if common.hosts is not None and common.cluster is None:
        raise UserError(
            "--hosts says how many hosts there are, and not how fast; describe their links in --cluster FILE"
        )
    if common.cluster is None:
        return None
    found = DescribedCluster.from_file(common.cluster)
    return with_hosts(found, common.hosts) if common.hosts is not None else found


def _show(task: str, plan: TaskPlan) -> None:
    from manyhands.foresight.plan.plan_page import plan_cells, plan_head, plan_sentences, plan_title

    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = 140
    out.print(plan_title(task, plan), markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    *head, reason = plan_head(plan)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left", no_wrap=bool(place))
    table.add_column(reason)
    for cells in plan_cells(plan):
        table.add_row(*cells)
    out.print(table)
    for sentence in plan_sentences(plan):
        out.print(sentence, markup=False, soft_wrap=True)


def _write(task: str, options: dict[str, str], plan: TaskPlan, common: _PlanOptions) -> None:
    from manyhands.foresight.plan.plan_file import plan_record
    from manyhands.foresight.plan.plan_page import plan_page

    record = plan_record(task, options, plan)
    if common.out is None:
        write_json(common.json_file, record)
        return
    page = keep_findings(
        common.out,
        common.json_file,
        record,
        lambda command, facts: plan_page(task, plan, command, facts),
    )
    print(f"page  {page}")


plan_app = task_commands(_plan, "Plan the training of {help}.", callback=start_own_workers)
