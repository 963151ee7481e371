"""`manyhands simulate TASK`: a task under parameter servers in virtual time, with the directory and page of a run."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.command_options import (
    Seed,
    command_elsewhere,
    fresh_directory,
    half_length,
    json_option,
    option,
    print_next,
    task_commands,
)
from manyhands.cli.runs import ended_by_signal
from manyhands.cli.train_command import end_run, task_table
from manyhands.errors import UserError
from manyhands.workloads.tasks.builtin import BuiltinTask

if TYPE_CHECKING:
    from manyhands.foresight.simulate.simulated_spec import NetworkModel

__all__ = ["network_model", "parse_seconds", "simulate_app"]

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


@dataclass(frozen=True, kw_only=True)
class _SimulateOptions:
    strategy: str = option(
        "ps consistency=async", "ps, with its settings: 'ps consistency=aware:softsync:30'."
    )
    workers: int = option(8, "Simulated workers; none of them takes a core.")
    compute: str | None = option(
        None, "How long one worker computes a whole batch, as in 12ms.", show_default="measured here"
    )
    slow: list[str] | None = option(
        None, "Slow a worker: worker=1,factor=5[,probability=0.1][,from=400]; may be repeated."
    )
    spread: float = option(0.0, "By up to which share any computation is longer or shorter.")
    latency: str = option("100us", "Of every message, as in 1ms.")
    jitter: str = option("0s", "The most that is added to a latency.")
    bandwidth: str | None = option(
        None, "Of every process's wire, as in 1Gbit.", show_default="without limit"
    )
    apply: str = option("0s", "How long a server's optimizer step takes.")
    steps: int | None = option(None, "Global batches to train.")
    epochs: int | None = option(
        None, "Passes over the data, instead of --steps.", show_default="half of train's"
    )
    seed: Seed = 0
    evaluate_every: int | None = option(None, "Steps between evaluations.")
    out: Path | None = option(None, "Run directory.", show_default="runs/simulated-TASK-TIME")
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
    out = common.out or fresh_directory(f"simulated-{entry.name}")
    with ended_by_signal(lambda: f"begin again with: {command_elsewhere(sys.argv)}"):
        run = fit_simulated(
            task,
            common.strategy,
            workers=common.workers,
            length=Length(**half_length(entry, common)),
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
