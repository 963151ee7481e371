"""What a comparison measured, strategy by strategy: medians over its repeats, and how far the repeats lie apart.

Pure: what each run left goes in as `Measured`, a table's worth of numbers comes out. Seconds are those of training:
starting processes does not count, and the clock stands still while a model is evaluated.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from manyhands.errors import UserError, nearest
from manyhands.lab.compare.comparison import Target, default_target
from manyhands.observe.record.checked_values import final_loss, final_metrics
from manyhands.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What was known after `step` global batches and `at_s` seconds of training."""

    step: int
    at_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one run left; `place` is that of its strategy in the list."""

    place: int
    repeat: int
    steps: int
    samples: int
    seconds: float
    losses: tuple[Point, ...]  # one a step, `loss` alone: the mean over the global batch
    evaluations: tuple[Point, ...]  # the metrics on the evaluation data, in the order of the steps
    accounted_s: float  # computing, exchanging and waiting, of all workers together
    waited_s: float  # the waiting in it
    waited_for_s: Mapping[int, float]  # by the worker waited for
    messages: int
    num_bytes: int  # sent by all workers and servers together
    busiest_bytes: int  # sent by the one of them that sent most
    staleness_mean: float = 0.0
    staleness_max: int = 0
    joules: float | None = None  # of the machine while the run lasted; None where nothing counts them
    notes: tuple[str, ...] = ()

    @property
    def final(self) -> dict[str, float]:
        """What the run's summary has under the same name, and what was `scored`."""
        loss = final_loss({"step": point.step, **point.values} for point in self.losses)
        metrics = final_metrics({"step": point.step, "metrics": point.values} for point in self.evaluations)
        return ({} if loss is None else {"loss": loss}) | metrics

    def scored(self, scores: Mapping[str, float]) -> Measured:
        """The same with what was measured of the model that it ended with, beside its last evaluation."""
        *before, last = self.evaluations or (Point(step=self.steps, at_s=self.seconds, values={}),)
        if last.step < self.steps:
            before, last = [*before, last], Point(step=self.steps, at_s=self.seconds, values=last.values)
        return dataclasses.replace(
            self, evaluations=(*before, dataclasses.replace(last, values={**last.values, **scores}))
        )

    def reached(self, target: Target) -> Point | None:
        known = (point for point in self.evaluations if target.metric in point.values)
        return next((point for point in known if target.reached_by(point.values[target.metric])), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedTrial:
    """A run that came to nothing, and the sentence that says why."""

    place: int
    repeat: int
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One number over the repeats: their median, the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRow:
    """One strategy."""

    strategy: Strategy
    workers: int
    runs: tuple[Measured, ...]
    failures: tuple[str, ...]
    reached: int  # how many of the runs reached the target
    target_s: Spread | None  # over the runs that reached it; None where none did
    target_steps: Spread | None
    seconds: Spread | None  # of training, to the end
    samples_per_s: Spread | None
    waiting: Spread | None  # the share of the workers' time
    messages_per_step: Spread | None
    bytes_per_step: Spread | None  # sent by all workers and servers together
    busiest_bytes_per_step: Spread | None
    """Sent by the one of them that sent most: it sets the pace where the network does."""
    staleness_mean: Spread | None
    staleness_max: int
    joules: Spread | None = None  # None where nothing counts them
    final: Mapping[str, Spread] = field(default_factory=dict)
    waits_mostly_for: int | None = None  # the worker that most of the waiting was for
    price_per_hour: float | None = None  # of all its processes together; None where no prices were given
    price_per_1000_steps: Spread | None = None
    price_to_target: Spread | None = None
    device: str = ""  # where its workers computed, where several devices are compared

    @property
    def name(self) -> str:
        return f"{self.strategy} on {self.device}" if self.device else str(self.strategy)

    @property
    def always_reached(self) -> bool:
        return bool(self.runs) and self.reached == len(self.runs)

    def waiting_for(self, worker: int) -> float:
        """The median share of the time of all workers together that went into waiting for this one."""
        shares = [_ratio(run.waited_for_s.get(worker, 0.0), run.accounted_s) for run in self.runs]
        return statistics.median(shares) if shares else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A whole comparison; rows in the order of the strategies."""

    target: Target | None  # None where nothing was evaluated
    evaluate_every: int
    rows: tuple[CompareRow, ...]
    prices: Prices | None = None
    scores: tuple[str, ...] = ()  # what was measured of each run's model at its end besides
    about_energy: str = (
        ""  # why the energy of runs, or a part of it, could not be measured; empty where it could
    )

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": dataclasses.asdict(self.target) if self.target else None,
            "evaluate_every": self.evaluate_every,
            "about_energy": self.about_energy,
            "prices_per_hour": dict(self.prices.per_hour) if self.prices else None,
            "strategies": [_row_dict(row) for row in self.rows],
        }


def figures(
    strategies: Sequence[tuple[Strategy, int]],
    runs: Sequence[Measured | FailedTrial],
    target: Target | None,
    evaluate_every: int,
    prices: Prices | None = None,
    *,
    scores: tuple[str, ...] = (),
    devices: Sequence[str] = (),
) -> Figures:
    """All rows, from each strategy with its number of workers; where no target was asked for one is chosen.

    Not among the `scores`, which are known at the end alone. `devices` are those of the strategies, if they differ.
    """
    measured = [run for run in runs if isinstance(run, Measured)]
    of_place = [[run for run in measured if run.place == place] for place in range(len(strategies))]
    target = target or default_target(
        [
            [{name: value for name, value in run.final.items() if name not in scores} for run in one]
            for one in of_place
        ]
    )
    rows = []
    for place, (strategy, workers) in enumerate(strategies):
        failures = [run.sentence for run in runs if isinstance(run, FailedTrial) and run.place == place]
        row = _row(strategy, workers, of_place[place], failures, target)
        row = dataclasses.replace(row, device=devices[place] if devices else "")
        rows.append(row if prices is None else _priced(row, prices))
    return Figures(
        target=target, evaluate_every=evaluate_every, rows=tuple(rows), prices=prices, scores=scores
    )


def _priced(row: CompareRow, prices: Prices) -> CompareRow:
    per_hour = prices.of(row.strategy, row.workers)
    steps_s = [1000 * _ratio(run.seconds, run.steps) for run in row.runs]
    to_target = None
    if (reached := row.target_s) is not None:
        ends = (reached.median, reached.low, reached.high)
        median, low, high = (per_hour * seconds / _HOUR_S for seconds in ends)
        to_target = Spread(median=median, low=low, high=high)
    return dataclasses.replace(
        row,
        price_per_hour=per_hour,
        price_per_1000_steps=_spread([per_hour * seconds / _HOUR_S for seconds in steps_s]),
        price_to_target=to_target,
    )


def _row(
    strategy: Strategy, workers: int, runs: list[Measured], failures: list[str], target: Target | None
) -> CompareRow:
    reached = [point for run in runs if target is not None and (point := run.reached(target)) is not None]
    names = [name for name in runs[0].final if all(name in run.final for run in runs)] if runs else []
    waited_for: dict[int, float] = defaultdict(float)
    for run in runs:
        for worker, seconds in run.waited_for_s.items():
            waited_for[worker] += seconds
    mostly = max(waited_for, key=waited_for.__getitem__, default=None)
    return CompareRow(
        strategy=strategy,
        workers=workers,
        runs=tuple(runs),
        failures=tuple(dict.fromkeys(failures)),
        reached=len(reached),
        target_s=_spread([point.at_s for point in reached]),
        target_steps=_spread([point.step for point in reached]),
        seconds=_spread([run.seconds for run in runs]),
        samples_per_s=_spread([_ratio(run.samples, run.seconds) for run in runs]),
        waiting=_spread([_ratio(run.waited_s, run.accounted_s) for run in runs]),
        messages_per_step=_spread([_ratio(run.messages, run.steps) for run in runs]),
        bytes_per_step=_spread([_ratio(run.num_bytes, run.steps) for run in runs]),
        busiest_bytes_per_step=_spread([_ratio(run.busiest_bytes, run.steps) for run in runs]),
        staleness_mean=_spread([run.staleness_mean for run in runs]),
        staleness_max=max((run.staleness_max for run in runs), default=0),
        joules=_spread([math.nan if run.joules is None else run.joules for run in runs]),
        final={name: Spread.of([run.final[name] for run in runs]) for name in names},
        waits_mostly_for=mostly if mostly is not None and waited_for[mostly] > 0 else None,
    )


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values and all(math.isfinite(value) for value in values) else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _row_dict(row: CompareRow) -> dict[str, Any]:
    numbers = {
        name: dataclasses.asdict(value) if isinstance(value := getattr(row, name), Spread) else value
        for name in (
            "workers", "reached", "target_s", "target_steps", "seconds", "samples_per_s", "waiting",
            "waits_mostly_for", "messages_per_step", "bytes_per_step", "busiest_bytes_per_step", "staleness_mean",
            "staleness_max", "joules", "price_per_hour", "price_per_1000_steps", "price_to_target",
        )
    }  # fmt: skip
    promises = row.strategy.facts.promises
    return {
        "strategy": row.name,
        **({"device": row.device} if row.device else {}),
        "runs": len(row.runs),
        "failures": list(row.failures),
        **numbers,
        "final": {name: dataclasses.asdict(spread) for name, spread in row.final.items()},
        "promises": {
            one.name: getattr(promises, one.name).answer.value for one in dataclasses.fields(promises)
        },
    }


KINDS: Final = ("worker", "helper", "server")  # the processes that strategies start

_HOUR_S: Final = 3600.0
_EXAMPLE: Final = "write it as worker=10,helper=1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Of one process for an hour, by its kind, in any currency."""

    per_hour: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Prices:
        prices: dict[str, float] = {}
        for part in text.split(","):
            kind, _, value = part.strip().partition("=")
            if kind not in KINDS:
                raise UserError(
                    f"--price {text!r}: no such process {kind!r}; {nearest(kind, KINDS)}; {_EXAMPLE}"
                )
            if kind in prices:
                raise UserError(f"--price {text!r}: {kind} has two prices; {_EXAMPLE}")
            try:
                price = float(value)
            except ValueError:
                price = math.nan
            if not 0 <= price < math.inf:
                raise UserError(
                    f"--price {text!r}: {value!r} is not a price of a {kind} for an hour; {_EXAMPLE}"
                )
            prices[kind] = price
        return cls(per_hour=prices)

    def of(self, strategy: Strategy, workers: int) -> float:
        """What all processes of a run cost in an hour; UserError where one has no price."""
        processes = {kind: count for kind, count in strategy.processes(workers).items() if count}
        for kind in processes:
            if kind not in self.per_hour:
                raise UserError(
                    f"--price: {strategy} starts a {kind}, which has no price; add {kind}=1, or another price"
                )
        return sum(count * self.per_hour[kind] for kind, count in processes.items())

    def __str__(self) -> str:
        return ", ".join(f"{price:g} for a {kind}" for kind, price in self.per_hour.items())
