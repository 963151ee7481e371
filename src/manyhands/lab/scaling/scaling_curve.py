"""How much faster more workers are: the runs, interleaved, and a forecast; the curve, its sentences, table and page."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from manyhands.data.store.atomic import make_output
from manyhands.errors import ManyhandsError, UserError, num_of
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec
from manyhands.lab.compare.comparison import Progress, Trial
from manyhands.lab.compare.run_comparison import measure
from manyhands.lab.sweep.run_sweep import Launch, end_processes, last_said
from manyhands.observe.draw import paper
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.strategy import Strategy
from manyhands.task import Task

HALF = 0.5
"""More workers are worth it as long as they bring at least this part of what they would bring at best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One number of workers."""

    workers: int
    samples_per_s: float  # the median over the repeats
    low: float
    high: float
    speedup: float  # times as fast as one worker
    amdahl: float | None
    """What the fit gives for so many workers with a core each; None where nothing could be fitted."""
    forecast: float  # what the simulator says of so many workers on the cores there are
    waiting: float = 0.0  # the share of the workers' time

    @property
    def efficiency(self) -> float:
        return self.speedup / self.workers


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCurve:
    """All of them, in order."""

    points: tuple[ScalingPoint, ...]
    cores: int  # that all of them had
    serial_share: float | None  # amdahl's s; None where fewer than two numbers of workers had a core each
    knee: int  # the number of workers up to which more of them were worth it
    is_past: bool  # whether more than that were measured, and were not worth it

    @property
    def limit(self) -> float | None:
        """The speed-up that no number of workers goes beyond, by Amdahl's fit; None where there is no fit."""
        if self.serial_share is None:
            return None
        return 1 / self.serial_share if self.serial_share > 0 else math.inf

    def to_dict(self) -> dict[str, Any]:
        limit = self.limit if self.limit is not None and math.isfinite(self.limit) else None
        return {
            "cores": self.cores,
            "points": [{**asdict(point), "efficiency": point.efficiency} for point in self.points],
            "serial_share": self.serial_share,
            "limit": limit,
            "knee": self.knee,
            "is_past": self.is_past,
        }


def amdahl_speedup(serial_share: float, workers: float) -> float:
    return 1 / (serial_share + (1 - serial_share) / workers)


def fit_amdahl(speedups: Mapping[int, float]) -> float | None:
    """The share s from 0 to 1 with the least squares of 1 / S - 1 / n - s (1 - 1 / n); None for one worker alone."""
    above = sum((1 - 1 / n) * (1 / speed - 1 / n) for n, speed in speedups.items() if speed > 0)
    below = sum((1 - 1 / n) ** 2 for n, speed in speedups.items() if speed > 0)
    return min(1.0, max(0.0, above / below)) if below else None


def find_knee(speedups: Mapping[int, float]) -> tuple[int, bool]:
    """The last number of workers that was worth it, and whether one after it was not.

    Going from m to n is worth it where the speed grows by at least half as much: S(n) / S(m) - 1 >= (n / m - 1) / 2.
    """
    counts = sorted(speedups)
    for fewer, more in pairwise(counts):
        if speedups[more] / speedups[fewer] - 1 < HALF * (more / fewer - 1):
            return fewer, True
    return counts[-1], False


def scaling_curve(
    rates: Mapping[int, Sequence[float]],
    forecast: Mapping[int, float],
    waiting: Mapping[int, float],
    cores: int,
) -> ScalingCurve:
    """From samples per second, run by run, for each number of workers (1 among them), and the forecast speed-ups."""
    medians = {workers: statistics.median(of_runs) for workers, of_runs in sorted(rates.items())}
    speedups = {workers: rate / medians[1] for workers, rate in medians.items()}
    serial = fit_amdahl({workers: speed for workers, speed in speedups.items() if workers <= cores})
    knee, is_past = find_knee(speedups)
    points = tuple(
        ScalingPoint(
            workers=workers,
            samples_per_s=rate,
            low=min(rates[workers]),
            high=max(rates[workers]),
            speedup=speedups[workers],
            amdahl=None if serial is None else amdahl_speedup(serial, workers),
            forecast=forecast[workers],
            waiting=waiting.get(workers, 0.0),
        )
        for workers, rate in medians.items()
    )
    return ScalingCurve(points=points, cores=cores, serial_share=serial, knee=knee, is_past=is_past)


SCALING_HEAD = (
    *("workers", "samples/s", "from", "to", "times as fast"),
    *("efficiency", "Amdahl", "simulator", "waiting"),
)

_HOW = (
    "The same steps with each number of workers, one run after the other, repeats interleaved; each on as many cores "
    "as it has workers, or all. Starting processes and evaluating do not count. The knee is the last number of workers "
    "up to which the speed grew by at least half as much as their number. Amdahl's law is fitted to the runs with at "
    "most as many workers as cores; for more workers its column says what it would be with a core for each."
)


def scaling_cells(curve: ScalingCurve) -> list[list[str]]:
    return [
        [
            f"{point.workers}",
            f"{point.samples_per_s:,.0f}",
            f"{point.low:,.0f}",
            f"{point.high:,.0f}",
            f"{point.speedup:.2f}",
            f"{100 * point.efficiency:.0f} %",
            "" if point.amdahl is None else f"{point.amdahl:.2f}",
            f"{point.forecast:.2f}",
            f"{100 * point.waiting:.0f} %",
        ]
        for point in curve.points
    ]


