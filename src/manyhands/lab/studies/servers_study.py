"""`study servers`: how many parameter servers for how many workers; live on the cores here, and beyond by a model.

The task is measured alone, and one worker with each number of servers; from these the model predicts every other pair
that is run here, so that its error is seen. Then it says what machines with links of their own would do, beside the
simulator.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.errors import UserError, format_seconds, num_of
from manyhands.lab.studies.study import Study, StudyAnswer, StudyChart, StudyTable
from manyhands.lab.studies.study_values import counts_of, read_as, require_room, using_cores
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.workloads.task_options import check_options, option

if TYPE_CHECKING:
    from manyhands.lab.studies.servers_model import ServerModel

_SIMULATED = 256  # workers that are simulated; beyond, the closed form alone is quick enough
_MOST_SIMULATED = 2048  # workers times servers
_PER_OCTAVE = 4  # points of a curve


@dataclass(frozen=True, kw_only=True)
class ServersOptions:
    """What may be chosen."""

    task: str = option("digits", "built-in task that is trained")
    consistency: str = option("async", "when replicas must agree: async, sync or bounded:s")
    workers: str = option("1,2,4", "numbers of workers that are run here", metavar="LIST")
    servers: str = option("1,2", "numbers of servers that are run here", metavar="LIST")
    far_servers: str = option("1,2,4,8", "numbers of servers on machines of their own", metavar="LIST")
    most_workers: int = option(
        10_000, "workers up to which these are followed", at_least=2, at_most=1_000_000
    )
    bandwidth: str = option("1Gbit", "link of each of those machines", metavar="RATE")
    latency: str = option("100us", "latency of those links", metavar="TIME")
    seconds: float = option(1.0, "length of each run here, about", above=0)
    repeats: int = option(3, "runs of each pair here, interleaved", at_least=1)

    def __post_init__(self) -> None:
        from manyhands.foresight.plan.described_cluster import parse_duration, parse_rate
        from manyhands.strategies.common.consistency import parse_consistency

        check_options(self)
        for name in ("workers", "servers", "far_servers"):
            counts_of(name, getattr(self, name))
        read_as("bandwidth", self.bandwidth, parse_rate)
        read_as("latency", self.latency, parse_duration)
        if read_as("consistency", self.consistency, parse_consistency).chosen_by_lead:
            raise UserError(
                f"--consistency {self.consistency!r} leaves updates out; give async, sync or bounded:s"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LivePair:
    """So many workers and servers that were run here."""

    workers: int
    servers: int
    seen: Sequence[float]  # global batches per second, run by run
    predicted: float

    @property
    def rate(self) -> float:
        return statistics.median(self.seen)

    @property
    def error(self) -> float:
        return self.predicted / self.rate - 1


def _run(options: ServersOptions, say: Callable[[str], None]) -> StudyAnswer:
    from dataclasses import replace

    from manyhands.facts import LinkRate
    from manyhands.foresight.estimate import estimate
    from manyhands.foresight.plan.described_cluster import parse_duration, parse_rate
    from manyhands.foresight.plan.task_profile import measure_profile
    from manyhands.lab.studies.servers_model import ServerModel
    from manyhands.lab.sweep.run_sweep import usable_cores
    from manyhands.strategies.common.sharding.layer_units import units_of
    from manyhands.strategy import Strategy
    from manyhands.workloads.tasks import build

    task = build(options.task)
    Strategy.parse(f"ps consistency={options.consistency}").check(1, "cpu")
    say("measuring the task on one worker")
    found = estimate(task)
    most = Strategy.parse(f"ps servers={max(counts_of('servers', options.servers))}")
    require_room(task, most, max(counts_of("workers", options.workers)))
    counts = counts_of("workers", options.workers)
    parts = counts if most.facts.stepwise else []  # a part of a batch takes more than its share of the time
    with using_cores(1):
        profile = measure_profile(
            task, found.footprint, units_of(found.model), 1, parts=parts, seconds=options.seconds
        ).profile
    alone = ServerModel(profile=profile, consistency=options.consistency, cores=len(usable_cores()))
    seen = _run_pairs(task, options, alone, say)
    # Every server is another message of an update, which costs the worker time of its own.
    here = {
        servers: replace(
            alone,
            other_s=max(0.0, 1 / statistics.median(rates) - 1 / alone.batches_per_s(1, servers)),
        )
        for (workers, servers), rates in seen.items()
        if workers == 1
    }
    pairs = [
        LivePair(
            workers=workers,
            servers=servers,
            seen=rates,
            predicted=here[servers].batches_per_s(workers, servers),
        )
        for (workers, servers), rates in sorted(seen.items(), key=lambda one: one[0][::-1])
    ]
    link = LinkRate(latency_s=parse_duration(options.latency), bytes_per_s=parse_rate(options.bandwidth))
    far = replace(here[1], link=link, cores=float("inf"))
    return servers_answer(options, pairs, far, len(usable_cores()), say)


def _run_pairs(
    task: Any, options: ServersOptions, model: ServerModel, say: Callable[[str], None]
) -> dict[tuple[int, int], list[float]]:
    """Global batches per second by workers and servers, among them one of each; repeats interleaved."""
    from manyhands.foresight.plan.step_costs import try_steps

    counts = [
        (workers, servers)
        for servers in sorted({1, *counts_of("servers", options.servers)})
        for workers in sorted({1, *counts_of("workers", options.workers)})
    ]
    seen: dict[tuple[int, int], list[float]] = {pair: [] for pair in counts}
    for repeat in range(options.repeats):
        for workers, servers in counts:
            say(
                f"running {num_of(workers, 'worker')} with {num_of(servers, 'server')}, "
                f"{repeat + 1} of {options.repeats}"
            )
            step_s = 1 / model.batches_per_s(workers, servers)
            with using_cores(workers):
                took_s = try_steps(task, model.strategy(servers), workers, options.seconds, step_s)
            if took_s is None or took_s <= 0:
                raise UserError(f"--seconds {options.seconds:g}: too short to time steps of {options.task}")
            seen[workers, servers].append(1 / took_s)
    return seen


SERVERS: Study[ServersOptions] = Study(
    name="servers",
    question="How many parameter servers for how many workers?",
    options_type=ServersOptions,
    run=_run,
    processes=("workers and servers on this machine, some seconds each",),
)


# What was found: pure.


def servers_answer(
    options: ServersOptions,
    pairs: Sequence[LivePair],
    far: ServerModel,
    cores: int,
    say: Callable[[str], None] = lambda _: None,
) -> StudyAnswer:
    """From what was run here, and the model of the same task on machines of their own."""
    counts = counts_of("far_servers", options.far_servers)
    most = options.most_workers
    curves = {servers: _curve(far, servers, most) for servers in counts}
    say(f"simulating up to {_SIMULATED} workers")
    simulated = {servers: _simulated(far, servers, most) for servers in counts}
    far_rows = [_far_row(far, servers, most, simulated[servers]) for servers in counts]
    needed = _needed(far, most)
    live = _live_saturations(pairs)
    sentences = (
        *_about_far(far, far_rows, options),
        *_about_here(pairs, live, cores),
        "Measured: the task, and the pairs run here. Extrapolated: machines of their own; the simulator runs the code "
        f"of workers and servers in virtual time up to {_SIMULATED} workers, and the closed form goes on from there.",
    )
    return StudyAnswer(
        sentences=sentences,
        tables=(_live_table(pairs), _far_table(far_rows), _needed_table(needed)),
        charts=(
            _far_chart(curves, simulated, options),
            _live_chart(pairs),
        ),
        figures=_figures(options, pairs, far, (curves, simulated), (far_rows, needed, live)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _FarRow:
    """So many servers on machines of their own."""

    servers: int
    saturated: int | None  # workers, by the closed form
    simulated: int | None  # workers, by the simulator
    peak: float  # batches per second
    error: float  # of the closed form beside the simulator, the largest


def _curve(model: ServerModel, servers: int, most: int) -> dict[int, float]:
    counts = sorted(
        {min(most, round(2 ** (n / _PER_OCTAVE))) for n in range(_PER_OCTAVE * most.bit_length() + 1)}
    )
    return {workers: model.batches_per_s(workers, servers) for workers in counts}


def _simulated(model: ServerModel, servers: int, most: int) -> dict[int, float]:
    from manyhands.lab.studies.servers_model import simulated_rate

    limit = min(_SIMULATED, most, max(1, _MOST_SIMULATED // servers))
    counts = [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]
    return {workers: simulated_rate(model, workers, servers) for workers in counts}


def _far_row(model: ServerModel, servers: int, most: int, simulated: Mapping[int, float]) -> _FarRow:
    from manyhands.lab.studies.servers_model import saturation, saturation_of

    closed = saturation(lambda workers: model.batches_per_s(workers, servers), most)
    errors = [abs(model.batches_per_s(workers, servers) / rate - 1) for workers, rate in simulated.items()]
    return _FarRow(
        servers=servers,
        saturated=closed,
        simulated=saturation_of(simulated),
        peak=model.batches_per_s(closed or most, servers),
        error=max(errors),
    )


def _needed(model: ServerModel, most: int) -> list[tuple[int, int, int | None]]:
    """Workers, the formula's servers for them, and the model's."""
    from manyhands.lab.studies.servers_model import servers_by_formula

    counts = [count for count in (4, 16, 64, 256, 1024, 4096, 16384) if count <= most]
    return [(one, servers_by_formula(model, one), model.servers_needed(one)) for one in counts]


def _live_saturations(pairs: Sequence[LivePair]) -> dict[int, tuple[int | None, int | None]]:
    """By servers: from which number of workers on more were not worth it, as seen and as predicted."""
    from manyhands.lab.studies.servers_model import saturation_of

    found = {}
    for servers in sorted({one.servers for one in pairs}):
        own = [one for one in pairs if one.servers == servers]
        if len(own) > 1:
            seen = saturation_of({one.workers: one.rate for one in own})
            found[servers] = (seen, saturation_of({one.workers: one.predicted for one in own}))
    return found


def _about_far(model: ServerModel, rows: Sequence[_FarRow], options: ServersOptions) -> list[str]:
    parts = [
        f"{num_of(row.servers, 'server')} {'keep' if row.servers > 1 else 'keeps'} "
        + (
            f"{row.saturated:,} workers busy"
            if row.saturated
            else f"more than {options.most_workers:,} workers busy"
        )
        for row in rows
    ]
    profile, size = model.profile, model.profile.model.gradients
    link_s, apply_s = size / model.link.bytes_per_s, profile.by_owners_s
    slower = "its link" if link_s > apply_s else "its optimizer"
    said = (
        f"On machines like this one with links of {options.bandwidth}, {', '.join(parts)}: one more brings less than "
        "10 % of the first."
    )
    what = (
        f"A worker computes {format_seconds(profile.compute_s())} a batch; an update takes a lone server "
        f"{format_seconds(link_s)} on its link each way and {format_seconds(apply_s)} in its optimizer, so {slower} "
        "fills first."
    )
    worst = max(row.error for row in rows)
    return [
        said,
        what,
        f"The closed form is within {100 * worst:.0f} % of the simulator at each simulated point.",
    ]


def _about_here(
    pairs: Sequence[LivePair], live: Mapping[int, tuple[int | None, int | None]], cores: int
) -> list[str]:
    beyond = [abs(one.error) for one in pairs if one.workers > 1]
    said = []
    for servers, (seen, predicted) in live.items():
        most = max(one.workers for one in pairs if one.servers == servers)
        ends = [f"at {num_of(one, 'worker')}" if one else f"beyond {most}" for one in (seen, predicted)]
        said.append(
            f"Here, on {num_of(cores, 'core')} with {num_of(servers, 'server')}, saturation was seen {ends[0]} and "
            f"predicted {ends[1]}."
        )
    if beyond:
        said.append(
            f"The model, fitted to one worker, missed the other {num_of(len(beyond), 'pair')} by "
            f"{100 * statistics.mean(beyond):.0f} % on average and {100 * max(beyond):.0f} % at most."
        )
    return said


def _live_table(pairs: Sequence[LivePair]) -> StudyTable:
    return StudyTable(
        title="Here: global batches per second, all processes on the cores of this machine",
        head=("workers", "servers", "seen", "from", "to", "predicted", "error"),
        rows=tuple(
            (
                f"{one.workers}",
                f"{one.servers}",
                f"{one.rate:,.1f}",
                f"{min(one.seen):,.1f}",
                f"{max(one.seen):,.1f}",
                f"{one.predicted:,.1f}",
                "fitted" if one.workers == 1 else f"{100 * one.error:+.0f} %",
            )
            for one in pairs
        ),
    )


def _far_table(rows: Sequence[_FarRow]) -> StudyTable:
    def shown(count: int | None) -> str:
        return "–" if count is None else f"{count:,}"

    return StudyTable(
        title="On machines of their own: workers that saturate so many servers",
        head=("servers", "closed form", "simulator", "batches/s then", "largest difference"),
        rows=tuple(
            (
                f"{row.servers}",
                shown(row.saturated),
                shown(row.simulated),
                f"{row.peak:,.0f}",
                f"{100 * row.error:.0f} %",
            )
            for row in rows
        ),
    )


def _needed_table(needed: Sequence[tuple[int, int, int | None]]) -> StudyTable:
    return StudyTable(
        title="Servers for so many workers",
        head=("workers", "S = ⌈wW/(BT)⌉, or ⌈wa/T⌉", "for 90 % of the most"),
        rows=tuple(
            (f"{w:,}", f"{formula:,}", "–" if most is None else f"{most:,}") for w, formula, most in needed
        ),
    )


def _far_chart(
    curves: Mapping[int, Mapping[int, float]],
    simulated: Mapping[int, Mapping[int, float]],
    options: ServersOptions,
) -> StudyChart:
    series = [
        Series(
            name=num_of(servers, "server"),
            xs=[float(count) for count in curve],
            ys=list(curve.values()),
            dots=[(float(count), rate) for count, rate in simulated[servers].items()],
        )
        for servers, curve in curves.items()
    ]
    title = f"Throughput over workers, links of {options.bandwidth}"
    return StudyChart(
        title="On machines of their own",
        picture=line_chart(
            series, title=title, x_label="workers", y_label="global batches/s", log_x=True, log_y=True
        ),
        explained="Lines are the closed form, dots are simulated.",
    )


def _live_chart(pairs: Sequence[LivePair]) -> StudyChart:
    series = []
    for servers in sorted({one.servers for one in pairs}):
        own = [one for one in pairs if one.servers == servers]
        counts = [float(one.workers) for one in own]
        series.append(
            Series(name=num_of(servers, "server"), xs=counts, ys=[one.rate for one in own], note="seen")
        )
        predicted = [one.predicted for one in own]
        series.append(Series(name=num_of(servers, "server"), xs=counts, ys=predicted, note="predicted"))
    title = "Throughput over workers on the cores here"
    return StudyChart(
        title="Here",
        picture=line_chart(
            series, title=title, x_label="workers", y_label="global batches/s", from_zero=True
        ),
    )


def _figures(
    options: ServersOptions,
    pairs: Sequence[LivePair],
    far: ServerModel,
    lines: tuple[Mapping[int, Mapping[int, float]], Mapping[int, Mapping[int, float]]],
    found: tuple[
        Sequence[_FarRow], Sequence[tuple[int, int, int | None]], Mapping[int, tuple[int | None, int | None]]
    ],
) -> dict[str, Any]:
    from dataclasses import asdict

    (curves, simulated), (rows, needed, live) = lines, found
    return {
        "options": asdict(options),
        "measured": {
            "compute_s": far.profile.compute_s(),
            "optimizer_s": far.profile.by_owners_s,
            "other_s": far.other_s,
            "gradient_bytes": far.profile.model.gradients,
        },
        "live": [{**asdict(one), "rate": one.rate, "error": one.error} for one in pairs],
        "live_saturation": [
            {"servers": servers, "seen": seen, "predicted": predicted}
            for servers, (seen, predicted) in live.items()
        ],
        "closed_form": [
            {"servers": s, "workers": list(c), "batches_per_s": list(c.values())} for s, c in curves.items()
        ],
        "simulated": [
            {"servers": s, "workers": list(c), "batches_per_s": list(c.values())}
            for s, c in simulated.items()
        ],
        "saturation": [asdict(row) for row in rows],
        "servers_needed": [{"workers": w, "formula": formula, "model": most} for w, formula, most in needed],
    }
