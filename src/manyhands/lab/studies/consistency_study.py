"""`study consistency`: synchronous, bounded or asynchronous servers, by how much the speeds of workers differ.

The simulator trains the task in virtual time: gradients, steps and staleness are real, and durations are as the spread
of speeds says. One spread is run live beside it, with a worker that is slowed on purpose.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from manyhands.errors import UserError, format_seconds
from manyhands.lab.studies.reached_target import LossCurve, common_target, crossing
from manyhands.lab.studies.study import Study, StudyAnswer, StudyChart, StudyTable
from manyhands.lab.studies.study_values import numbers_of, read_as, using_cores
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.workloads.task_options import check_options, option

if TYPE_CHECKING:
    from manyhands.engine.options import Slowdown
    from manyhands.task import Task

_SYNC, _ASYNC = "sync", "async"
_PASSING = 0.25  # how often a computation is delayed, where delays pass
_LIVE_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class ConsistencyOptions:
    """What may be chosen."""

    task: str = option("digits", "built-in task that is trained")
    workers: int = option(4, "simulated workers", at_least=2, at_most=1000)
    spreads: str = option(
        "0,0.5,1,2,4",
        "spreads: how much longer the slowest worker takes, in times of the fastest",
        metavar="LIST",
    )
    delays: str = option(
        "lasting",
        "lasting: each worker has a speed of its own; passing: any computation is slow one time in four",
        choices=("lasting", "passing"),
    )
    bound: int = option(4, "staleness that the bounded one allows", at_least=0)
    steps: int = option(240, "global batches of each run", at_least=20)
    target: float | None = option(None, "loss that is to be reached", above=0, shown="one that all reach")
    latency: str = option("100us", "latency of every simulated message", metavar="TIME")
    live: float = option(2.0, "spread of the live check; 0: none", at_least=0)
    live_steps: int = option(120, "global batches of each live run", at_least=20)
    repeats: int = option(3, "live runs of each consistency, interleaved", at_least=1)
    seed: int = option(0, "fixes weights, data order and delays", at_least=0)

    def __post_init__(self) -> None:
        from manyhands.foresight.plan.described_cluster import parse_duration

        check_options(self)
        numbers_of("spreads", self.spreads)
        read_as("latency", self.latency, parse_duration)

    @property
    def consistencies(self) -> dict[str, str]:
        """What is compared: name and setting."""
        return {_SYNC: _SYNC, "bounded": f"bounded:{self.bound}", _ASYNC: _ASYNC, "aware": f"aware:{_ASYNC}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadTime:
    """One consistency at one spread, in virtual time."""

    spread: float
    consistency: str
    steps: int | None  # until the target; None: never
    seconds: float | None
    batches_per_s: float
    staleness: float  # the mean of all updates


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveCheck:
    """How many times as fast as `sync` is `async`, in batches per second, with one of two workers slowed."""

    spread: float
    seen: Sequence[float]  # round by round
    simulated: float

    @property
    def median(self) -> float:
        return statistics.median(self.seen)

    @property
    def error(self) -> float:
        return self.simulated / self.median - 1


def slowdowns(workers: int, spread: float, delays: str) -> tuple[Slowdown, ...]:
    """Lasting: speeds evenly from the usual one to 1 + spread times its duration; passing: all alike, now and then."""
    from manyhands.engine.options import Slowdown

    if spread == 0:
        return ()
    if delays == "passing":
        return tuple(Slowdown(worker=one, factor=1 + spread, probability=_PASSING) for one in range(workers))
    return tuple(Slowdown(worker=one, factor=1 + spread * one / (workers - 1)) for one in range(1, workers))


def _run(options: ConsistencyOptions, say: Callable[[str], None]) -> StudyAnswer:
    from manyhands.workloads.tasks import build

    task = build(options.task)
    simulated = _Simulated(task, options)
    spreads = numbers_of("spreads", options.spreads)
    curves: dict[tuple[float, str], LossCurve] = {}
    stale: dict[tuple[float, str], float] = {}
    for spread in spreads:
        for name in options.consistencies:
            say(f"simulating a spread of {spread:g} under {name}")
            found = simulated.run(name, spread, options.workers, options.steps)
            curves[spread, name] = LossCurve.of(found.history)
            stale[spread, name] = found.summary["staleness"]["mean"]
    target = options.target or common_target(curves.values())
    times = [_spread_time(*key, curve, stale[key], target) for key, curve in curves.items()]
    check = _live_check(task, simulated, options, say) if options.live else None
    return consistency_answer(options, times, target, simulated.step_s or 0.0, check)


def _spread_time(spread: float, name: str, curve: LossCurve, staleness: float, target: float) -> SpreadTime:
    reached = curve.reached(target)
    return SpreadTime(
        spread=spread,
        consistency=name,
        steps=reached[0] if reached else None,
        seconds=reached[1] if reached else None,
        batches_per_s=curve.steps[-1] / curve.seconds[-1],
        staleness=staleness,
    )


class _Simulated:
    """Trains in virtual time; the duration of a batch is measured once."""

    def __init__(self, task: Task, options: ConsistencyOptions) -> None:
        self.step_s: float | None = None
        self._task, self._options = task, options

    def run(self, name: str, spread: float, workers: int, steps: int) -> Any:
        from manyhands.engine.options import Options
        from manyhands.engine.request import Length
        from manyhands.foresight.plan.described_cluster import parse_duration
        from manyhands.foresight.simulate.simulated_spec import NetworkModel, SimulatedConditions
        from manyhands.foresight.simulate.simulated_training import fit_simulated

        options = self._options
        conditions = SimulatedConditions(
            step_s=self.step_s,
            slow=slowdowns(workers, spread, options.delays),
            network=NetworkModel(latency_s=parse_duration(options.latency)),
        )
        with _quietly():
            run = fit_simulated(
                self._task,
                f"ps consistency={options.consistencies[name]}",
                workers=workers,
                length=Length(steps=steps),
                seed=options.seed,
                conditions=conditions,
                options=Options(progress="none", resume_command="", evaluate_every=steps),
            )
        self.step_s = run.summary["simulated"]["step_s"]
        return run


@contextmanager
def _quietly() -> Iterator[None]:
    """What each run would say of its virtual time is said once, at the end."""
    log = logging.getLogger("manyhands")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _live_check(
    task: Task, simulated: _Simulated, options: ConsistencyOptions, say: Callable[[str], None]
) -> LiveCheck:
    from manyhands.engine.fitting import fit
    from manyhands.engine.options import Options
    from manyhands.foresight.plan.seen_steps import seen_step_s

    [slow] = slowdowns(_LIVE_WORKERS, options.live, "lasting")
    given = Options(progress="none", check_every=0, allow_overload=True, resume_command="", slow=slow)
    took_s: dict[str, list[float]] = {_SYNC: [], _ASYNC: []}
    for repeat in range(options.repeats):
        for name, taken in took_s.items():
            say(
                f"running {_LIVE_WORKERS} workers under {name}, one slowed, {repeat + 1} of {options.repeats}"
            )
            with using_cores(_LIVE_WORKERS):
                run = fit(
                    task,
                    f"ps consistency={name}",
                    workers=_LIVE_WORKERS,
                    steps=options.live_steps,
                    options=given,
                )
            seen_s = seen_step_s(run.history, _LIVE_WORKERS)
            if not seen_s:
                raise UserError(f"--live-steps {options.live_steps}: too few to time a step; give more")
            taken.append(seen_s)
    rates = {}
    for name in took_s:
        run = simulated.run(name, options.live, _LIVE_WORKERS, options.live_steps)
        rates[name] = 1 / (seen_step_s(run.history, _LIVE_WORKERS) or 1.0)
    return LiveCheck(
        spread=options.live,
        seen=[sync_s / async_s for sync_s, async_s in zip(took_s[_SYNC], took_s[_ASYNC], strict=True)],
        simulated=rates[_ASYNC] / rates[_SYNC],
    )


CONSISTENCY: Study[ConsistencyOptions] = Study(
    name="consistency",
    question="Synchronous or asynchronous, when some workers are slower than others?",
    options_type=ConsistencyOptions,
    run=_run,
    processes=("a few short runs of two workers and a server, to check the simulator",),
)


# What was found: pure.


def consistency_answer(
    options: ConsistencyOptions,
    times: Sequence[SpreadTime],
    target: float,
    step_s: float,
    check: LiveCheck | None,
) -> StudyAnswer:
    """From the simulated times to the target, and the live check of them."""
    spreads = sorted({one.spread for one in times})
    by_name = {
        name: [
            next(one for one in times if one.spread == spread and one.consistency == name)
            for spread in spreads
        ]
        for name in options.consistencies
    }
    crossovers = {
        name: crossing(
            spreads, [one.seconds for one in by_name[_SYNC]], [one.seconds for one in by_name[name]]
        )
        for name in options.consistencies
        if name != _SYNC
    }
    title = f"Virtual seconds to a loss of {target:.4g}, by the spread of {options.delays} delays"
    series = [
        Series(
            name=options.consistencies[name],
            xs=spreads,
            ys=[float("nan") if one.seconds is None else one.seconds for one in found],
        )
        for name, found in by_name.items()
    ]
    picture = line_chart(
        series, title=title, x_label="spread", y_label="virtual s to the target", from_zero=True
    )
    return StudyAnswer(
        sentences=(
            *_about_crossovers(options, by_name, crossovers, spreads),
            *_about_check(check),
            f"Simulated: {options.workers} workers in virtual time, with real gradients and the code of live servers, "
            f"where a batch takes the fastest worker {format_seconds(step_s)}. Measured: that duration, and the live "
            "check. All train with the same learning rate.",
        ),
        tables=(_table(options, times, title),),
        charts=(
            StudyChart(
                title="Time to the target", picture=picture, explained="A gap: the target was not reached."
            ),
        ),
        figures={
            "options": asdict(options),
            "target": target,
            "step_s": step_s,
            "times": [asdict(one) for one in times],
            "crossovers": crossovers,
            "live": None
            if check is None
            else {**asdict(check), "median": check.median, "error": check.error},
        },
    )


def _about_crossovers(
    options: ConsistencyOptions,
    by_name: Mapping[str, Sequence[SpreadTime]],
    crossovers: Mapping[str, float | None],
    spreads: Sequence[float],
) -> list[str]:
    said = []
    for name, where in crossovers.items():
        setting = options.consistencies[name]
        if where is None:
            said.append(
                f"Up to a spread of {spreads[-1]:g}, {setting} is nowhere sooner at the target than sync."
            )
        elif where <= spreads[0]:
            said.append(
                f"{setting} is sooner at the target than sync at every spread from {spreads[0]:g} on."
            )
        else:
            said.append(
                f"From a spread of about {where:.2g} on, {setting} is sooner at the target than sync: the slowest "
                f"worker then takes {1 + where:.2g} times as long as the fastest."
            )
    first, last = by_name[_SYNC][0], by_name[_SYNC][-1]
    stale, fresh = by_name[_ASYNC][0].steps, first.steps
    if stale and fresh:
        said.append(
            f"At the smallest spread async needs {stale / fresh:.2f} times the batches of sync, since its gradients "
            "are stale; aware: divides the rate of an update by its staleness."
        )
    said.append(
        f"Waiting for the slowest lets sync compute {last.batches_per_s:.3g} batches a second at a spread of "
        f"{last.spread:g}, of {first.batches_per_s:.3g} at {first.spread:g}; async "
        f"{by_name[_ASYNC][-1].batches_per_s:.3g} of {by_name[_ASYNC][0].batches_per_s:.3g}."
    )
    return said


def _about_check(check: LiveCheck | None) -> list[str]:
    if check is None:
        return ["No live run checked the simulator."]
    return [
        f"Live, with one of {_LIVE_WORKERS} workers slowed {1 + check.spread:g} times, async did {check.median:.2f} "
        f"times the batches of sync (from {min(check.seen):.2f} to {max(check.seen):.2f}); the simulator says "
        f"{check.simulated:.2f} ({100 * check.error:+.0f} %), where a part of a batch has no fixed cost."
    ]


def _table(options: ConsistencyOptions, times: Sequence[SpreadTime], title: str) -> StudyTable:
    return StudyTable(
        title=title,
        head=(
            "spread",
            "consistency",
            "batches to target",
            "seconds to target",
            "batches/s",
            "mean staleness",
        ),
        rows=tuple(
            (
                f"{one.spread:g}",
                options.consistencies[one.consistency],
                "–" if one.steps is None else f"{one.steps:,}",
                "–" if one.seconds is None else f"{one.seconds:.3g}",
                f"{one.batches_per_s:.3g}",
                f"{one.staleness:.1f}",
            )
            for one in times
        ),
    )
