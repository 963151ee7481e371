"""What batch sizes cost and bring: saturation, Little's law, and queues whose inputs arrive at random; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import format_seconds
from manyhands.facts import ComputeTime
from manyhands.lab.studies.study import StudyAnswer, StudyChart, StudyTable
from manyhands.observe.draw.axes import short_number
from manyhands.observe.draw.charts import Series, line_chart

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """When a free server begins a batch: as soon as it is full, or its oldest input has waited so long."""

    name: str
    most: int  # inputs in a batch
    wait_s: float = 0.0


def random_arrivals(rate: float, count: int, seed: int = 0) -> Times:
    """A Poisson process: so many inputs, `rate` a second in the mean."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def finish_times(arrivals: Times, rule: BatchRule, seconds_of: Callable[[int], float]) -> Times:
    """When the batch of each input ends, where a batch of so many takes `seconds_of` it; in the order of arrivals."""
    finished, count = np.empty_like(arrivals), len(arrivals)
    first, free_at = 0, 0.0
    while first < count:
        full_at = float(arrivals[min(first + rule.most, count) - 1])  # nobody comes after the last input
        begin = max(free_at, min(full_at, float(arrivals[first]) + rule.wait_s))
        last = min(first + rule.most, int(np.searchsorted(arrivals, begin, "right")))
        free_at = begin + seconds_of(last - first)
        finished[first:last] = free_at
        first = last
    return finished


def mean_in_system(arrivals: Times, finished: Times) -> float:
    """How many inputs are waiting or computed, averaged over the time until the last is finished."""
    times = np.concatenate([arrivals, finished])
    order = np.argsort(times, kind="stable")
    inside = np.cumsum(np.concatenate([np.ones(len(arrivals)), -np.ones(len(finished))])[order])
    times = times[order]
    return float((inside[:-1] * np.diff(times)).sum() / times[-1])


_NEARLY = 0.9  # of the best throughput: more is hardly worth its latency
_CALM, _BUSY, _LOADS = 0.1, 0.95, 14  # loads: of what one at a time takes, to that of what full batches take
_ARRIVALS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTimes:
    """What one batch size takes in training and in inference."""

    batch: int
    step_s: float  # of training
    p50_s: float  # of inference, as the following
    p99_s: float
    mean_s: float
    calls: int
    clocked_per_s: float  # inputs, with whatever is between the calls

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def inputs_per_s(self) -> float:
        return self.batch / self.p50_s

    @property
    def under_way(self) -> float:
        """By Little's law, throughput times latency: the batch, if nothing else takes time."""
        return self.clocked_per_s * self.mean_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedQueue:
    """How long inputs take that arrive at random, by one rule of batching; modelled from the measured times."""

    rule: str
    inputs_per_s: float  # that arrive
    mean_s: float
    p99_s: float


def saturating(batches: Sequence[int], rates: Sequence[float]) -> int:
    """The smallest batch with nearly the best throughput."""
    return next(batch for batch, rate in zip(batches, rates, strict=True) if rate >= _NEARLY * max(rates))


def queues_under_load(seconds_of: Callable[[float], float], truck: int) -> list[LoadedQueue]:
    """A server that takes one at a time, one that takes who waits, and one that waits until its batch is full."""
    rules = (
        BatchRule(name="one at a time", most=1),
        BatchRule(name=f"who waits (up to {truck})", most=truck),
        BatchRule(name=f"only full batches of {truck}", most=truck, wait_s=math.inf),
    )
    found = []
    car_most, truck_most = 1 / seconds_of(1), truck / seconds_of(truck)
    for rate in np.geomspace(_CALM * car_most, _BUSY * truck_most, _LOADS).tolist():
        arrivals = random_arrivals(rate, _ARRIVALS)
        for rule in dict.fromkeys(rules if truck > 1 else rules[:1]):
            if rate < rule.most / seconds_of(rule.most):  # else the queue grows for ever
                took = finish_times(arrivals, rule, seconds_of) - arrivals
                p99_s = float(np.percentile(took, 99))
                found.append(
                    LoadedQueue(rule=rule.name, inputs_per_s=rate, mean_s=float(took.mean()), p99_s=p99_s)
                )
    return found


def truck_answer(rows: Sequence[BatchTimes], name: str, device: str) -> StudyAnswer:
    batches = [row.batch for row in rows]
    trained, answered = [row.samples_per_s for row in rows], [row.inputs_per_s for row in rows]
    truck = saturating(batches, answered)
    inference = ComputeTime.through({row.batch: row.p50_s for row in rows})
    queues = queues_under_load(inference.seconds, truck)
    apart = max(abs(row.under_way / row.batch - 1) for row in rows)
    sentences = [
        _saturation("Training", rows, trained, [row.step_s for row in rows], "samples"),
        _saturation("Inference", rows, answered, [row.p50_s for row in rows], "inputs"),
        *_about_queues(queues, inference, truck),
        f"Little's law, inputs under way = throughput × latency, holds for the measured batches to {apart:.1%}.",
        f"Measured: {name} on {device}, one process, medians. Modelled from these times: the queues, whose inputs "
        "arrive at random.",
    ]
    return StudyAnswer(
        sentences=tuple(sentences),
        tables=(_measured_table(rows), _queue_table(queues)),
        charts=(*_measured_charts(rows), _queue_chart(queues)),
        figures={
            "task": name,
            "device": device,
            "rows": [asdict(row) | {"under_way": row.under_way} for row in rows],
            "saturates_at": {"training": saturating(batches, trained), "inference": truck},
            "queues": [asdict(one) for one in queues],
        },
    )


