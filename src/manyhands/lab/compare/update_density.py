"""HOGWILD! against update density: what strategies do to one sparse problem after another, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.lab.compare.figures import Figures
from manyhands.observe.draw import paper
from manyhands.observe.draw.charts import Series, line_chart

DENSITY_HEAD = (
    *("strategy", "density", "share features", "examples/s"),
    *("times as fast", "pass loss", "difference"),
)

_TITLE = (
    "Density: the share of all features that an example has; share features: how likely two examples have one in "
    "common. Medians over the repeats; speed and loss beside the first strategy"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DensityRow:
    """One strategy at one density."""

    density: float
    shared: float  # how likely two examples share a feature
    strategy: str
    samples_per_s: float
    speedup: float  # beside the first strategy at this density
    loss: float  # of the last pass
    excess: float  # above that of the first strategy


def density_rows(found: Mapping[float, tuple[float, Figures]]) -> list[DensityRow]:
    """By density: how likely two examples share a feature, and the comparison; without the first strategy, nothing."""
    rows = []
    for density, (shared, figures) in sorted(found.items()):
        known = [
            (row.name, row.samples_per_s.median, row.final["pass_loss"].median)
            for row in figures.rows
            if row.samples_per_s is not None and "pass_loss" in row.final
        ]
        if not known or known[0][0] != figures.rows[0].name:
            continue
        rows += [
            DensityRow(
                density=density,
                shared=shared,
                strategy=name,
                samples_per_s=rate,
                speedup=rate / known[0][1],
                loss=loss,
                excess=loss - known[0][2],
            )
            for name, rate, loss in known
        ]
    return rows


def density_cells(rows: Sequence[DensityRow]) -> list[list[str]]:
    return [
        [
            row.strategy,
            f"{row.density:g}",
            f"{100 * row.shared:.1f} %",
            f"{row.samples_per_s:,.0f}",
            f"{row.speedup:.2f}",
            f"{row.loss:.4f}",
            f"{row.excess:+.4f}",
        ]
        for row in rows
    ]


def density_sentences(rows: Sequence[DensityRow]) -> list[str]:
    """For each strategy but the first: how its speed and its loss change from the sparsest to the densest problem."""
    if not rows:
        return ["Nothing to compare: the first strategy did not finish at any density."]
    first, sentences = rows[0].strategy, []
    for name in dict.fromkeys(row.strategy for row in rows if row.strategy != first):
        own = [row for row in rows if row.strategy == name]
        low, high = own[0], own[-1]
        if low.density == high.density:
            sentences.append(
                f"{name} is {low.speedup:.2f} times as fast as {first} at a density of {low.density:g}; its loss "
                f"differs by {low.excess:+.4f}."
            )
            continue
        sentences.append(
            f"{name} is {low.speedup:.2f} times as fast as {first} where two examples share a feature in "
            f"{100 * low.shared:.1f} % of cases, and {high.speedup:.2f} times where they do in "
            f"{100 * high.shared:.0f} %; its loss differs by {low.excess:+.4f} and {high.excess:+.4f}."
        )
    return sentences


def density_page(
    title: str, rows: Sequence[DensityRow], sentences: Sequence[str], command: str, facts: Mapping[str, str]
) -> str:
    names = dict.fromkeys(row.strategy for row in rows)
    charts = []
    for heading, field, label in (
        ("Speed beside the first", "speedup", "times as fast"),
        ("Loss above the first's", "excess", "pass loss, difference"),
    ):
        series = []
        for name in names:
            own = [row for row in rows if row.strategy == name]
            ys = [getattr(row, field) for row in own]
            series.append(Series(name=name, xs=[row.density for row in own], ys=ys))
        about = f"{heading}, over density"
        chart = line_chart(series, title=about, x_label="density", y_label=label, log_x=True)
        charts.append(paper.section(field, heading, chart))
    table = paper.data_table(DENSITY_HEAD, density_cells(rows), title=_TITLE)
    numbers = paper.section("table", "In numbers", table, "wide")
    return paper.document(
        title, [paper.findings_section(sentences), *charts, numbers, paper.made_section(command, facts)]
    )
