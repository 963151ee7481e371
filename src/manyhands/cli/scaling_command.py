"""`manyhands scaling TASK`: how much faster more workers are, with the knee, Amdahl's fit and a forecast."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.command_options import (
    AllowOverload,
    Seed,
    command_elsewhere,
    fresh_directory,
    json_option,
    option,
    print_next,
    task_commands,
)
from manyhands.cli.command_process import child_command
from manyhands.cli.runs import ended_by_signal, leave_findings, progress_line, start_own_workers
from manyhands.cli.simulate_command import network_model
from manyhands.errors import UserError, num_of
from manyhands.lab.sweep.trials import flag, parse_values
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.lab.scaling.scaling_curve import ScalingCurve

__all__ = ["scaling_app"]


@dataclass(frozen=True, kw_only=True)
class _ScalingOptions:
    workers: str | None = option(
        None, "How many, separated by commas.", show_default="powers of two up to twice the cores"
    )
    strategy: str = option("mirrored", "How the work is spread.")
    steps: int = option(40, "Global batches of each run.")
    repeats: int = option(2, "Runs with each number, interleaved.")
    latency: str = option("100us", "Of every message, in the forecast.")
    bandwidth: str | None = option(
        None, "Of every process's wire, in the forecast, as in 1Gbit.", show_default="without limit"
    )
    seed: Seed = 0
    allow_overload: AllowOverload = False
    out: Path | None = option(None, "Directory of all runs.", show_default="runs/scaling-TASK-TIME")
    json: Path | None = json_option()


def _scaling(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _ScalingOptions) -> None:
    from manyhands.data.store.atomic import require_empty
    from manyhands.lab.scaling import scaling_curve as curves
    from manyhands.lab.sweep.run_sweep import usable_cores
    from manyhands.strategy import Strategy

    for name, value in (("steps", common.steps), ("repeats", common.repeats)):
        if value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    cores = usable_cores()
    strategy = Strategy.parse(common.strategy)
    counts = curves.require_counts(_counts(common.workers, len(cores)), strategy)
    task = entry.build(**task_options)
    settings = curves.ScalingSettings(
        steps=common.steps,
        repeats=common.repeats,
        seed=common.seed,
        cores=cores,
        network=network_model(common.latency, common.bandwidth),
        allow_overload=common.allow_overload,
    )
    words = ["train", entry.name, *(f"{flag(name)}={value}" for name, value in task_options.items())]
    out = common.out or fresh_directory(f"scaling-{entry.name}")
    require_empty(out)
    with (
        ended_by_signal(lambda: f"begin again with: {command_elsewhere(sys.argv)}"),
        progress_line(
            lambda one: f"run {one.done + 1} of {one.runs} · {num_of(one.workers, 'worker')}"
        ) as report,
    ):
        rates, waiting = curves.measure_scaling(words, strategy, counts, out, settings, child_command, report)
    step_s = task.batch_size / statistics.median(rates[1])
    forecast = curves.forecast_speedups(task, strategy, counts, step_s, settings)
    _leave(entry.name, str(strategy), curves.scaling_curve(rates, forecast, waiting, len(cores)), common, out)


def _counts(text: str | None, cores: int) -> list[int]:
    if text is None:
        return [1 << power for power in range((2 * cores).bit_length()) if 1 << power <= 2 * cores]
    values = parse_values(text, ",")
    for value in values:
        if not value.isdecimal():
            raise UserError(f"--workers {value!r} is not an integer; list several as in 1,2,4")
    return [int(value) for value in values]


def _leave(task: str, strategy: str, curve: ScalingCurve, common: _ScalingOptions, out: Path) -> None:
    from manyhands.lab.scaling import scaling_curve as curves
    from manyhands.observe.draw.time_table import words_table

    sentences, most = curves.scaling_sentences(curve), curve.points[-1].workers
    title = f"{task} · {strategy} · {curve.points[0].workers} to {most} workers"
    about = {"task": task, "strategy": strategy, "steps": common.steps, "repeats": common.repeats}
    leave_findings(
        out,
        common.json,
        [words_table(title, curves.SCALING_HEAD, curves.scaling_cells(curve))],
        sentences,
        {**about, **curve.to_dict(), "told": sentences},
        lambda command, facts: curves.scaling_page(title, curve, sentences, command, facts),
    )
    print_next(
        where_the_time_goes_there=("explain", out / f"{most:03d}-workers-1"),
        with_more_workers_than_cores=("simulate", task, "--strategy", "ps", "--workers", 4 * most),
        which_strategy_is_best=("compare", task, "--workers", max(2, curve.knee)),
    )


scaling_app = task_commands(_scaling, "Scaling of {help}.", callback=start_own_workers)
