"""A scaling curve in words, as a table, and as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from manyhands.draw.charts import Series, data_table, document, line_chart, section
from manyhands.scaling.curve import ScalingCurve

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
            f"{point.amdahl:.2f}",
            f"{point.forecast:.2f}",
            f"{100 * point.waiting:.0f} %",
        ]
        for point in curve.points
    ]


def scaling_sentences(curve: ScalingCurve, cores: int) -> list[str]:
    """What the data show: the knee, Amdahl's fit, and where the simulator sees it otherwise."""
    best = max(curve.points, key=lambda point: point.speedup)
    at_knee = next(point for point in curve.points if point.workers == curve.knee)
    told = [f"{best.workers} workers are the fastest, {best.speedup:.2f} times as fast as one."]
    if curve.is_past:
        told.append(
            f"The knee is at {curve.knee} worker{'s' * (curve.knee > 1)} ({at_knee.speedup:.2f} times, efficiency "
            f"{100 * at_knee.efficiency:.0f} %): the next step brings less than half of what it would at best."
        )
    else:
        told.append(
            f"There is no knee up to {curve.knee} workers: every step brings at least half of its best."
        )
    share = 100 * curve.serial_share
    limit = f"at most {curve.limit:.1f} times" if math.isfinite(curve.limit) else "without a limit"
    told.append(
        f"Amdahl's fit: {share:.0f} % of a step does not get shorter with more workers, so any number of them is "
        f"{limit} as fast."
    )
    last = curve.points[-1]
    if abs(last.forecast / last.speedup - 1) > 0.1:
        word = "more" if last.forecast > last.speedup else "less"
        told.append(
            f"The simulator, which knows computing, messages and cores alone, forecasts {word} for {last.workers} "
            f"workers: {last.forecast:.2f} times."
        )
    if last.workers > cores:
        told.append(f"More than {cores} workers share the {cores} cores that there are.")
    return told


def scaling_page(
    title: str, curve: ScalingCurve, told: Sequence[str], command: str, facts: Mapping[str, str]
) -> str:
    """The whole page; it needs nothing from elsewhere."""
    counts = [float(point.workers) for point in curve.points]
    smooth = [1 + (counts[-1] - 1) * place / 60 for place in range(61)]
    series = [
        Series(name="measured", xs=counts, ys=[point.speedup for point in curve.points]),
        Series(
            name="Amdahl's fit",
            xs=smooth,
            ys=[1 / (curve.serial_share + (1 - curve.serial_share) / n) for n in smooth],
        ),
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
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in told)
    table = data_table(SCALING_HEAD, scaling_cells(curve), title="Medians over the repeats, and their range")
    machine = " · ".join(f"{name} {value}" for name, value in facts.items())
    made = (
        f"<p><code>{escape(command)}</code></p><p>{escape(machine)}</p><p>The same steps with each number of workers, "
        "one run after the other, repeats interleaved; each on as many cores as it has workers, or all. "
        "Starting processes and evaluating do not count. The knee is the last number of workers up to which the speed "
        "grew by at least half as much as their number.</p>"
    )
    return document(
        title,
        [
            section("shows", "What the data show", f'<div class="told">{paragraphs}</div>', "wide"),
            section("curve", "Speed over workers", chart, "broad"),
            section("table", "In numbers", table, "wide"),
            section("made", "How this was made", made, "wide"),
        ],
    )
