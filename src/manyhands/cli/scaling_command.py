"""`manyhands scaling TASK`: how much faster more workers are, with the knee, Amdahl's fit and a forecast."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.command_options import (
    AllowOverload,
    add_task_command,
    check_writable,
    command_elsewhere,
    fresh_directory,
    print_next,
)
from manyhands.cli.command_process import child_command
from manyhands.cli.leaving import Findings, leave_findings, status_line, time_left
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import ended_by_signal, start_own_workers
from manyhands.cli.simulate_command import parse_seconds
from manyhands.errors import UserError
from manyhands.lab.sweep.trials import flag, parse_values
from manyhands.workloads.registry import offered
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.lab.scaling.run_scaling import ScalingProgress, ScalingSettings
    from manyhands.lab.scaling.scaling_report import ScalingCurve

__all__ = ["scaling_app"]

scaling_app = typer.Typer(
    help="Say how much faster more workers are: a curve with its knee, beside Amdahl's fit and a forecast.",
    no_args_is_help=True,
    callback=start_own_workers,
)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """The options of every scaling curve."""

    workers: Annotated[
        str | None,
        typer.Option(
            help="How many, separated by commas.", show_default="powers of two up to twice the cores"
        ),
    ] = None
    strategy: Annotated[str, typer.Option(help="How the work is spread.")] = "mirrored"
    steps: Annotated[int, typer.Option(help="Global batches of each run.")] = 40
    repeats: Annotated[int, typer.Option(help="Runs with each number, interleaved.")] = 2
    latency: Annotated[str, typer.Option(help="Of every message, in the forecast.")] = "100us"
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Of every process's wire, in the forecast, as in 1Gbit.", show_default="without limit"
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Fixes weights, data order and everything random.")] = 0
    allow_overload: AllowOverload = False
    out: Annotated[
        Path | None, typer.Option(help="Directory of all runs.", show_default="runs/scaling-TASK-TIME")
    ] = None
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None


def _scaling(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> None:
    # Imported here so that help texts do not wait for torch.
    from manyhands.data.store.atomic import require_empty
    from manyhands.lab.scaling.run_scaling import forecast_speedups, measure_scaling, require_counts
    from manyhands.lab.scaling.scaling_report import scaling_curve
    from manyhands.lab.sweep.run_sweep import usable_cores
    from manyhands.strategy import Strategy

    spare_the_compiler()
    check_writable(common.json)
    for name, value in (("steps", common.steps), ("repeats", common.repeats)):
        if value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    cores = usable_cores()
    strategy = Strategy.parse(common.strategy)
    counts = require_counts(_counts(common.workers, len(cores)), strategy)
    task, settings = entry.build(**task_options), _settings(common, cores)
    words = ["train", entry.name, *(f"{flag(name)}={value}" for name, value in task_options.items())]
    out = common.out or fresh_directory(f"scaling-{entry.name}")
    require_empty(out)
    with ended_by_signal(lambda: f"begin again with: {command_elsewhere(sys.argv)}"), _progress() as tell:
        rates, waiting = measure_scaling(words, strategy, counts, out, settings, child_command, tell)
    step_s = task.batch_size / statistics.median(rates[1])
    forecast = forecast_speedups(task, strategy, counts, step_s, settings)
    curve = scaling_curve(rates, forecast, waiting, len(cores))
    _leave(entry.name, curve, common, out)


def _counts(text: str | None, cores: int) -> list[int]:
    if text is None:
        return [1 << power for power in range((2 * cores).bit_length()) if 1 << power <= 2 * cores]
    values = parse_values(text, ",")
    for value in values:
        if not value.isdecimal():
            raise UserError(f"--workers {value!r} is not an integer; list several as in 1,2,4")
    return [int(value) for value in values]


def _settings(common: _Common, cores: list[int]) -> ScalingSettings:
    from manyhands.foresight.simulate import NetworkModel
    from manyhands.lab.compare.bandwidth import Rate
    from manyhands.lab.scaling.run_scaling import ScalingSettings

    rate = Rate.parse(common.bandwidth).bits_per_s / 8 if common.bandwidth is not None else float("inf")
    network = NetworkModel(latency_s=parse_seconds("--latency", common.latency), bandwidth_bytes_per_s=rate)
    return ScalingSettings(
        steps=common.steps,
        repeats=common.repeats,
        seed=common.seed,
        cores=cores,
        network=network,
        allow_overload=common.allow_overload,
    )


def _leave(task: str, curve: ScalingCurve, common: _Common, out: Path) -> None:
    from manyhands.lab.scaling.scaling_report import (
        SCALING_HEAD,
        scaling_cells,
        scaling_page,
        scaling_sentences,
    )
    from manyhands.strategy import Strategy

    findings, strategy = scaling_sentences(curve), str(Strategy.parse(common.strategy))
    title = f"{task} · {strategy} · {curve.points[0].workers} to {curve.points[-1].workers} workers"
    about = {"task": task, "strategy": strategy, "steps": common.steps, "repeats": common.repeats}
    found = Findings(
        title=title,
        head=SCALING_HEAD,
        cells=scaling_cells(curve),
        findings=findings,
        figures=about | curve.to_dict(),
        page=lambda command, facts: scaling_page(title, curve, findings, command, facts),
    )
    leave_findings(found, out, common.json)
    most = curve.points[-1].workers
    print_next(
        where_the_time_goes_there=("explain", out / f"{most:03d}-workers-1"),
        with_more_workers_than_cores=("simulate", task, "--strategy", "ps", "--workers", 4 * most),
        which_strategy_is_best=("compare", task, "--workers", max(2, curve.knee)),
    )


@contextmanager
def _progress() -> Iterator[Callable[[ScalingProgress], None]]:
    with status_line() as say:

        def tell(progress: ScalingProgress) -> None:
            workers = f"{progress.workers} worker{'s' * (progress.workers > 1)}"
            say(f"run {progress.done + 1} of {progress.runs} · {workers}{time_left(progress.seconds_left)}")

        yield tell


for _entry in offered("task"):
    add_task_command(scaling_app, _entry, _Common, _scaling, f"Scaling of {_entry.help}.")
