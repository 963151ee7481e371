"""`study geo`: all-reduce, averages every few steps, and codecs, between workers that are far apart.

Losses, bytes and the time of a step are seen on loopback, where workers really train; the link's time is put on top by
the strategies' cost model. Where the loopback can be shaped, short runs at the link's bandwidth check that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from manyhands.errors import UserError, format_bytes, format_seconds, num_of
from manyhands.lab.studies.reached_target import LossCurve, common_target, mean_step_s
from manyhands.lab.studies.study import Study, StudyAnswer, StudyChart, StudyTable
from manyhands.lab.studies.study_values import read_as, require_room
from manyhands.lab.sweep.trials import parse_values
from manyhands.observe.draw.charts import Series, bar_chart, line_chart
from manyhands.workloads.task_options import check_options, option

if TYPE_CHECKING:
    from manyhands.facts import LinkRate, TaskProfile
    from manyhands.lab.studies.geo_model import GeoRow
    from manyhands.strategy import Strategy
    from manyhands.task import Task

_STRATEGIES = (
    "allreduce link=tcp; allreduce link=tcp codec=bf16; allreduce link=tcp codec=topk:0.01+int8; "
    "local steps=8 link=tcp; local steps=8 link=tcp codec=bf16; local steps=8 link=tcp outer=nesterov"
)

_WIDE_BITS = 40 * 10**9  # more than a loopback carries


@dataclass(frozen=True, kw_only=True)
class GeoOptions:
    """What may be chosen."""

    task: str = option("digits", "built-in task that is trained")
    strategies: str = option(
        _STRATEGIES,
        "strategies, separated by semicolons",
        metavar="LIST",
        shown="all-reduce and local, plain and with codecs, and DiLoCo",
    )
    workers: int = option(2, "workers, each far from the others", at_least=2, at_most=64)
    latency: str = option("40ms", "latency of the link between two workers", metavar="TIME")
    bandwidth: str = option("100Mbit", "bandwidth of each worker's link, each way", metavar="RATE")
    steps: int = option(240, "global batches of each run", at_least=20)
    target: float | None = option(None, "loss that is to be reached", above=0, shown="one that all reach")
    check_steps: int = option(100, "global batches of each run on a shaped loopback; 0: none", at_least=0)
    seed: int = option(0, "fixes weights and data order", at_least=0)

    def __post_init__(self) -> None:
        from manyhands.foresight.plan.described_cluster import parse_duration, parse_rate

        check_options(self)
        read_as("latency", self.latency, parse_duration)
        read_as("bandwidth", self.bandwidth, parse_rate)
        for strategy in self.parsed():
            strategy.check(self.workers, "cpu")
            if not strategy.facts.splits_batches or strategy.facts.counts_rounds:
                raise UserError(
                    f"--strategies {strategy}: its workers do not share a batch; give allreduce or local"
                )
        if 0 < self.check_steps < 20:
            raise UserError(
                f"--check-steps {self.check_steps} is too few to time a step; give at least 20, or 0"
            )

    def parsed(self) -> list[Strategy]:
        from manyhands.strategy import Strategy

        texts = read_as("strategies", self.strategies, lambda text: parse_values(text, ";"))
        return list(dict.fromkeys(map(Strategy.parse, texts)))

    @property
    def link(self) -> LinkRate:
        from manyhands.facts import LinkRate
        from manyhands.foresight.plan.described_cluster import parse_duration, parse_rate

        return LinkRate(latency_s=parse_duration(self.latency), bytes_per_s=parse_rate(self.bandwidth))


def _run(options: GeoOptions, say: Callable[[str], None]) -> StudyAnswer:
    from manyhands.foresight.estimate import estimate
    from manyhands.foresight.plan.task_profile import measure_profile
    from manyhands.lab.studies.geo_model import link_seconds
    from manyhands.strategies.common.sharding.layer_units import units_of
    from manyhands.workloads.tasks import build

    task, strategies = build(options.task), options.parsed()
    say("measuring the task")
    found = estimate(task)
    require_room(task, strategies[0], options.workers)
    profile = measure_profile(task, found.footprint, units_of(found.model), options.workers).profile
    for strategy in strategies:  # what has no model is said before anything is trained
        link_seconds(strategy, profile, options.workers, options.link)
    trained = {}
    for strategy in strategies:
        say(f"training {options.steps} steps under {strategy}")
        trained[str(strategy)] = _trained(task, strategy, options)
    shaped, why = _shaped(strategies, options, say)
    target = options.target or common_target(one.curve for one in trained.values())
    rows = [
        _row(one, trained[str(one)], profile, target, shaped.get(str(one)), options) for one in strategies
    ]
    return geo_answer(options, rows, {name: one.curve for name, one in trained.items()}, target, why)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A run on loopback."""

    curve: LossCurve
    step_s: float
    step_bytes: float  # of gradients or parameters, that each worker sent