def scaling_sentences(curve: ScalingCurve) -> list[str]:
    best = max(curve.points, key=lambda point: point.speedup)
    said = [
        f"{num_of(best.workers, 'worker')} is the fastest."
        if best.workers == 1
        else f"{num_of(best.workers, 'worker')} are the fastest, {best.speedup:.2f} times as fast as one.",
        f"There is no knee up to {curve.knee} workers: each step brings at least half of the ideal gain.",
        _about_amdahl(curve),
    ]
    if curve.is_past:
        knee, after = next((one, then) for one, then in pairwise(curve.points) if one.workers == curve.knee)
        said[1] = (
            f"The knee is at {num_of(curve.knee, 'worker')} ({knee.speedup:.2f} times, efficiency "
            f"{100 * knee.efficiency:.0f} %): {after.workers} workers bring less than half of the ideal gain."
        )
    last = curve.points[-1]
    if abs(last.forecast / last.speedup - 1) > 0.1:
        word = "more" if last.forecast > last.speedup else "less"
        said.append(
            f"The simulator, which models computing, messages and cores and nothing else, forecasts {word} for "
            f"{last.workers} workers: {last.forecast:.2f} times."
        )
    if last.workers > curve.cores:
        said.append(f"This machine has {num_of(curve.cores, 'core')}; more workers than that share them.")
    return said


def _about_amdahl(curve: ScalingCurve) -> str:
    if curve.serial_share is None or curve.limit is None:
        cores = num_of(curve.cores, "core")
        return f"Amdahl's law is not fitted: only one of these numbers of workers has a core each on {cores}."
    if curve.serial_share == 1:
        return "Amdahl's fit: nothing of a step gets shorter with more workers, even where each has a core."
    if not math.isfinite(curve.limit):
        return (
            "Amdahl's fit, to the runs whose workers had a core each: all of a step gets shorter with more workers, so "
            "there is no limit to how fast many of them would be."
        )
    return (
        f"Amdahl's fit, to the runs whose workers had a core each: {100 * curve.serial_share:.0f} % of a step does not "
        f"get shorter with more workers, so any number of them would be at most {curve.limit:.1f} times as fast."
    )


def scaling_page(
    title: str, curve: ScalingCurve, sentences: Sequence[str], command: str, facts: Mapping[str, str]
) -> str:
    counts = [float(point.workers) for point in curve.points]
    series = [Series(name="measured", xs=counts, ys=[point.speedup for point in curve.points])]
    if curve.serial_share is not None:
        smooth = [1 + (counts[-1] - 1) * place / 60 for place in range(61)]
        fitted = [amdahl_speedup(curve.serial_share, n) for n in smooth]
        series.append(Series(name="Amdahl's fit", xs=smooth, ys=fitted, note="a core for each"))
    series += [
        Series(name="simulator", xs=counts, ys=[point.forecast for point in curve.points]),
        Series(name="at best", xs=counts, ys=counts),
    ]
    chart = line_chart(
        series,
        title=f"Speed-up; the knee is at {curve.knee}" if curve.is_past else "Speed-up",
        x_label="workers",
        y_label="times as fast as one",
        from_zero=True,
    )
    table = paper.data_table(
        SCALING_HEAD, scaling_cells(curve), title="Medians over the repeats, and their range"
    )
    return paper.document(
        title,
        [
            paper.findings_section(sentences),
            paper.section("curve", "Speed over workers", chart, "broad"),
            paper.section("table", "In numbers", table, "wide"),
            paper.made_section(command, facts, _HOW),
        ],
    )


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


def require_counts(counts: Sequence[int], strategy: Strategy) -> list[int]:
    """The numbers of workers in order, with 1, which all are compared with; UserError for what makes no sense."""
    for count in counts:
        if count < 1:
            raise UserError(f"--workers {count} must be at least 1")
    found = sorted({1, *counts})
    if len(found) < 2:
        raise UserError("--workers 1 has nothing to compare; give several, such as 1,2,4")
    if strategy.most_workers is not None and strategy.most_workers < found[-1]:
        raise UserError(f"strategy={strategy} has at most {strategy.most_workers} worker; use mirrored")
    if strategy.facts.counts_rounds:
        raise UserError(f"strategy={strategy} counts rounds, whose work grows with the workers; use mirrored")
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
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Run `manyhands WORDS` with each number of workers, `repeats` times in turn, each in a directory of its own.

    By number: the samples per second of each run, and the median share of waiting. Each has a process of its own, on as
    many cores as it has workers: a lone worker would otherwise compute with all of them.
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
        named = num_of(workers, "worker")
        on_progress(Progress(done=done, runs=len(order), current=named, seconds_left=left_s))
        folder = out / f"{workers:03d}-workers-{repeat + 1}"
        own = [f"--strategy={strategy}", f"--workers={workers}", f"--out={folder}", *common]
        _run(launch(settings.cores[:workers], [*words, *own]), folder.with_suffix(".log"), workers)
        found = measure(Trial(place=0, repeat=repeat), folder, strategy)
        rates[workers].append(found.samples / found.seconds)
        waits[workers].append(found.waited_s / found.accounted_s if found.accounted_s > 0 else 0.0)
    return rates, {workers: statistics.median(shares) for workers, shares in waits.items()}


def _run(command: Sequence[str], log: Path, workers: int) -> None:
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
            f"the run with {num_of(workers, 'worker')} ended with status {status}: {last_said(log)}"
        )


def forecast_speedups(
    task: Task, strategy: Strategy, counts: Sequence[int], step_s: float, settings: ScalingSettings
) -> Mapping[int, float]:
    """What the simulator says of so many workers, each as fast as the one that was measured, on these cores.

    Workers of parameter servers are simulated as they are, those of other strategies as synchronous ones.
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
