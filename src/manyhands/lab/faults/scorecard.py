"""`compare --faults`: each strategy's run struck by each fault, what that cost, and which promises were kept."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from manyhands.data.store.atomic import make_output, require_empty
from manyhands.errors import ManyhandsError, UserError, num_of
from manyhands.lab.compare.comparison import Progress, Trial, workers_of
from manyhands.lab.faults.fault_costs import Fault, FaultCost, Kind, broken_promise, fault_cost, faults_of
from manyhands.lab.faults.struck_run import Launch, RunAsked, strike, undisturbed
from manyhands.observe.draw import paper
from manyhands.strategy import Strategy

CHECKPOINTS: Final = 10  # of a run
_STRUCK_AT: Final = 0.35  # of the steps: between two checkpoints
_HEAD: Final = ("strategy", "fault", "the run", "no step for", "again", "lost")


@dataclass(frozen=True, kw_only=True)
class FaultsAsked:
    """What is struck: `words` begin with `train TASK` and have the task's own options."""

    words: Sequence[str]
    strategies: Sequence[Strategy]
    workers: int
    steps: Sequence[int]  # of each strategy; of one that counts rounds, these
    seed: int
    out: Path
    launch: Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRow:
    """One strategy under one fault; without a cost, `problem` says why there is none."""

    strategy: Strategy
    fault: Fault
    cost: FaultCost | None
    problem: str = ""  # a broken promise, or why nothing was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorecard:
    """All rows, strategy by strategy, and the metric whose change is shown."""

    rows: Sequence[FaultRow]
    metric: str
    steps: int  # of the longest run
    interrupted: bool = False

    @property
    def problems(self) -> list[str]:
        return [row.problem for row in self.rows if row.problem]

    def to_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "steps": self.steps,
            "rows": [
                {
                    "strategy": str(row.strategy),
                    "fault": row.fault.name,
                    "problem": row.problem,
                    **(row.cost.to_dict() if row.cost is not None else {}),
                }
                for row in self.rows
            ],
        }


def score_faults(asked: FaultsAsked, on_progress: Callable[[Progress], None]) -> Scorecard:
    """Run everything; Ctrl-C ends the run that it meets, and what is done by then comes back."""
    require_empty(asked.out)
    make_output(asked.out)
    faults = [faults_of(one, workers_of(one, asked.workers)) for one in asked.strategies]
    total, began = sum(1 + len(found) for found in faults), time.monotonic()
    rows: list[FaultRow] = []
    metrics: list[str] = []
    done = 0

    def report(current: str) -> None:
        left = (time.monotonic() - began) / done * (total - done) if done else None
        on_progress(Progress(done=done, runs=total, current=current, seconds_left=left))

    try:
        for place, (strategy, found) in enumerate(zip(asked.strategies, faults, strict=True)):
            report(str(strategy))
            folder = asked.out / Trial(place=place, repeat=0).folder(strategy)
            make_output(folder)
            begun = time.monotonic()
            try:
                alone = undisturbed(_run(asked, place, folder / "undisturbed"))
            except ManyhandsError as error:
                raise type(error)(f"{strategy} fails without any fault: {error}") from error
            took_s = time.monotonic() - begun
            metrics.append(_metric(alone.final))
            done += 1
            for fault in found:
                report(f"{strategy}, {fault.name}")
                out = folder / re.sub(r"\W+", "-", fault.name)
                rows.append(_row(_run(asked, place, out, took_s), strategy, fault, alone.final))
                done += 1
    except KeyboardInterrupt:
        metric = metrics[0] if metrics else ""
        return Scorecard(rows=rows, metric=metric, steps=max(asked.steps), interrupted=True)
    return Scorecard(rows=rows, metric=metrics[0], steps=max(asked.steps))


def _row(run: RunAsked, strategy: Strategy, fault: Fault, final: Mapping[str, float]) -> FaultRow:
    try:
        cost = fault_cost(fault, strike(run, fault, max(1, round(run.steps * _STRUCK_AT))), final)
    except UserError:
        raise
    except ManyhandsError as error:
        return FaultRow(
            strategy=strategy, fault=fault, cost=None, problem=f"{strategy}, {fault.name}: {error}"
        )
    return FaultRow(strategy=strategy, fault=fault, cost=cost, problem=broken_promise(strategy, fault, cost))


def _run(asked: FaultsAsked, place: int, out: Path, expected_s: float = 60.0) -> RunAsked:
    strategy, steps = asked.strategies[place], asked.steps[place]
    given = {
        "strategy": strategy,
        "workers": workers_of(strategy, asked.workers),
        "rounds" if strategy.facts.counts_rounds else "steps": steps,
        "checkpoint-every": max(1, steps // CHECKPOINTS),
        "seed": asked.seed,
    }
    words = [*asked.words, *(f"--{name}={value}" for name, value in given.items())]
    return RunAsked(words=words, out=out, launch=asked.launch, steps=steps, expected_s=expected_s)


def _metric(final: Mapping[str, float]) -> str:
    """The loss on the evaluation data where there is one: that of a single batch jumps about."""
    return next((name for name in ("evaluation_loss", "loss", *final) if name in final), "")


def score_cells(found: Scorecard) -> list[list[str]]:
    rows, before = [], None
    for row in found.rows:
        name = str(row.strategy) if row.strategy != before else ""
        before = row.strategy
        rows.append([name, row.fault.name, *_cost_cells(row, found.metric)])
    return rows


def score_head(found: Scorecard) -> list[str]:
    return [*_HEAD, f"Δ {found.metric.removeprefix('evaluation_')}"]


def _cost_cells(row: FaultRow, metric: str) -> list[str]:
    cost = row.cost
    if cost is None:
        return ["failed", "–", "–", "–", "–"]
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


def score_sentences(found: Scorecard) -> list[str]:
    """What the rows show, and each promise that was not kept."""
    measured = [row for row in found.rows if row.cost is not None]
    went_on = sum(row.cost.went_on for row in measured if row.cost is not None)
    kills = [row for row in measured if row.fault.kind is Kind.KILL and row.fault.promise]
    alive = list(
        dict.fromkeys(str(row.strategy) for row in kills if row.cost is not None and row.cost.went_on)
    )
    sentences = [
        f"{num_of(len(measured), 'run')} of up to {found.steps} steps were each struck once; {went_on} went on by "
        "themselves, the others were continued with --resume."
    ]
    if alive:
        sentences.append(f"A killed worker or server did not end {', '.join(alive)}.")
    return [*sentences, *(f"Not as promised: {one}." for one in found.problems)]


def score_page(
    found: Scorecard, sentences: Sequence[str], title: str, command: str, facts: Mapping[str, str]
) -> str:
    about = (
        f"Each run is a `manyhands train` of its own with {CHECKPOINTS} checkpoints, struck after "
        f"{100 * _STRUCK_AT:.0f} % of its steps. No step for: the longest time after the fault in which the history "
        "had no new step, with the start of the run that continued it. Again: steps that were computed once "
        "more. Lost: updates that servers lack, by the audit. Δ: against the same run without a fault."
    )
    names = [str(row.strategy) for row in found.rows]
    cells = [[name, *row[1:]] for name, row in zip(names, score_cells(found), strict=True)]
    table = paper.data_table(score_head(found), cells, title="What each fault cost", words=(0, 1, 2))
    parts = [
        paper.findings_section(sentences),
        paper.section("faults", "Faults", table, "wide"),
        paper.made_section(command, facts, about),
    ]
    return paper.document(title, parts)