def _trained(task: Task, strategy: Strategy, options: GeoOptions) -> _Trained:
    from manyhands.engine.fitting import fit
    from manyhands.engine.options import Options

    given = Options(
        progress="none", check_every=0, allow_overload=True, resume_command="", evaluate_every=options.steps
    )
    run = fit(task, strategy, workers=options.workers, steps=options.steps, seed=options.seed, options=given)
    step_s = mean_step_s(run.history)
    if not step_s:
        raise UserError(f"--steps {options.steps}: too few to time a step under {strategy}; give more")
    sent = run.summary["sent"]["gradients"]["bytes_sent"] / options.workers / options.steps
    return _Trained(curve=LossCurve.of(run.history), step_s=step_s, step_bytes=sent)


def _row(
    strategy: Strategy,
    trained: _Trained,
    profile: TaskProfile,
    target: float,
    shaped: tuple[float, float] | None,
    options: GeoOptions,
) -> GeoRow:
    from manyhands.facts import LinkRate
    from manyhands.lab.studies.geo_model import GeoRow, link_seconds, plain_of, sent_plainly

    plainly = sent_plainly(strategy, profile, options.workers)
    ratio = trained.step_bytes / plainly if plainly and strategy != plain_of(strategy) else 1.0
    reached, link = trained.curve.reached(target), options.link
    at_rate = link_seconds(strategy, profile, options.workers, LinkRate(bytes_per_s=link.bytes_per_s), ratio)
    return GeoRow(
        strategy=str(strategy),
        here_s=trained.step_s,
        link_s=link_seconds(strategy, profile, options.workers, link, ratio),
        step_bytes=trained.step_bytes,
        steps=reached[0] if reached else None,
        shaped_s=shaped[1] if shaped else None,
        shaped_predicted_s=shaped[0] + at_rate if shaped else None,
    )


def _shaped(
    strategies: Sequence[Strategy], options: GeoOptions, say: Callable[[str], None]
) -> tuple[dict[str, tuple[float, float]], str]:
    """Seconds of a step on a loopback that is as good as not shaped, and on one of this bandwidth; or none, and why.

    All workers share one loopback, so it has the bandwidth of all their links together.
    """
    from manyhands.lab.compare.bandwidth import Rate, why_not
    from manyhands.lab.studies.shaped_runs import shaped_step_s

    wide = Rate(bits_per_s=_WIDE_BITS)

    if not options.check_steps:
        return {}, "it was not asked for"
    rate = Rate(bits_per_s=round(8 * options.link.bytes_per_s * options.workers))
    reason = why_not(rate)
    if reason is not None:
        return {}, reason
    found = {}
    for strategy in strategies:
        say(f"running {options.check_steps} steps at {options.bandwidth} under {strategy}")
        words = ["train", options.task, f"--strategy={strategy}", f"--workers={options.workers}"]
        wide_s, shaped_s = (shaped_step_s(one, words, options.check_steps) for one in (wide, rate))
        found[str(strategy)] = wide_s, shaped_s
    return found, ""


GEO: Study[GeoOptions] = Study(
    name="geo",
    question="Which strategy trains workers that are far apart soonest, and with the fewest bytes?",
    options_type=GeoOptions,
    run=_run,
    processes=(
        "a run of each strategy on this machine, and a short one on a shaped loopback where that is allowed",
    ),
)


# What was found: pure.


