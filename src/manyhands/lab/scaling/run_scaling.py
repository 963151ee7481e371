"""The runs behind a scaling curve: the same task and steps with each number of workers, interleaved; and a forecast."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.data.store.atomic import make_output
from manyhands.errors import ManyhandsError, UserError
from manyhands.foresight.simulate import ComputeModel, NetworkModel, SimulationSpec, simulate
from manyhands.lab.compare.comparison import Trial
from manyhands.lab.compare.run_comparison import measure
from manyhands.lab.sweep.run_sweep import Launch, end_processes, last_said
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["ScalingProgress", "ScalingSettings", "forecast_speedups", "measure_scaling", "require_counts"]

_FORECAST_ROUNDS = 40


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """How each run is made; all alike."""

    steps: int
    repeats: int = 2
    seed: int = 0
    cores: Sequence[int] = (0,)  # that there are: n workers have n of them, or all
    network: NetworkModel = NetworkModel()  # noqa: RUF009 - a frozen value
    """Between the workers of the forecast."""
    allow_overload: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingProgress:
    """How far it is, as a run begins."""

    done: int
    runs: int
    workers: int
    seconds_left: float | None


def require_counts(counts: Sequence[int], strategy: Strategy) -> list[int]:
    """The numbers of workers in order, with 1, which all are compared with; UserError for what makes no sense."""
    for count in counts:
        if count < 1:
            raise UserError(f"--workers {count} must be at least 1")
    found = sorted({1, *counts})
    if len(found) < 2:
        raise UserError("--workers 1 has nothing to compare; give several, as in 1,2,4")
    if strategy.most_workers is not None and strategy.most_workers < found[-1]:
        raise UserError(f"strategy={strategy} has at most {strategy.most_workers} worker; use mirrored")
    if strategy.facts.counts_rounds:
        raise UserError(
            f"strategy={strategy} is counted in rounds, whose work grows with its workers; use mirrored"
        )
    for count in found:
        strategy.check(count, "cpu", compiled=False)
    return found


def measure_scaling(
    words: Sequence[str],
    strategy: Strategy,
    counts: Sequence[int],
    out: Path,
    settings: ScalingSettings,
    launch: Launch,
    on_progress: Callable[[ScalingProgress], None] = lambda _: None,
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Run `manyhands WORDS` with each number of workers, `repeats` times in turn, each in a directory of its own.

    By number: the samples per second of each run, and the median share of waiting. A run that fails is a ManyhandsError
    with the last that it said. Each has a process of its own, on as many cores as it has workers: a lone worker would
    otherwise compute with all of them.
    """
    make_output(out)
    rates: dict[int, list[float]] = defaultdict(list)
    waits: dict[int, list[float]] = defaultdict(list)
    # Nothing is saved or measured before the end.
    common = [f"--{name}={settings.steps}" for name in ("steps", "evaluate-every", "checkpoint-every")]
    common += [f"--seed={settings.seed}", "--progress=none"]
    common += ["--allow-overload"] if settings.allow_overload else []
    order = [(repeat, workers) for repeat in range(settings.repeats) for workers in counts]
    began = time.monotonic()
    for done, (repeat, workers) in enumerate(order):
        left_s = (time.monotonic() - began) / done * (len(order) - done) if done else None
        on_progress(ScalingProgress(done=done, runs=len(order), workers=workers, seconds_left=left_s))
        folder = out / f"{workers:03d}-workers-{repeat + 1}"
        own = [f"--strategy={strategy}", f"--workers={workers}", f"--out={folder}", *common]
        _run(launch(settings.cores[:workers], [*words, *own]), folder.with_suffix(".log"), workers)
        found = measure(Trial(place=0, repeat=repeat), folder, strategy)
        rates[workers].append(found.samples / found.seconds)
        waits[workers].append(found.waited_s / found.accounted_s if found.accounted_s > 0 else 0.0)
    return rates, {workers: statistics.median(shares) for workers, shares in waits.items()}


def _run(command: Sequence[str], log: Path, workers: int) -> None:
    """One run to its end; when this returns or raises, its process is gone."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait()  # its own watchdog ends a run that stands still
    finally:
        end_processes([process])
    if status:
        raise ManyhandsError(
            f"the run with {workers} worker{'s' * (workers > 1)} ended with status {status}: {last_said(log)}"
        )


def forecast_speedups(
    task: Task, strategy: Strategy, counts: Sequence[int], step_s: float, settings: ScalingSettings
) -> Mapping[int, float]:
    """What the simulator says of so many workers, each as fast as the one that was measured, on these cores.

    Workers of parameter servers are simulated as they are, those of other strategies as synchronous ones; what lies
    between them is the network. More workers than cores take turns.
    """
    num_bytes = sum(one.numel() * one.element_size() for one in task.model().parameters())
    consistency = getattr(strategy, "consistency", "sync")
    speeds: dict[int, float] = {}
    for workers in counts:
        slower = max(1.0, workers / len(settings.cores))
        run = simulate(
            SimulationSpec(
                workers=workers,
                steps=_FORECAST_ROUNDS * workers,
                consistency=consistency,
                shards=getattr(strategy, "servers", 1),
                compute=ComputeModel(step_s=step_s * slower),
                network=settings.network,
                gradient_bytes=num_bytes,
                seed=settings.seed,
            )
        )
        speeds[workers] = run.num_batches / (run.seconds - run.began_s)
    return {workers: speed / speeds[1] for workers, speed in speeds.items()}
