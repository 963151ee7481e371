"""The scorecard as tables, sentences and a page: the five measures of a way to aggregate, strategy by strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from manyhands.errors import num_of
from manyhands.lab.compare.compare_report import cells, columns
from manyhands.lab.faults.ease import ease_of
from manyhands.lab.faults.elasticity import JOINS_AT, LEAVER, LEAVES_AT
from manyhands.lab.faults.fault_costs import FaultCost, Kind
from manyhands.lab.faults.scorecard import CHECKPOINTS, STRUCK_AT, ElasticRow, FaultRow, Scorecard
from manyhands.observe.draw import paper

Rows = Sequence[Sequence[str]]

_FAULT_HEAD: Final = ("strategy", "fault", "the run", "no step for", "again", "lost")
_ELASTIC_HEAD: Final = (
    "strategy", "the run", "computes after", "samples/s of each", "with one more", "after a leave",
)  # fmt: skip
_EASE_HEAD: Final = ("strategy", "lines", "settings to give", "processes", "packages", "shares")


def tables(found: Scorecard, title: str) -> list[tuple[str, Sequence[str], Rows]]:
    """Name, head and rows of each table besides that of the measures; that of the faults has the `title`."""
    made = []
    if found.rows:
        made.append((title, *_faults(found)))
    if found.elastic:
        made.append(("a worker joins, another leaves", *_elasticity(found)))
    return [*made, ("ease", *_ease(found))]


def _faults(found: Scorecard) -> tuple[Sequence[str], Rows]:
    """Head and rows of what the faults cost; a strategy's name in the first of its rows."""
    rows, before = [], None
    for row in found.rows:
        name = str(row.strategy) if row.strategy != before else ""
        before = row.strategy
        rows.append([name, row.fault.name, *_cost_cells(row, found.metric)])
    return [*_FAULT_HEAD, f"Δ {found.metric.removeprefix('evaluation_')}"], rows


def _elasticity(found: Scorecard) -> tuple[Sequence[str], Rows]:
    """Head and rows of what joins and leaves brought."""
    return _ELASTIC_HEAD, [[str(row.strategy), *_elastic_cells(row)] for row in found.elastic]


def _ease(found: Scorecard) -> tuple[Sequence[str], Rows]:
    """Head and rows of what can be counted of the ease of each strategy."""
    rows = []
    for row in found.alone.rows:
        ease = ease_of(row.strategy, row.workers)
        processes = ", ".join(num_of(count, kind) for kind, count in ease.processes.items())
        lines = "a Task" if ease.lines is None else str(ease.lines)
        packages = "–" if ease.packages is None else str(ease.packages)
        rows.append([str(row.strategy), lines, str(ease.settings), processes, packages, ease.shares])
    return _EASE_HEAD, rows


def _measures(found: Scorecard) -> tuple[Sequence[str], Rows]:
    """Head and rows of the runs that nothing happened to: convergence and bandwidth."""
    head = ["strategy", *(name.replace("\n", " ") for name in columns(found.alone))]
    return head, [[row.name, *cells(found.alone, row)] for row in found.alone.rows]


def _cost_cells(row: FaultRow, metric: str) -> list[str]:
    cost = row.cost
    if cost is None:
        return ["skipped" if row.skipped else "failed", "–", "–", "–", "–"]
    if not cost.ended_well:
        happened = "was lost"
    elif cost.went_on:
        happened = "went on" if cost.slower is None else f"went on, {cost.slower:.1f}× slower"
    else:
        happened = "ended, resumed"
    change = cost.changes.get(metric)
    return [
        happened,
        "–" if cost.still_s is None else f"{cost.still_s:.1f} s",
        str(cost.repeated),
        "–" if cost.lost is None else str(cost.lost),
        "–" if change is None else "0" if abs(change) < 1e-6 else f"{change:+.2g}",
    ]


