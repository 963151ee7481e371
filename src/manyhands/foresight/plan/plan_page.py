"""The page of a plan: all plans in a table, their steps as bars, and time and price over the number of workers."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from manyhands.errors import format_bytes, format_seconds, num_of
from manyhands.foresight.plan.plan_search import PlanLimits, PlanRow, Question, predicted_rows
from manyhands.foresight.plan.planning import TaskPlan
from manyhands.observe.draw import paper
from manyhands.observe.draw.axes import linear
from manyhands.observe.draw.charts import Series, line_chart
from manyhands.strategies.registry import entry_of

__all__ = ["frontier", "over_workers", "plan_cells", "plan_head", "plan_page", "plan_sentences", "plan_title"]

_MOST_BARS = 12
_MOST_TIMES = 10  # the best plan's time, that a bar may be long
_MOST_CURVES = 8


def plan_title(task: str, plan: TaskPlan) -> str:
    machines, most = plan.cluster.machines, max(row.workers for row in plan.ranked.rows)
    measured = plan.cluster.measured
    where = "this machine" if measured else f"{num_of(machines.hosts, 'host')} of {machines.per_host}"
    return f"{task} on {num_of(most, 'worker')} · {where} · {plan.steps:,} steps"


def plan_head(plan: TaskPlan) -> list[str]:
    price = ["price"] if any(row.price is not None for row in plan.ranked.rows) else []
    return ["plan", "step", "±", "in all", "memory", "sends", *price, "why not"]


def plan_cells(plan: TaskPlan) -> list[list[str]]:
    """A row of the table for each plan; times are of a global batch, and of all steps that are wanted."""
    rows = plan.ranked.rows
    several = len({row.workers for row in rows if row.strategy.most_workers is None}) > 1
    with_price = "price" in plan_head(plan)
    cells = []
    for row in rows:
        name = f"{row.strategy} · {row.workers}" if several else str(row.strategy)
        price = [] if not with_price else ["–" if row.price is None else f"{row.price:.4g}"]
        cells.append([name, *_times(row), *_sizes(row), *price, row.reason])
    return cells


def _times(row: PlanRow) -> list[str]:
    if row.seconds is None or row.total_s is None:
        return ["–"] * 3
    return [format_seconds(row.seconds), f"{100 * row.error:.0f} %", format_seconds(row.total_s)]


def _sizes(row: PlanRow) -> list[str]:
    sent = "?" if row.sent is None else format_bytes(row.sent) if row.sent else "–"
    return [format_bytes(row.memory) if row.memory else "–", sent]


def plan_sentences(plan: TaskPlan) -> list[str]:
    """Where the time of the chosen plan goes, what would change the choice, and what was tried."""
    step = plan.chosen.predicted
    assert step is not None, "it may be chosen"
    parts = [f"{100 * part / step.seconds:.0f} % {name}" for name, part in step.parts.items() if part > 0]
    tried = [
        f"{one.row.strategy}: {format_seconds(one.seen_s)} a step were seen, {format_seconds(one.row.seconds or 0.0)} "
        f"predicted ({100 * ((one.row.seconds or 0.0) / one.seen_s - 1):+.0f} %)."
        for one in plan.tried
    ]
    first = f"A step of {plan.strategy}: {', '.join(parts)}."
    return [first, *plan.ranked.sensitivities, *tried, *plan.notes]


def plan_page(task: str, plan: TaskPlan, command: str, facts: Mapping[str, str]) -> str:
    """One self-contained document; `facts` are of the machine that predicted."""
    open_rows = plan.ranked.finalists
    table = paper.data_table(
        plan_head(plan),
        plan_cells(plan),
        title="Every plan, the fastest first; ± is by what nine of ten predictions are off at the most",
        words=(0, len(plan_head(plan)) - 1),
    )
    others = over_workers(plan.question, open_rows) if plan.question is not None else list(open_rows)
    return paper.document(
        plan_title(task, plan),
        [
            paper.findings_section(plan_sentences(plan)),
            paper.section("table", "Plans", table, "wide"),
            paper.section("steps", "Where the time of a step goes", _step_bars(open_rows)),
            paper.section("workers", "Time over workers", _workers_chart(others)),
            *_frontier_section(others),
            *_schedules(open_rows),
            paper.made_section(
                command, facts, "All times are predictions, except where a sentence says seen."
            ),
        ],
    )


def over_workers(question: Question, rows: Sequence[PlanRow]) -> list[PlanRow]:
    """The best of each kind on fewer of the described workers too; of machines here, what was asked for."""
    if question.cluster.measured:
        return list(rows)
    machines = question.cluster.machines
    within = [count for count in _doubled(machines.per_host) if machines.per_host % count == 0]
    beyond = [hosts * machines.per_host for hosts in _doubled(machines.hosts)]
    best = {row.strategy.word: row.strategy for row in reversed(rows)}  # of each kind, the fastest
    asked = replace(
        question,
        workers=tuple(sorted({*within, *beyond, *question.workers})),
        strategies=tuple(best.values()),
        limits=PlanLimits(),
    )
    return [row for row in predicted_rows(asked) if row.is_open]


def _doubled(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def frontier(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """Those that no other beats in price and time, or in workers and time, the cheapest first."""
    found: list[PlanRow] = []
    for row in sorted(rows, key=lambda row: (_cost(row), row.seconds or 0.0)):
        if not found or (row.seconds or 0.0) < (found[-1].seconds or 0.0):
            found.append(row)
    return found


def _cost(row: PlanRow) -> float:
    return float(row.workers) if row.price is None else row.price


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def _unit(seconds: Iterable[float]) -> tuple[float, str]:
    """In which unit the greatest is at least 1."""
    most = max(seconds, default=1.0)
    return next((unit for unit in _UNITS if most >= unit[0]), _UNITS[-1])


_WIDTH, _ROW, _BAR, _FOOT = 360.0, 32.0, 12.0, 30.0
_LEFT, _NAME_LETTERS = 8.0, 60
_COLOURS = (*(paper.PART_COLOURS[part] for part in ("compute", "exchange", "waiting")), 4, 5)
"""Of the parts of a step, in their order."""


def _step_bars(rows: Sequence[PlanRow]) -> str:
    """A bar for each of the best plans, its parts beside each other, with the range in which nine of ten would be."""
    best_s = rows[0].seconds or 0.0
    shown = [
        (row, row.predicted)
        for row in rows[:_MOST_BARS]
        if row.predicted is not None and row.predicted.seconds <= _MOST_TIMES * best_s
    ]
    scale, unit = _unit(step.seconds for _, step in shown)
    ends = [step.seconds * (1 + row.error) / scale for row, step in shown]
    axis, ticks = linear([0.0, *ends], _LEFT, _WIDTH - 12, 5)
    bottom = _ROW * len(shown)
    drawn = []
    for place, said in ticks:
        drawn.append(paper.svg_line("grid", axis.at(place), 0, axis.at(place), bottom))
        drawn.append(paper.svg_text(axis.at(place), bottom + 13, said, "tick x", "middle"))
    drawn.append(paper.svg_text(_WIDTH / 2, bottom + _FOOT - 4, f"{unit} a step", "label", "middle"))
    said_of = {}
    for index, (row, step) in enumerate(shown):
        said_of[row] = f"{format_seconds(step.seconds)} ± {100 * row.error:.0f} %"
        y, before = index * _ROW, 0.0
        drawn.append(
            paper.svg_text(_LEFT, y + 11, f"{_name(row)}: {said_of[row]}", "", "start", _NAME_LETTERS)
        )
        for colour, (name, seconds) in zip(_COLOURS, step.parts.items(), strict=True):
            begin, end = axis.at(before / scale), axis.at((before + seconds) / scale)
            before += seconds
            if seconds > 0:
                said = f"{_name(row)}: {format_seconds(seconds)} {name}"
                drawn.append(paper.svg_rect(f"f{colour}", begin, y + 15, end - begin, _BAR, said))
        middle, edge = y + 15 + _BAR / 2, "curve s7"
        factors = (1 - min(row.error, 1.0), 1 + row.error)
        low, high = (axis.at(step.seconds * factor / scale) for factor in factors)
        drawn.append(paper.svg_line(edge, low, middle, high, middle, said_of[row]))
        drawn += [paper.svg_line(edge, end, middle - 4, end, middle + 4) for end in (low, high)]
    words = "; ".join(f"{_name(row)} {said}" for row, said in said_of.items())
    picture = paper.svg_chart(drawn, _WIDTH, bottom + _FOOT, f"Parts of a step: {words}", "chart rows")
    swatches = [
        '<svg class="swatch" viewBox="0 0 12 10" aria-hidden="true">'
        f'<rect class="f{colour}" width="12" height="10" rx="2"/></svg>'
        for colour in _COLOURS
    ]
    names = list(shown[0][1].parts)
    return paper.figure(
        "In the order in which they come; the line is ±", picture, paper.legend(names, swatches)
    )


def _name(row: PlanRow) -> str:
    return f"{row.strategy} · {row.workers}"


def _workers_chart(rows: Sequence[PlanRow]) -> str:
    by_strategy: dict[str, list[PlanRow]] = {}
    for row in sorted(rows, key=lambda row: row.workers):
        by_strategy.setdefault(str(row.strategy), []).append(row)
    fastest = sorted(by_strategy, key=lambda name: min(row.seconds or 0.0 for row in by_strategy[name]))
    shown = {name: by_strategy[name] for name in fastest[:_MOST_CURVES]}
    scale, unit = _unit(row.seconds or 0.0 for found in shown.values() for row in found)
    series = [
        Series(
            name=name,
            xs=[float(row.workers) for row in found],
            ys=[(row.seconds or 0.0) / scale for row in found],
        )
        for name, found in shown.items()
    ]
    counts = {row.workers for found in shown.values() for row in found}
    chart = line_chart(
        series,
        title="Time of a step, as predicted",
        x_label="workers",
        y_label=f"{unit} a step",
        log_x=len(counts) > 2,
        log_y=len(counts) > 2,
    )
    few = len(counts - {1}) < 2
    return chart + (paper.quiet("Several numbers, as in --workers 1,2,4, are compared here.") if few else "")


def _frontier_section(rows: Sequence[PlanRow]) -> list[str]:
    best = frontier(rows)
    if len(best) < 2:
        return []
    with_price = best[0].price is not None
    what = "price" if with_price else "workers"
    scale, unit = _unit(row.total_s or 0.0 for row in best)
    points = [(_cost(row), (row.total_s or 0.0) / scale) for row in best]
    others = [(_cost(row), (row.total_s or 0.0) / scale) for row in rows if row not in best]
    chart = line_chart(
        [
            Series(
                name="no other is both cheaper and faster",
                xs=[x for x, _ in points],
                ys=[y for _, y in points],
            ),
            Series(name="the others", xs=[], ys=[], dots=others),
        ],
        title=f"Time of all steps over {what}",
        x_label=what,
        y_label=unit,
        log_x=True,
        log_y=True,
    )
    table = paper.data_table(
        ["plan", what, "in all"],
        [
            [
                _name(row),
                f"{_cost(row):.4g}",
                f"{format_seconds(row.total_s or 0.0)} ± {100 * row.error:.0f} %",
            ]
            for row in best
        ],
        title="The frontier",
    )
    return [paper.section("frontier", f"{what.capitalize()} and time", chart + table)]


def _schedules(rows: Sequence[PlanRow]) -> list[str]:
    """The order of work of the best plan and the next, where they have a schedule."""
    sections = []
    for number, row in enumerate(rows[:2]):
        draw = entry_of(row.strategy.word).load_drawing()
        if draw is not None:
            data = base64.b64encode(draw(row.strategy).encode()).decode()
            image = f'<img alt="The schedule of {row.strategy}" src="data:image/svg+xml;base64,{data}"/>'
            heading = f"Schedule of {row.strategy}"
            sections.append(paper.section(f"schedule-{number}", heading, image, "wide"))
    return sections
