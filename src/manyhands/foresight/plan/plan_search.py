"""Which of all plans is the fastest that fits and keeps its promises, and why the others lose; pure.

Every strategy says which of its settings are worth considering (`Strategy.choices`), what it needs, what it promises
and where the time of a step goes. Nothing is dropped silently: each plan that is not the best has its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from manyhands.errors import UserError, format_bytes, nearest
from manyhands.facts import Answer, LinkRate, Machines, PredictedStep, TaskProfile, Waits
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy

__all__ = ["MUSTS", "PlanRow", "Question", "RankedPlans", "make_plan"]


def _is_equal(strategy: Strategy) -> bool:
    return strategy.facts.promises.same_numbers.answer is Answer.YES


def _is_sync(strategy: Strategy) -> bool:
    return strategy.facts.stepwise and strategy.facts.waits_for is not Waits.NOBODY


def _survives(strategy: Strategy) -> bool:
    promises = strategy.facts.promises
    return promises.worker_dies.answer is Answer.YES and promises.server_dies.answer is not Answer.NO


MUSTS: dict[str, tuple[Callable[[Strategy], bool], str]] = {
    "equal": (_is_equal, "its weights are not those of one process"),
    "sync": (_is_sync, "its workers do not take every step together"),
    "survives": (_survives, "it ends when a process is lost"),
}
"""What a plan may have to promise, and what is said of one that does not."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned: a task on some workers, the machines, and what the plan must keep to."""

    profile_of: Callable[[int], TaskProfile]  # of a worker here, of so many on a host
    cluster: DescribedCluster
    workers: int
    refuses: Callable[[Strategy, int], str] = lambda _strategy, _workers: ""
    """The sentence that says why so many workers cannot train the task so; empty where they can."""
    must: tuple[str, ...] = ("equal",)
    strategies: tuple[str, ...] = tuple(STRATEGIES)

    def __post_init__(self) -> None:
        for name in self.must:
            if name not in MUSTS:
                raise UserError(f"must={name!r} is not a promise; {nearest(name, MUSTS)}")
        if not self.strategies:
            raise UserError("strategies is empty; name at least one, such as mirrored")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One plan: what is predicted of it, and the reason why it is not the best; empty for the best."""

    strategy: Strategy
    workers: int
    predicted: PredictedStep | None = None
    memory: int = 0  # bytes of the fullest process
    sent: float | None = None  # bytes in a step of the process that sends most, on one host; None: not known
    price: float | None = None  # of a thousand steps
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        return None if self.predicted is None else self.predicted.seconds


@dataclass(frozen=True, kw_only=True)
class RankedPlans:
    """All plans, the best first, then the slower ones, then those that are ruled out."""

    rows: tuple[PlanRow, ...]
    sensitivities: tuple[str, ...] = ()

    @property
    def best(self) -> PlanRow | None:
        return self.rows[0] if self.rows and not self.rows[0].reason else None


def make_plan(question: Question) -> RankedPlans:
    """Predict every plan, rule out what does not do, and say what would change the choice.

    UserError where nothing is left: it names the plan that comes nearest, and what it lacks.
    """
    rows = [_row(question, strategy, workers) for strategy, workers in _candidates(question)]
    left = sorted((row for row in rows if not row.reason), key=lambda row: row.seconds or 0.0)
    ruled_out = [row for row in rows if row.reason]
    if not left:
        raise UserError(_nothing_left(question, ruled_out))
    best = left[0]
    slower = [replace(row, reason=_slower(best, row)) for row in left[1:]]
    return RankedPlans(rows=(best, *slower, *ruled_out), sensitivities=tuple(_sensitivities(question, best)))


def _candidates(question: Question) -> Iterable[tuple[Strategy, int]]:
    machines = question.cluster.of_workers(question.workers)
    seen: set[str] = set()
    for text in question.strategies:
        if " " in text.strip():
            choices: Sequence[Strategy] = [Strategy.parse(text)]
        else:
            choices = STRATEGIES[Strategy.parse(text).word].load_value().choices(machines)
        for strategy in choices:
            if str(strategy) not in seen:
                seen.add(str(strategy))
                most = strategy.most_workers
                yield strategy, question.workers if most is None else min(most, question.workers)


def _row(question: Question, strategy: Strategy, workers: int) -> PlanRow:
    cluster = question.cluster
    row = PlanRow(strategy=strategy, workers=workers)
    if reason := question.refuses(strategy, workers):
        return replace(row, reason=reason)
    machines = cluster.of_workers(workers)
    profile = cluster.scaled(question.profile_of(machines.per_host))
    predicted = strategy.predict(profile, machines)
    memory = max((one.total for one in strategy.needs(profile.model, workers)), default=0)
    price = None
    if cluster.price and predicted is not None:
        price = cluster.price * machines.hosts * predicted.seconds / 3.6
    traffic = strategy.sends(profile.model, workers) if machines.hosts == 1 else None
    sent = max((one.num_bytes for one in traffic), default=0.0) if traffic is not None else None
    row = replace(row, predicted=predicted, memory=memory, price=price, sent=sent)
    lacking = [why for name in question.must for keeps, why in [MUSTS[name]] if not keeps(strategy)]
    if lacking:
        return replace(row, reason=f"ruled out: {lacking[0]}")
    if cluster.memory and memory > cluster.memory:
        return replace(
            row,
            reason=f"does not fit: {format_bytes(memory)} of {format_bytes(cluster.memory)} for each worker",
        )
    if predicted is None:
        stays = strategy.facts.cannot_cross_hosts if machines.hosts > 1 else ""
        return replace(row, reason=f"one host only: {stays}" if stays else "not modelled")
    return row


def _slower(best: PlanRow, row: PlanRow) -> str:
    """By how much, and where most of the difference is."""
    assert best.predicted is not None
    assert row.predicted is not None
    theirs, ours = _parts(row.predicted), _parts(best.predicted)
    most = max(theirs, key=lambda name: theirs[name] - ours[name])
    return f"{row.predicted.seconds / best.predicted.seconds:.2f} times the time, most of it {most}"


def _parts(step: PredictedStep) -> dict[str, float]:
    parts = {
        "computing": step.compute_s,
        "exchanging": step.exchange_s,
        "waiting for others": step.waiting_s,
        "in the optimizer": step.optimizer_s,
    }
    return {name: seconds / step.batches for name, seconds in parts.items()}


def _nothing_left(question: Question, rows: Sequence[PlanRow]) -> str:
    """Of plans that were ruled out, the nearest: the one that needs the least memory, else the fastest."""
    fitting = [row for row in rows if row.reason.startswith("does not fit")]
    ruled = [row for row in rows if row.reason.startswith("ruled out")]
    if fitting:
        nearest_row = min(fitting, key=lambda row: row.memory)
    elif ruled:
        nearest_row = min(ruled, key=lambda row: row.seconds or float("inf"))
    else:
        return "plan: no strategy can train this task so; the reasons: " + "; ".join(
            f"{row.strategy}: {row.reason}" for row in rows[:3]
        )
    must = ",".join(question.must)
    return f"plan: no plan keeps must={must} and fits; the nearest is {nearest_row.strategy}: {nearest_row.reason}"


# What would have to change for another plan to win: found by planning again with faster and slower links and workers.

_FACTORS = tuple(2.0**power for power in range(-6, 7) if power)
_HALVINGS = 12


def _sensitivities(question: Question, best: PlanRow) -> Iterable[str]:
    kinds: dict[str, Callable[[DescribedCluster, float], DescribedCluster]] = {
        "links": _with_links,
        "workers": lambda cluster, factor: replace(cluster, speed=cluster.speed * factor),
    }
    for name, change in kinds.items():
        winner = partial(_winner, question, change)
        for faster in (True, False):
            flip = _flip(winner, str(best.strategy), faster=faster)
            if flip is not None:
                factor, other = flip
                how = f"{factor:.2g} times as fast" if faster else f"{1 / factor:.2g} times slower"
                yield f"With {name} {how}, {other} wins."


def _winner(
    question: Question, change: Callable[[DescribedCluster, float], DescribedCluster], factor: float
) -> str:
    other = replace(question, cluster=change(question.cluster, factor))
    rows = [_row(other, strategy, workers) for strategy, workers in _candidates(other)]
    return str(min((row for row in rows if not row.reason), key=lambda row: row.seconds or 0.0).strategy)


def _with_links(cluster: DescribedCluster, factor: float) -> DescribedCluster:
    def faster(link: LinkRate) -> LinkRate:
        return LinkRate(latency_s=link.latency_s / factor, bytes_per_s=link.bytes_per_s * factor)

    machines = cluster.machines
    changed: Machines = replace(
        machines,
        memory=faster(machines.memory),
        inside=faster(machines.inside),
        between=faster(machines.between),
    )
    return replace(cluster, machines=changed)


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
