"""How training would go: `manyhands simulate TASK` runs parameter servers in virtual time, with the directory and page
of a run; `manyhands scaling TASK` says how much faster more workers are, with the knee, Amdahl's fit and a forecast.
"""

from __future__ import annotations

import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli import command_options
from manyhands.cli.command_options import AllowOverload, Seed, json_option, option, print_next, task_commands
from manyhands.cli.command_process import child_command
from manyhands.cli.runs import ended_by_signal, leave_findings, progress_line, start_own_workers
from manyhands.cli.train_command import end_run, task_table
from manyhands.errors import UserError
from manyhands.lab.sweep.trials import flag, parse_values
from manyhands.workloads.builtin_task import BuiltinTask

if TYPE_CHECKING:
    from manyhands.foresight.simulate.simulated_spec import NetworkModel
    from manyhands.lab.scaling.scaling_curve import ScalingCurve

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


@dataclass(frozen=True, kw_only=True)
class _SimulateOptions:
    strategy: str = option("ps consistency=async", "ps, with settings: 'ps consistency=aware:softsync:30'.")
    workers: int = option(8, "Simulated workers, which need no cores.")
    compute: str | None = option(None, "Time of a worker for a batch, such as 12ms.", shown="measured here")
    slow: list[str] | None = option(
        None, "Slow down a worker: worker=1,factor=5[,probability=0.1][,from=400]; repeatable."
    )
    spread: float = option(0.0, "Largest random change of a computing time, as a share of it.")
    latency: str = option("100us", "Latency of every message, such as 1ms.")
    jitter: str = option("0s", "Largest random addition to a latency.")
    bandwidth: str | None = option(None, "Bandwidth of each process, such as 1Gbit.", shown="no limit")
    apply: str = option("0s", "Time of a server's optimizer step.")
    steps: int | None = option(None, "Global batches to train.")
    epochs: int | None = option(None, "Passes over the data, instead of --steps.", shown="half of train's")
    seed: Seed = 0
    evaluate_every: int | None = option(None, "Steps between evaluations.")
    out: Path | None = option(None, "Run directory.", shown="runs/simulated-TASK-TIME")
    progress: str = option("auto", "bar, lines or none; auto: a bar in a terminal.")
    json: Path | None = json_option("Write the summary to this file.")


def parse_seconds(option: str, text: str) -> float:
    """The seconds that `1.5ms` stands for; UserError names the option and what is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|µs)", text.strip().lower())
    if match is None:
        raise UserError(f"{option} {text!r} is not a time; write it as 2s, 10ms or 50us")
    return float(match[1]) * _UNITS[match[2]]


def network_model(latency: str, bandwidth: str | None, jitter: str = "0s") -> NetworkModel:
    """The network that these options describe; UserError names the first that makes no sense."""
    from manyhands.foresight.simulate.simulated_spec import NetworkModel
    from manyhands.lab.compare.bandwidth import Rate

    return NetworkModel(
        latency_s=parse_seconds("--latency", latency),
        jitter_s=parse_seconds("--jitter", jitter),
        bandwidth_bytes_per_s=float("inf") if bandwidth is None else Rate.parse(bandwidth).bits_per_s / 8,
    )


def _simulate(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _SimulateOptions) -> None:
    from manyhands.engine.options import Options, Slowdown
    from manyhands.engine.request import Length
    from manyhands.foresight.simulate.simulated_spec import SimulatedConditions
    from manyhands.foresight.simulate.simulated_training import fit_simulated

    conditions = SimulatedConditions(
        step_s=parse_seconds("--compute", common.compute) if common.compute is not None else None,
        slow=tuple(map(Slowdown.parse, common.slow or ())),
        spread=common.spread,
        network=network_model(common.latency, common.bandwidth, common.jitter),
        apply_s=parse_seconds("--apply", common.apply),
    )
    task = entry.build(**task_options)
    out = common.out or command_options.fresh_directory(f"simulated-{entry.name}")
    with ended_by_signal(lambda: f"start again with: {command_options.command_anywhere(sys.argv)}"):
        run = fit_simulated(
            task,
            common.strategy,
            workers=common.workers,
            length=Length(**command_options.half_length(entry, common)),
            seed=common.seed,
            out=out,
            conditions=conditions,
            options=Options(
                evaluate_every=common.evaluate_every, progress=common.progress, resume_command=""
            ),
        )
    end_run(run, out, common.json, task_table(entry, task, run))
    print_next(
        where_the_time_goes=("explain", out),
        who_waits_for_whom=("show", out, "--as", "svg"),
        the_page_of_the_run=("show", out),
        the_recorded_order_again=("replay", out),
    )


simulate_app = task_commands(_simulate, "Simulate workers and parameter servers that train {help}.")


@dataclass(frozen=True, kw_only=True)
class _ScalingOptions:
    workers: str | None = option(
        None, "Numbers of workers, separated by commas.", shown="powers of 2 up to twice the cores"
    )
    strategy: str = option("mirrored", "Strategy, with settings.")
    steps: int = option(40, "Global batches per run.")
    repeats: int = option(2, "Runs per number of workers, interleaved.")
    latency: str = option("100us", "Latency of every message in the forecast.")
    bandwidth: str | None = option(None, "Bandwidth in the forecast, such as 1Gbit.", shown="no limit")
    seed: Seed = 0
    allow_overload: AllowOverload = False
    out: Path | None = option(None, "Directory for all runs.", shown="runs/scaling-TASK-TIME")
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
    out = common.out or command_options.fresh_directory(f"scaling-{entry.name}")
    require_empty(out)
    with (
        ended_by_signal(lambda: f"start again with: {command_options.command_anywhere(sys.argv)}"),
        progress_line() as report,
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
            raise UserError(f"--workers {value!r} is not an integer; write several as 1,2,4")
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


scaling_app = task_commands(_scaling, "Measure the scaling of {help}.", callback=start_own_workers)
