"""Which of all plans is the fastest that fits and keeps its promises, and why the others lose; pure.

Every strategy says which of its settings are worth considering (`Strategy.choices`), what it needs, what it sends, what
it promises and where the time of a step goes. Nothing is dropped silently: each plan that is not the best has its
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from manyhands.errors import UserError, format_bytes, format_seconds, num_of
from manyhands.facts import LinkRate, Machines, PredictedStep, TaskProfile
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.track_record import TrackRecord, cost_class
from manyhands.strategies.auto.promised import Must
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy, enough

__all__ = [
    "PlanLimits",
    "PlanRow",
    "Question",
    "RankedPlans",
    "candidates",
    "make_plan",
    "predicted_rows",
    "worth_trying",
]

_DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLimits:
    """The most that the wanted steps may take or cost."""

    seconds: float | None = None
    price: float | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned: a task on some workers, the machines, and what the plan must keep to."""

    profile_of: Callable[[int, int], TaskProfile]
    """Of a worker here, of so many on a host, where so many processes share its cores."""
    cluster: DescribedCluster
    machines_of: Callable[[int], Machines] | None = None  # with so many workers; None: those of the cluster
    workers: tuple[int, ...]  # how many there may be
    steps: int = 1000  # that are wanted
    refuses: Callable[[Strategy, int], str] = lambda _strategy, _workers: ""
    """The sentence that says why so many workers cannot train the task so; empty where they can."""
    must: tuple[Must, ...] = (Must("equal"),)
    strategies: tuple[str | Strategy, ...] = tuple(STRATEGIES)
    """Words, with whose choices a plan is made, and texts and values, which are considered as they are."""
    limits: PlanLimits = field(default_factory=PlanLimits)
    record: TrackRecord = field(default_factory=TrackRecord)
    """How wrong earlier predictions were here."""

    def __post_init__(self) -> None:
        if not self.strategies:
            raise UserError("strategies is empty; name at least one, such as mirrored")

    def machines(self, workers: int) -> Machines:
        return (self.machines_of or self.cluster.of_workers)(workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One plan: what is predicted of it, and the reason why it is not the best; empty for the best."""

    strategy: Strategy
    workers: int
    settled: Strategy | None = None
    """With the settings that a run would measure, as this prediction has them; None: it measures none."""
    predicted: PredictedStep | None = None
    uncorrected_s: float = 0.0  # what was predicted before earlier errors were taken into account
    error: float = 0.0
    """The share of the predicted time by which nine of ten predictions of this kind are off at the most."""
    memory: int = 0  # bytes of the fullest process
    sent: float | None = None  # bytes in a step of the process that sends most, on one host; None: not known
    messages: float = 0.0  # that this process sends in a step
    total_s: float | None = None  # of the wanted steps
    price: float | None = None  # of the wanted steps
    reason: str = ""
    is_open: bool = True  # whether it may be chosen

    @property
    def seconds(self) -> float | None:
        return None if self.predicted is None else self.predicted.seconds

    @property
    def to_run(self) -> Strategy:
        """What has the memory that is told: a run that measures anew may cut a model elsewhere."""
        return self.settled or self.strategy

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.workers} workers"


@dataclass(frozen=True, kw_only=True)
class RankedPlans:
    """All plans, the best first, then the slower ones, then those that are ruled out."""

    rows: tuple[PlanRow, ...]
    sensitivities: tuple[str, ...] = ()

    @property
    def best(self) -> PlanRow:
        return self.rows[0]

    @property
    def finalists(self) -> tuple[PlanRow, ...]:
        """Those that may be chosen, the fastest first."""
        return tuple(row for row in self.rows if row.is_open)

    def of(self, strategy: str, workers: int) -> PlanRow:
        return next(row for row in self.rows if (str(row.strategy), row.workers) == (strategy, workers))


def make_plan(question: Question) -> RankedPlans:
    """Predict every plan, rule out what does not do, and say what would change the choice.

    UserError where nothing is left: it names the plan that comes nearest, and what it lacks.
    """
    asked = [_asked(question, strategy, workers) for strategy, workers in candidates(question)]
    rows = [_row(question, one, question.cluster) for one in asked]
    left = sorted((row for row in rows if row.is_open), key=_seconds)
    ruled_out = [row for row in rows if not row.is_open]
    if not left:
        raise UserError(_nothing_left(question, ruled_out))
    best = left[0]
    slower = [replace(row, reason=_slower(best, row, len(question.workers) > 1)) for row in left[1:]]
    said = [
        *_sensitivities(question, [one for one in asked if not one.reason], best),
        *_with_other_hosts(question, best),
        *_with_other_memory(question, rows, best),
    ]
    return RankedPlans(rows=(best, *slower, *ruled_out), sensitivities=tuple(said))


def worth_trying(rows: Sequence[PlanRow], most: int) -> list[PlanRow]:
    """Of rows with the fastest first, those to run for a moment: the fastest of each kind, then the next fastest.

    Plans of a kind err alike: one is rarely slow where another one is fast.
    """
    kinds: dict[str, PlanRow] = {}
    for row in rows:
        kinds.setdefault(cost_class(row.strategy), row)
    firsts = list(kinds.values())
    return [*firsts, *(row for row in rows if row not in firsts)][:most]


def predicted_rows(question: Question) -> list[PlanRow]:
    """What is predicted of every plan, in no order; those that may not be chosen have their reason."""
    asked = [_asked(question, strategy, workers) for strategy, workers in candidates(question)]
    return [_row(question, one, question.cluster) for one in asked]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A plan before it is predicted: what does not depend on how fast machines are."""

    strategy: Strategy
    workers: int
    machines: Machines
    profile: TaskProfile
    memory: int = 0
    sent: float | None = None
    messages: float = 0.0
    reason: str = ""  # why it is out, whatever the machines


def candidates(question: Question) -> Iterable[tuple[Strategy, int]]:
    """Every strategy that is considered, with its workers."""
    seen: set[tuple[str, int]] = set()
    survives = any(must.name == "survives" for must in question.must)
    lossy = all(must.name != "equal" for must in question.must)
    for workers in question.workers:
        machines = question.machines(workers)
        for text in question.strategies:
            choices: Sequence[Strategy]
            if isinstance(text, Strategy) or " " in text.strip():
                choices = [Strategy.parse(text)]
            else:
                kind = STRATEGIES[Strategy.parse(text).word].load_value()
                choices = kind.choices(machines, survives=survives, lossy=lossy)
            for strategy in choices:
                most = strategy.most_workers
                count = workers if most is None else min(most, workers)
                if (str(strategy), count) not in seen:
                    seen.add((str(strategy), count))
                    yield strategy, count


def _asked(question: Question, strategy: Strategy, workers: int) -> _Candidate:
    machines = question.machines(workers)
    processes = -(-sum(strategy.processes(workers).values()) // machines.hosts)
    profile = question.profile_of(machines.per_host, processes)
    found = _Candidate(strategy=strategy, workers=workers, machines=machines, profile=profile)
    if reason := question.refuses(strategy, workers):
        return replace(found, reason=reason)
    try:
        step = strategy.predict(profile, machines)
        as_run: Strategy = (step.with_settings if step is not None else None) or strategy
        memory = max((one.total for one in as_run.needs(profile.model, workers)), default=0)
    except UserError as error:  # so many workers, which `refuses` has most likely said
        return replace(found, reason=str(error))
    traffic = as_run.sends(profile.model, workers) if machines.hosts == 1 else None
    if traffic is not None:
        sent = max((one.num_bytes for one in traffic), default=0.0)
        messages = max((one.messages for one in traffic), default=0.0)
        found = replace(found, sent=sent, messages=messages)
    found = replace(found, memory=memory)
    lacking = [why for must in question.must if (why := must.lacking(strategy, workers))]
    if lacking:
        return replace(found, reason=f"ruled out: {lacking[0]}")
    most = question.cluster.memory
    if most and memory > most:
        return replace(
            found, reason=f"{_DOES_NOT_FIT}: {format_bytes(memory)} of {format_bytes(most)} for each worker"
        )
    return found


def _row(question: Question, one: _Candidate, cluster: DescribedCluster) -> PlanRow:
    """What is predicted of a candidate on these machines, which may be faster than those of the question."""
    row = PlanRow(
        strategy=one.strategy,
        workers=one.workers,
        memory=one.memory,
        sent=one.sent,
        messages=one.messages,
        reason=one.reason,
        is_open=not one.reason,
    )
    machines = one.machines if cluster.measured else cluster.of_workers(one.workers)
    try:
        step = one.strategy.predict(cluster.scaled(one.profile), machines)
    except UserError as error:  # so many workers, which `refuses` has most likely said before
        return replace(row, is_open=False, reason=row.reason or str(error))
    if step is None:
        return replace(row, is_open=False, reason=row.reason or _not_modelled(one.strategy, machines))
    row = replace(row, settled=step.with_settings)
    costs = machines.costs.get(cost_class(one.strategy))
    if costs is not None:
        beside_s = costs.seconds(one.messages, one.sent or 0.0)
        step = replace(step, costs_s=step.costs_s + beside_s * step.batches)
    row = replace(row, uncorrected_s=step.seconds)
    of_kind = question.record.of(cost_class(one.strategy))
    step = step.times(of_kind.factor)
    total_s = step.seconds * question.steps
    price = cluster.price * machines.hosts * total_s / 3600 if cluster.price else None
    row = replace(row, predicted=step, error=of_kind.error, total_s=total_s, price=price)
    over = _over_budget(question.limits, row)
    return replace(row, reason=over, is_open=False) if over and row.is_open else row


def _not_modelled(strategy: Strategy, machines: Machines) -> str:
    stays = strategy.facts.cannot_cross_hosts if machines.hosts > 1 else ""
    if stays:
        return f"one host only: {stays}"
    rounds = strategy.facts.counts_rounds
    return "not modelled: its runs are counted in rounds, not in batches" if rounds else "not modelled"


def _over_budget(limits: PlanLimits, row: PlanRow) -> str:
    if limits.seconds is not None and (row.total_s or 0.0) > limits.seconds:
        return f"over the budget: {format_seconds(row.total_s or 0.0)} of {format_seconds(limits.seconds)}"
    if limits.price is not None and (row.price or 0.0) > limits.price:
        return f"over the budget: {row.price:.4g} of {limits.price:.4g}"
    return ""


def _seconds(row: PlanRow) -> float:
    return row.seconds if row.seconds is not None else float("inf")


def _slower(best: PlanRow, row: PlanRow, several: bool) -> str:
    """By how much, and where most of the difference is; or that nobody can tell before both are tried."""
    assert best.predicted is not None
    assert row.predicted is not None
    theirs, ours = row.predicted, best.predicted
    times = theirs.seconds / ours.seconds
    parts = {name: theirs.parts[name] - ours.parts[name] for name in theirs.parts}
    most = max(parts, key=lambda name: parts[name])
    if times * (1 - row.error) < 1 + best.error:
        return f"{times:.2f} times the time, within the error of the first"
    on = f" on {row.workers} workers" if several and row.workers != best.workers else ""
    return f"{times:.2f} times the time{on}, most of it {most}"


def _nothing_left(question: Question, rows: Sequence[PlanRow]) -> str:
    """The nearest of the plans that were ruled out: the cheapest, the one that needs least memory, or the fastest."""
    nearest = {
        "over the budget": lambda row: row.price or row.total_s or 0.0,
        _DOES_NOT_FIT: lambda row: float(row.memory),
        "ruled out": _seconds,
    }
    for reason, key in nearest.items():
        left = [row for row in rows if row.reason.startswith(reason)]
        if left:
            row = min(left, key=key)
            must = ",".join(map(str, question.must)) or "none"
            return f"plan: no plan keeps must={must} and fits; the nearest is {row.strategy}: {row.reason}"
    reasons = "; ".join(f"{row.strategy}: {row.reason}" for row in rows[:3])
    return f"plan: no strategy can train this task so; the reasons: {reasons}"


# What would have to change for another plan to win: found by planning again with faster and slower links and workers.

_FACTORS = tuple(2.0**power for power in range(-6, 7) if power)
_HALVINGS = 8


def _sensitivities(question: Question, open_ones: Sequence[_Candidate], best: PlanRow) -> Iterable[str]:
    cluster = question.cluster
    of_best = question.machines(best.workers)
    kinds: dict[str, Callable[[float], DescribedCluster]] = {
        "workers": lambda factor: replace(cluster, speed=cluster.speed * factor)
    }
    if not cluster.measured:
        kinds["links"] = lambda factor: _with_links(cluster, factor)
    for name, change in kinds.items():

        def winner(factor: float, change: Callable[[float], DescribedCluster] = change) -> str:
            rows = [_row(question, one, change(factor)) for one in open_ones]
            return str(min((row for row in rows if row.is_open), key=_seconds, default=best).strategy)

        for faster in (True, False):
            flip = _flip(winner, str(best.strategy), faster=faster)
            if flip is None:
                continue
            factor, other = flip
            if name == "links" and of_best.hosts > 1:
                rate = 8 * factor * of_best.between.bytes_per_s / 1e9
                yield f"{'From' if faster else 'Below'} {rate:.3g} Gbit/s between hosts, {other} wins."
            else:
                yield f"With {name} {_how_fast(factor)}, {other} wins."


def _how_fast(factor: float) -> str:
    times = max(factor, 1 / factor)
    if times < 1.1:
        return f"{max(1, round(100 * (times - 1)))} % {'faster' if factor > 1 else 'slower'}"
    return f"{times:.2g} times {'as fast' if factor > 1 else 'slower'}"


def _with_other_hosts(question: Question, best: PlanRow) -> Iterable[str]:
    """The best on half of the hosts that are described, and on twice as many."""
    machines = question.cluster.machines
    if question.cluster.measured or machines.hosts == 1 or question.workers != (machines.workers,):
        return
    for hosts in (machines.hosts // 2, 2 * machines.hosts):
        cluster = replace(question.cluster, machines=replace(machines, hosts=hosts))
        workers = (cluster.machines.workers,)
        other = replace(question, cluster=cluster, machines_of=cluster.of_workers, workers=workers)
        row = min((one for one in predicted_rows(other) if one.is_open), key=_seconds, default=None)
        if row is not None:
            times = _seconds(row) / _seconds(best)
            yield f"On {num_of(hosts, 'host')}, {row.strategy} is the fastest: {times:.2f} times the time of a step."


def _with_other_memory(question: Question, rows: Sequence[PlanRow], best: PlanRow) -> Iterable[str]:
    """Where the memory of a worker is known: with how much more another plan wins, and with how much less."""
    if not question.cluster.memory:
        return
    larger = [row for row in rows if row.reason.startswith(_DOES_NOT_FIT) and _seconds(row) < _seconds(best)]
    if larger:
        row = min(larger, key=lambda row: row.memory)
        yield f"With {enough(row.memory)} for each worker, {row.strategy} wins."
    smaller = [row for row in rows if row.is_open and row.memory < best.memory]
    if smaller:
        row = min(smaller, key=_seconds)
        yield f"With less than {format_bytes(best.memory)} for each worker, {row.strategy} wins."


def _with_links(cluster: DescribedCluster, factor: float) -> DescribedCluster:
    def faster(link: LinkRate) -> LinkRate:
        return LinkRate(latency_s=link.latency_s / factor, bytes_per_s=link.bytes_per_s * factor)

    machines = cluster.machines
    return replace(
        cluster,
        machines=replace(
            machines,
            memory=faster(machines.memory),
            inside=faster(machines.inside),
            between=faster(machines.between),
        ),
    )


def _flip(winner: Callable[[float], str], now: str, *, faster: bool) -> tuple[float, str] | None:
    """The factor nearest to 1 at which another plan wins, and which; None where none does up to 64 times."""
    factors = [one for one in _FACTORS if (one > 1) == faster]
    before = 1.0
    for factor in factors if faster else factors[::-1]:
        other = winner(factor)
        if other != now:
            low, high = before, factor
            for _ in range(_HALVINGS):
                middle = (low * high) ** 0.5
                found = winner(middle)
                low, high, other = (middle, high, other) if found == now else (low, middle, found)
            return high, other
        before = factor
    return None
