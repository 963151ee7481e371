"""`manyhands simulate TASK`: a task under parameter servers in virtual time, with the directory and page of a run."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.command_options import (
    add_task_command,
    check_writable,
    command_elsewhere,
    fresh_directory,
    half,
    print_next,
)
from manyhands.cli.program import spare_the_compiler
from manyhands.cli.runs import ended_by_signal
from manyhands.cli.train_command import end_run, task_table
from manyhands.errors import UserError
from manyhands.workloads.registry import offered
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.foresight.simulate.simulated_spec import SimulatedConditions

__all__ = ["parse_seconds", "simulate_app"]

simulate_app = typer.Typer(
    help="Train a built-in task on parameter servers in virtual time, with more workers than there are cores.",
    no_args_is_help=True,
)

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


@dataclass(frozen=True, kw_only=True)
class _Common:
    """The options of every simulation."""

    strategy: Annotated[
        str, typer.Option(help="ps, with its settings: 'ps consistency=aware:softsync:30'.")
    ] = "ps consistency=async"
    workers: Annotated[int, typer.Option(help="Simulated workers; none of them takes a core.")] = 8
    compute: Annotated[
        str | None,
        typer.Option(
            help="How long one worker computes a whole batch, as in 12ms.", show_default="measured here"
        ),
    ] = None
    slow: Annotated[
        list[str] | None,
        typer.Option(help="Slow a worker: worker=1,factor=5[,probability=0.1][,from=400]; may be repeated."),
    ] = None
    spread: Annotated[
        float, typer.Option(help="By up to which share any computation is longer or shorter.")
    ] = 0.0
    latency: Annotated[str, typer.Option(help="Of every message, as in 1ms.")] = "100us"
    jitter: Annotated[str, typer.Option(help="The most that is added to a latency.")] = "0s"
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Of every process's wire, as in 1Gbit.", show_default="without limit"),
    ] = None
    apply: Annotated[str, typer.Option(help="How long a server's optimizer step takes.")] = "0s"
    steps: Annotated[int | None, typer.Option(help="Global batches to train.")] = None
    epochs: Annotated[
        int | None,
        typer.Option(help="Passes over the data, instead of --steps.", show_default="half of train's"),
    ] = None
    seed: Annotated[int, typer.Option(help="Fixes weights, data order and everything random.")] = 0
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None
    out: Annotated[
        Path | None, typer.Option(help="Run directory.", show_default="runs/simulated-TASK-TIME")
    ] = None
    progress: Annotated[str, typer.Option(help="bar, lines or none; auto: a bar in a terminal.")] = "auto"
    json: Annotated[Path | None, typer.Option(help="Write the summary to this file.")] = None


def parse_seconds(option: str, text: str) -> float:
    """The seconds that `1.5ms` stands for; UserError names the option and what is allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us|µs)", text.strip().lower())
    if match is None:
        raise UserError(f"{option} {text!r} is no time; write it as 2s, 10ms or 50us")
    return float(match[1]) * _UNITS[match[2]]


def _conditions(common: _Common) -> SimulatedConditions:
    from manyhands.engine.options import Slowdown
    from manyhands.foresight.simulate.network import NetworkModel
    from manyhands.foresight.simulate.simulated_spec import SimulatedConditions
    from manyhands.lab.compare.bandwidth import Rate

    rate = Rate.parse(common.bandwidth).bits_per_s / 8 if common.bandwidth is not None else float("inf")
    return SimulatedConditions(
        step_s=parse_seconds("--compute", common.compute) if common.compute is not None else None,
        slow=tuple(map(Slowdown.parse, common.slow or ())),
        spread=common.spread,
        network=NetworkModel(
            latency_s=parse_seconds("--latency", common.latency),
            jitter_s=parse_seconds("--jitter", common.jitter),
            bandwidth_bytes_per_s=rate,
        ),
        apply_s=parse_seconds("--apply", common.apply),
    )


def _simulate(entry: BuiltinTask[Any], task_options: dict[str, Any], common: _Common) -> None:
    # Imported here so that help texts do not wait for torch.
    from manyhands.engine.options import Options
    from manyhands.engine.request import Length
    from manyhands.foresight.simulate.simulated_training import fit_simulated

    spare_the_compiler()
    check_writable(common.json)
    conditions = _conditions(common)
    task = entry.build(**task_options)
    steps, epochs = common.steps, common.epochs
    if steps is None and epochs is None:
        steps, epochs = half(entry.steps), half(entry.epochs)
    out = common.out or fresh_directory(f"simulated-{entry.name}")
    with ended_by_signal(lambda: f"begin again with: {command_elsewhere(sys.argv)}"):
        run = fit_simulated(
            task,
            common.strategy,
            workers=common.workers,
            length=Length(steps=steps, epochs=epochs),
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
        who_waits_for_whom=("timeline", out, "--format", "svg"),
        the_page_of_the_run=("watch", out),
        the_recorded_order_again=("replay", out),
    )


for _entry in offered("task"):
    add_task_command(
        simulate_app,
        _entry,
        _Common,
        _simulate,
        f"Simulate workers and parameter servers that train {_entry.help}.",
    )