def _saturation(
    what: str, rows: Sequence[BatchTimes], rates: Sequence[float], took_s: Sequence[float], noun: str
) -> str:
    batches = [row.batch for row in rows]
    at = batches.index(saturating(batches, rates))
    said = f"{what} has nearly its best throughput at a batch of {batches[0]:,}: {short_number(rates[0])} {noun}/s"
    if at:
        said = (
            f"{what} saturates at a batch of {batches[at]:,}: {short_number(rates[at])} {noun}/s, "
            f"{rates[at] / rates[0]:.3g} times those of batch {batches[0]:,}, for {took_s[at] / took_s[0]:.3g} times "
            f"the latency ({format_seconds(took_s[at])} instead of {format_seconds(took_s[0])})"
        )
    grows = len(rates) > 1 and max(rates) == rates[-1] > rates[-2] / _NEARLY
    return f"{said}; the largest batch still gained, so larger ones may be faster." if grows else f"{said}."


def _about_queues(queues: Sequence[LoadedQueue], inference: ComputeTime, truck: int) -> list[str]:
    if truck == 1:
        return ["The car is the truck here: one input at a time has nearly the best throughput."]
    p99_s = _by_rule(queues)
    car, flexible, full = p99_s.values()
    calm = min(car)
    at_calm = ", ".join(f"{rule} within {format_seconds(of_rule[calm])}" for rule, of_rule in p99_s.items())
    enough = [rate for rate, seconds in full.items() if seconds <= flexible[rate] / _NEARLY]
    when = f"hardly more from {short_number(min(enough))} inputs/s on" if enough else "more at every load"
    most = [short_number(batch / inference.seconds(batch)) for batch in (1, truck)]
    return [
        f"A server that takes one input at a time takes up to {most[0]} inputs/s, one with batches of {truck} up to "
        f"{most[1]}. At {short_number(calm)} inputs/s 99 % are answered: {at_calm}. Waiting for full batches "
        f"costs {when}."
    ]


def _by_rule(queues: Sequence[LoadedQueue]) -> dict[str, dict[float, float]]:
    """The 99th percentile by rule and load."""
    found: dict[str, dict[float, float]] = {}
    for one in queues:
        found.setdefault(one.rule, {})[one.inputs_per_s] = one.p99_s
    return found


def _measured_table(rows: Sequence[BatchTimes]) -> StudyTable:
    return StudyTable(
        title="Measured, by batch size",
        head=(
            "batch",
            "training step",
            "samples/s",
            "inference p50",
            "p99",
            "inputs/s",
            "under way",
            "calls",
        ),
        rows=tuple(
            (
                f"{row.batch:,}",
                format_seconds(row.step_s),
                f"{row.samples_per_s:,.0f}",
                format_seconds(row.p50_s),
                format_seconds(row.p99_s),
                f"{row.inputs_per_s:,.0f}",
                f"{row.under_way:,.1f}",
                f"{row.calls:,}",
            )
            for row in rows
        ),
    )


def _queue_table(queues: Sequence[LoadedQueue]) -> StudyTable:
    p99_s = _by_rule(queues)
    return StudyTable(
        title="Modelled: 99 % are answered within, by the inputs/s that arrive at random",
        head=("inputs/s", *p99_s),
        rows=tuple(
            (
                f"{rate:,.0f}",
                *(
                    format_seconds(of_rule[rate]) if rate in of_rule else "too many"
                    for of_rule in p99_s.values()
                ),
            )
            for rate in dict.fromkeys(one.inputs_per_s for one in queues)
        ),
    )


def _measured_charts(rows: Sequence[BatchTimes]) -> tuple[StudyChart, StudyChart]:
    xs = [float(row.batch) for row in rows]
    rates = [
        Series(name="training", xs=xs, ys=[row.samples_per_s for row in rows]),
        Series(name="inference", xs=xs, ys=[row.inputs_per_s for row in rows]),
    ]
    times = [
        Series(name="training step", xs=xs, ys=[1e3 * row.step_s for row in rows]),
        Series(name="inference, p50", xs=xs, ys=[1e3 * row.p50_s for row in rows]),
        Series(name="inference, p99", xs=xs, ys=[1e3 * row.p99_s for row in rows]),
    ]
    titles = ("Throughput by batch size", "Latency by batch size")
    pictures = (
        line_chart(rates, title=titles[0], x_label="batch", y_label="samples/s", log_x=True, log_y=True),
        line_chart(times, title=titles[1], x_label="batch", y_label="ms", log_x=True, log_y=True),
    )
    return StudyChart(title=titles[0], picture=pictures[0]), StudyChart(title=titles[1], picture=pictures[1])


def _queue_chart(queues: Sequence[LoadedQueue]) -> StudyChart:
    series = [
        Series(name=rule, xs=list(of_rule), ys=[1e3 * seconds for seconds in of_rule.values()])
        for rule, of_rule in _by_rule(queues).items()
    ]
    title = "Latency under load, modelled"
    picture = line_chart(
        series, title=title, x_label="inputs/s that arrive", y_label="p99, ms", log_x=True, log_y=True
    )
    return StudyChart(
        title=title, picture=picture, explained="A curve ends where its server cannot take more inputs."
    )
