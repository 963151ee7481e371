"""`compare --faults` and `--elastic`: what each strategy's runs cost, and which promises were kept."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from manyhands.data.store.atomic import make_output, require_empty
from manyhands.engine.request import Request
from manyhands.errors import ManyhandsError, UserError
from manyhands.facts import Answer
from manyhands.lab.compare.comparison import Progress, Target, Trial, workers_of
from manyhands.lab.compare.figures import Figures, Measured, figures
from manyhands.lab.compare.run_comparison import measure
from manyhands.lab.faults.blows import why_not
from manyhands.lab.faults.ease import ease_of
from manyhands.lab.faults.elasticity import ElasticCost, broken_elasticity, resize
from manyhands.lab.faults.fault_costs import Fault, FaultCost, broken_promise, fault_cost, faults_of
from manyhands.lab.faults.struck_run import Launch, RunAsked, strike, undisturbed
from manyhands.strategy import Strategy

CHECKPOINTS: Final = 10  # of a run
STRUCK_AT: Final = 0.35  # of the steps: between two checkpoints
_EVALUATIONS: Final = 20  # of a run: so precise are the steps to a target


@dataclass(frozen=True, kw_only=True)
class FaultsAsked:
    """What is struck: `words` begin with `train TASK` and have the task's own options."""

    words: Sequence[str]
    strategies: Sequence[Strategy]
    requests: Sequence[Request]  # of each strategy
    workers: int
    seed: int
    out: Path
    launch: Launch
    faults: bool = True  # whether runs are struck
    elastic: bool = False  # whether workers come and go
    target: Target | None = None  # of the undisturbed runs


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRow:
    """One strategy under one fault; without a cost, `problem` says why there is none."""

    strategy: Strategy
    fault: Fault
    cost: FaultCost | None
    problem: str = ""  # a broken promise, or why nothing was measured
    skipped: str = ""  # why this machine cannot do that


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRow:
    """Workers that come and go; without a cost, `problem` says what went wrong, or the strategy promises nothing."""

    strategy: Strategy
    cost: ElasticCost | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorecard:
    """All rows, strategy by strategy, and the metric whose change is shown."""

    rows: Sequence[FaultRow]
    elastic: Sequence[ElasticRow]
    alone: Figures  # of the runs that nothing happened to
    metric: str
    interrupted: bool = False

    @property
    def problems(self) -> list[str]:
        every = [*(row.problem for row in self.rows), *(row.problem for row in self.elastic)]
        return [one for one in every if one]

    def to_dict(self) -> dict[str, Any]:
        return {
            "interrupted": self.interrupted,
            "metric": self.metric,
            "steps": max((run.steps for row in self.alone.rows for run in row.runs), default=0),
            "alone": self.alone.to_dict(),
            "rows": [
                {
                    "strategy": str(row.strategy),
                    "fault": row.fault.name,
                    "problem": row.problem,
                    "skipped": row.skipped,
                    **(row.cost.to_dict() if row.cost is not None else {}),
                }
                for row in self.rows
            ],
            "elastic": [
                {
                    "strategy": str(row.strategy),
                    "promised": row.strategy.facts.promises.workers_join.answer.value,
                    "problem": row.problem,
                    **(row.cost.to_dict() if row.cost is not None else {}),
                }
                for row in self.elastic
            ],
            "ease": {
                str(row.strategy): dataclasses.asdict(ease_of(row.strategy, row.workers))
                for row in self.alone.rows
            },
        }


def score(asked: FaultsAsked, on_progress: Callable[[Progress], None]) -> Scorecard:
    """Run everything; Ctrl-C ends the run that it meets, and what is done by then comes back."""
    require_empty(asked.out)
    make_output(asked.out)
    work = _Scoring(asked, on_progress)
    try:
        for place in range(len(asked.strategies)):
            work.do(place)
    except KeyboardInterrupt:
        return work.found(interrupted=True)
    return work.found()