def _elastic_cells(row: ElasticRow) -> list[str]:
    cost = row.cost
    if cost is None:
        return ["failed" if row.problem else "fixed workers", *["–"] * 4]
    each = [f"{one:,.0f}" if one is not None else "–" for one in cost.each or (None, None, None)]
    computes = "–" if cost.computes_s is None else f"{cost.computes_s:.1f} s"
    return ["went on" if cost.went_on else "ended", computes, *each]


def score_sentences(found: Scorecard) -> list[str]:
    """What the rows show, and each promise that was not kept."""
    costs = [(row, row.cost) for row in found.rows if row.cost is not None]
    sentences = []
    if costs:
        went_on = sum(cost.went_on for _, cost in costs)
        sentences.append(
            f"{num_of(len(costs), 'run')} were each struck once; {went_on} went on by themselves, the others were "
            "continued with --resume."
        )
    if alive := _survivors(costs):
        sentences.append(f"A killed worker or server did not end {', '.join(alive)}.")
    resized = [
        str(row.strategy) for row in found.elastic if row.cost is not None and row.cost.computes_s is not None
    ]
    if resized:
        sentences.append(f"Workers joined and left {', '.join(resized)}.")
    fixed = [str(row.strategy) for row in found.elastic if row.cost is None and not row.problem]
    if fixed:
        sentences.append(f"No elasticity is promised by {', '.join(fixed)}.")
    skipped = dict.fromkeys(f"{row.fault.name}: {row.skipped}" for row in found.rows if row.skipped)
    sentences += [f"Skipped, {one}." for one in skipped]
    return [*sentences, *(f"Not as promised: {one}." for one in found.problems)]


def _survivors(costs: Sequence[tuple[FaultRow, FaultCost]]) -> list[str]:
    kills = [(row, cost) for row, cost in costs if row.fault.kind is Kind.KILL and row.fault.promise]
    return list(dict.fromkeys(str(row.strategy) for row, cost in kills if cost.went_on))


_ABOUT_FAULTS: Final = (
    f"Each run is a `manyhands train` of its own with {CHECKPOINTS} checkpoints, struck after "
    f"{100 * STRUCK_AT:.0f} % of its steps. No step for: the longest time after the fault in which the history "
    "had no new step, with the start of the run that continued it. Again: steps that were computed once "
    "more. Lost: updates that servers lack, by the audit. Δ: against the same run without a fault."
)
_ABOUT_ELASTIC: Final = (
    f"After {100 * JOINS_AT:.0f} % of the steps a worker is added, after {100 * LEAVES_AT:.0f} % worker {LEAVER} is "
    "removed. Computes after: from the request to the newcomer's first step."
)
_ABOUT_EASE: Final = (
    "Lines: new or changed ones in a plain loop; packages: those that installing manyhands brings. Settings to give: "
    "those without a default."
)


def score_page(
    found: Scorecard, sentences: Sequence[str], title: str, command: str, facts: Mapping[str, str]
) -> str:
    head, rows = _measures(found)
    measured = paper.data_table(head, rows, title="The runs that nothing happened to")
    parts = [
        paper.findings_section(sentences),
        paper.section("convergence", "Convergence and bandwidth", measured, "wide"),
    ]
    about = []
    if found.rows:
        head, rows = _faults(found)
        rows = [[str(row.strategy), *cells[1:]] for row, cells in zip(found.rows, rows, strict=True)]
        table = paper.data_table(head, rows, title="What each fault cost", words=(0, 1, 2))
        parts.append(paper.section("faults", "Faults", table, "wide"))
        about.append(_ABOUT_FAULTS)
    if found.elastic:
        head, rows = _elasticity(found)
        table = paper.data_table(head, rows, title="A worker joins, another leaves", words=(0, 1))
        parts.append(paper.section("elasticity", "Elasticity", table, "wide"))
        about.append(_ABOUT_ELASTIC)
    head, rows = _ease(found)
    table = paper.data_table(
        head, rows, title="What is to be written, chosen, started and shared", words=(0, 3, 5)
    )
    parts.append(paper.section("ease", "Ease", table, "wide"))
    parts.append(paper.made_section(command, facts, *about, _ABOUT_EASE))
    return paper.document(title, parts)
