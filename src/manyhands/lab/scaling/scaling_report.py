"""A scaling curve in words, as a table, and as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from manyhands.lab.scaling.curve import ScalingCurve, amdahl_speedup
from manyhands.observe.draw.charts import (
    Series,
    data_table,
    document,
    findings_section,
    line_chart,
    made_section,
    section,
)

__all__ = ["SCALING_HEAD", "scaling_cells", "scaling_page", "scaling_sentences"]

SCALING_HEAD = (
    "workers",
    "samples/s",
    "from",
    "to",
    "times as fast",
    "efficiency",
    "Amdahl",
    "simulator",
    "waiting",
)

_HOW = (
    "The same steps with each number of workers, one run after the other, repeats interleaved; each on as many cores "
    "as it has workers, or all. Starting processes and evaluating do not count. The knee is the last number of workers "
    "up to which the speed grew by at least half as much as their number. Amdahl's law is fitted to the runs with at "
    "most as many workers as cores; for more workers its column says what it would be with a core for each."
)


def scaling_cells(curve: ScalingCurve) -> list[list[str]]:
    """The rows of the table."""
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
    """What the data show: the knee, Amdahl's fit, and where the simulator sees it otherwise."""
    best = max(curve.points, key=lambda point: point.speedup)
    told = [
        f"{_workers(best.workers)} is the fastest."
        if best.workers == 1
        else f"{_workers(best.workers)} are the fastest, {best.speedup:.2f} times as fast as one.",
        _about_the_knee(curve),
        _about_amdahl(curve),
    ]
    last = curve.points[-1]
    if abs(last.forecast / last.speedup - 1) > 0.1:
        word = "more" if last.forecast > last.speedup else "less"
        told.append(
            f"The simulator, which models computing, messages and cores and nothing else, forecasts {word} for "
            f"{last.workers} workers: {last.forecast:.2f} times."
        )
    if last.workers > curve.cores:
        told.append(
            f"This machine has {curve.cores} core{'s' * (curve.cores > 1)}; more workers than that take turns on them."
        )
    return told


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _about_the_knee(curve: ScalingCurve) -> str:
    if not curve.is_past:
        return f"There is no knee up to {curve.knee} workers: each step up brings at least half of what it could."
    at_knee, after = next((here, then) for here, then in pairwise(curve.points) if here.workers == curve.knee)
    return (
        f"The knee is at {_workers(curve.knee)} ({at_knee.speedup:.2f} times, efficiency "
        f"{100 * at_knee.efficiency:.0f} %): going on to {after.workers} brings less than half of what it could."
    )


def _about_amdahl(curve: ScalingCurve) -> str:
    if curve.serial_share is None or curve.limit is None:
        cores = f"{curve.cores} core{'s' * (curve.cores > 1)}"
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
    title: str, curve: ScalingCurve, told: Sequence[str], command: str, facts: Mapping[str, str]
) -> str:
    """The whole page; it needs nothing from elsewhere."""
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
    table = data_table(SCALING_HEAD, scaling_cells(curve), title="Medians over the repeats, and their range")
    return document(
        title,
        [
            findings_section(told),
            section("curve", "Speed over workers", chart, "broad"),
            section("table", "In numbers", table, "wide"),
            made_section(command, facts, _HOW),
        ],
    )