class _Scoring:
    """What is done so far."""

    def __init__(self, asked: FaultsAsked, on_progress: Callable[[Progress], None]) -> None:
        self._asked, self._on_progress = asked, on_progress
        self._faults = [
            faults_of(one, workers_of(one, asked.workers)) if asked.faults else () for one in asked.strategies
        ]
        self._why_not = {kind: why_not(kind) for kind in {one.kind for one in sum(self._faults, ())}}
        self._total = sum(1 + len(found) for found in self._faults)
        self._total += sum(map(_may_resize, asked.strategies)) if asked.elastic else 0
        self._began, self._done = time.monotonic(), 0
        self._alone: list[Measured] = []
        self._rows: list[FaultRow] = []
        self._elastic: list[ElasticRow] = []

    def do(self, place: int) -> None:
        """Every run of one strategy."""
        asked, strategy = self._asked, self._asked.strategies[place]
        trial = Trial(place=place, repeat=0)
        folder = asked.out / trial.folder(strategy)
        make_output(folder)
        self._report(str(strategy))
        begun = time.monotonic()
        try:
            alone = undisturbed(_run(asked, place, folder / "undisturbed"))
            self._alone.append(measure(trial, folder / "undisturbed", strategy))
        except ManyhandsError as error:
            raise type(error)(f"{strategy} fails without any fault: {error}") from error
        expected_s = time.monotonic() - begun
        num_bytes = sum(path.stat().st_size for path in (folder / "undisturbed").rglob("*"))
        self._done += 1
        for fault in self._faults[place]:
            if reason := self._why_not[fault.kind]:
                self._rows.append(FaultRow(strategy=strategy, fault=fault, cost=None, skipped=reason))
            else:
                self._report(f"{strategy}, {fault.name}")
                run = _run(asked, place, folder / re.sub(r"\W+", "-", fault.name))
                run = dataclasses.replace(run, expected_s=expected_s, num_bytes=num_bytes)
                self._rows.append(_row(run, strategy, fault, alone.final))
            self._done += 1
        if asked.elastic and _may_resize(strategy):
            self._report(f"{strategy}, workers come and go")
            self._elastic.append(_resized(asked.requests[place], strategy, folder / "elastic", expected_s))
            self._done += 1
        elif asked.elastic:
            self._elastic.append(ElasticRow(strategy=strategy))

    def _report(self, current: str) -> None:
        spent_s = time.monotonic() - self._began
        left = spent_s / self._done * (self._total - self._done) if self._done else None
        self._on_progress(Progress(done=self._done, runs=self._total, current=current, seconds_left=left))

    def found(self, *, interrupted: bool = False) -> Scorecard:
        asked = self._asked
        each = [(one, workers_of(one, asked.workers)) for one in asked.strategies[: len(self._alone)]]
        every = max(1, asked.requests[0].plan.steps // _EVALUATIONS)
        final = self._alone[0].final if self._alone else {}
        return Scorecard(
            rows=self._rows,
            elastic=self._elastic,
            alone=figures(each, self._alone, asked.target, every),
            metric=_metric(final),
            interrupted=interrupted,
        )


def _may_resize(strategy: Strategy) -> bool:
    """Whether it can be tried: where it is promised, and where it is possible without a promise."""
    facts = strategy.facts
    return facts.can_change_workers or facts.promises.workers_join.answer in (Answer.YES, Answer.PARTLY)


def _resized(request: Request, strategy: Strategy, out: Path, expected_s: float) -> ElasticRow:
    try:
        cost = resize(request, out, expected_s)
    except UserError:
        raise
    except ManyhandsError as error:
        return ElasticRow(strategy=strategy, problem=f"{strategy}, workers that come and go: {error}")
    return ElasticRow(strategy=strategy, cost=cost, problem=broken_elasticity(strategy, cost))


def _row(run: RunAsked, strategy: Strategy, fault: Fault, final: Mapping[str, float]) -> FaultRow:
    try:
        cost = fault_cost(fault, strike(run, fault, max(1, round(run.steps * STRUCK_AT))), final)
    except UserError:
        raise
    except ManyhandsError as error:
        return FaultRow(
            strategy=strategy, fault=fault, cost=None, problem=f"{strategy}, {fault.name}: {error}"
        )
    return FaultRow(strategy=strategy, fault=fault, cost=cost, problem=broken_promise(strategy, fault, cost))


def _run(asked: FaultsAsked, place: int, out: Path) -> RunAsked:
    strategy, steps = asked.strategies[place], asked.requests[place].plan.steps
    given = {
        "strategy": strategy,
        "workers": workers_of(strategy, asked.workers),
        "rounds" if strategy.facts.counts_rounds else "steps": steps,
        "checkpoint-every": max(1, steps // CHECKPOINTS),
        "evaluate-every": max(1, steps // _EVALUATIONS),
        "seed": asked.seed,
    }
    words = [*asked.words, *(f"--{name}={value}" for name, value in given.items())]
    return RunAsked(words=words, out=out, launch=asked.launch, steps=steps)


def _metric(final: Mapping[str, float]) -> str:
    """The loss on the evaluation data where there is one: that of a single batch jumps about."""
    return next((name for name in ("evaluation_loss", "loss", *final) if name in final), "")