def geo_answer(
    options: GeoOptions, rows: Sequence[GeoRow], curves: Mapping[str, LossCurve], target: float, why: str
) -> StudyAnswer:
    """From what was seen on loopback and the link's modelled time; `why` is the reason where no run was shaped."""
    where = f"{options.latency} and {options.bandwidth}"
    bars = [(row.strategy, math.inf if row.seconds is None else row.seconds) for row in rows]
    over_link = [
        Series(
            name=row.strategy,
            xs=[steps * row.step_s for steps in curves[row.strategy].steps],
            ys=curves[row.strategy].losses,
        )
        for row in rows
    ]
    title = f"Loss over time, with links of {where}"
    return StudyAnswer(
        sentences=(
            *_about_soonest(rows, target, where),
            *_about_check(rows, why, options),
            "Measured on loopback: the steps to the target, the bytes, and a step's own time. Modelled: what the link "
            f"adds, for {num_of(options.workers, 'worker')} on a host each, without lost packets or slow starts.",
        ),
        tables=(_table(rows, target, where), *_check_table(rows, options)),
        charts=(
            StudyChart(
                title="Loss over time",
                picture=line_chart(over_link, title=title, x_label="seconds", y_label="training loss"),
                explained="Losses are measured; time is measured for computing and modelled for the link.",
            ),
            StudyChart(
                title="Time to the target",
                picture=bar_chart(bars, title=f"Seconds to a loss of {target:.4g}", show=_bar),
            ),
        ),
        figures={
            "options": asdict(options),
            "target": target,
            "rows": [
                {
                    **asdict(row),
                    "step_s": row.step_s,
                    "seconds": row.seconds,
                    "bytes": row.num_bytes,
                    "error": row.error,
                }
                for row in rows
            ],
            "not_shaped_because": why,
        },
    )


def _bar(seconds: float) -> str:
    return f"{seconds:.1f}" if math.isfinite(seconds) else "never"


def _about_soonest(rows: Sequence[GeoRow], target: float, where: str) -> list[str]:
    reached = [row for row in rows if row.seconds is not None and row.num_bytes is not None]
    if not reached:
        return [f"None reached a loss of {target:.4g}; give a larger --target, or more --steps."]
    soonest = min(reached, key=lambda row: row.seconds or 0.0)
    leanest = min(reached, key=lambda row: row.num_bytes or 0.0)
    said = [
        f"Over {where}, {soonest.strategy} is at a loss of {target:.4g} first, after "
        f"{format_seconds(soonest.seconds or 0)}; {leanest.strategy} sends the least for it, "
        f"{format_bytes(round(leanest.num_bytes or 0))} a worker."
    ]
    first = rows[0]
    if first.seconds and soonest is not first:
        said.append(
            f"{first.strategy} takes {first.seconds / (soonest.seconds or 1):.1f} times as long: "
            f"{100 * first.link_s / first.step_s:.0f} % of its step waits for the link, of {soonest.strategy} "
            f"{100 * soonest.link_s / soonest.step_s:.0f} %."
        )
    return said


def _about_check(rows: Sequence[GeoRow], why: str, options: GeoOptions) -> list[str]:
    errors = [abs(row.error) for row in rows if row.error is not None]
    if not errors:
        return [f"No run on a shaped link checked the model: {why}."]
    return [
        f"Runs on a loopback shaped to {options.bandwidth} for each worker, without the latency, took "
        f"{100 * statistics.mean(errors):.0f} % longer or shorter than modelled on average, {100 * max(errors):.0f} % "
        "at most; the latency was not checked."
    ]


def _table(rows: Sequence[GeoRow], target: float, where: str) -> StudyTable:
    return StudyTable(
        title=f"To a loss of {target:.4g} over {where}",
        head=("strategy", "steps", "step here", "link adds", "seconds", "sent/step", "sent"),
        rows=tuple(
            (
                row.strategy,
                "–" if row.steps is None else f"{row.steps:,}",
                format_seconds(row.here_s),
                format_seconds(row.link_s),
                "–" if row.seconds is None else f"{row.seconds:.1f}",
                format_bytes(round(row.step_bytes)),
                "–" if row.num_bytes is None else format_bytes(round(row.num_bytes)),
            )
            for row in rows
        ),
    )


def _check_table(rows: Sequence[GeoRow], options: GeoOptions) -> list[StudyTable]:
    checked = [
        (
            row.strategy,
            format_seconds(row.shaped_s),
            format_seconds(row.shaped_predicted_s),
            f"{100 * row.error:+.0f} %",
        )
        for row in rows
        if row.shaped_s is not None and row.shaped_predicted_s is not None and row.error is not None
    ]
    title = f"A step on a loopback shaped to {options.bandwidth} for each worker"
    head = ("strategy", "seen", "modelled", "error")
    return [StudyTable(title=title, head=head, rows=tuple(checked))] if checked else []
