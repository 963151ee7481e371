"""What is wrong with a run, in plain sentences: the one place where the page, the terminal and the table get them.

A sentence names who, since when, what it costs the others and, where one fits the strategy, an advice.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from manyhands.analyse.slowness import Straggler
from manyhands.analyse.totals import WorkerTotals
from manyhands.errors import UserError
from manyhands.strategy import Strategy

__all__ = ["about_imbalance", "about_quiet", "about_workers", "planned_waits", "straggler_advice"]

_MAX_NAMED = 3
_LATE_SHARE = 0.25  # making the others spend this share of their time waiting is no accident
_MIN_STEPS = 3  # the first steps warm caches up and say nothing
_NOBODY_WAITS = 0.01
_LONGER = 1.5  # times the others' computing that explains by itself why they wait
_MOST = 2.0  # times its even share of the applying that makes a server worth a word


def straggler_advice(strategy: str) -> str:
    """What would keep a lasting straggler from holding the others up, for a strategy's text; empty where nothing would.

    A text that no strategy has gets no advice: runs of other releases are looked at, too.
    """
    try:
        return Strategy.parse(strategy).straggler_advice
    except UserError:
        return ""


def planned_waits(strategy: str) -> str:
    """What waiting belongs to a strategy, by its text; empty where none does, and for a text that no strategy has."""
    try:
        return Strategy.parse(strategy).planned_waits
    except UserError:
        return ""


def about_workers(
    workers: Sequence[WorkerTotals],
    slow: Sequence[Straggler],
    strategy: str = "",
    suspects: Collection[int] = (),
) -> list[str]:
    """Who holds the others up, the worst first: by computing longer (`slow`) or, else, in some other way.

    Of one of the `suspects`, which may just have begun to compute longer, the latter is not said.
    """
    if slow:
        return [_about_straggler(straggler, strategy) for straggler in slow[:_MAX_NAMED]]
    late = _about_late(workers, suspects)
    return [late] if late else []


def about_imbalance(applying: Sequence[tuple[str, float]]) -> list[str]:
    """A server that does far more than its share; `applying` has each server's name and share of the whole."""
    if len(applying) < 2:
        return []
    name, share = max(applying, key=lambda one: one[1])
    even = 1 / len(applying)
    if share < min(_MOST * even, (1 + even) / 2):
        return []
    return [
        f"{name} does {_percent(share)} of the applying, and {_percent(even)} would be its share: the parameters lie "
        "unevenly on the servers; more, smaller ones (servers=) spread them"
    ]


def about_quiet(seconds: float, last_seen: Sequence[tuple[str, str]]) -> str:
    """Nothing has happened; `last_seen` says of each role what it did last, the longest ago first."""
    seen = "; ".join(f"{name} was last seen {doing}" for name, doing in last_seen[:_MAX_NAMED])
    more = len(last_seen) - _MAX_NAMED
    others = f"; and {more} more" if more > 0 else ""
    return f"nothing has happened for {seconds:.0f} s, and nobody said that the run is over: {seen}{others}"


def _about_straggler(straggler: Straggler, strategy: str) -> str:
    times = f"{straggler.ratio:.1f} times slower than the median of the others"
    who = f"worker {straggler.worker}"
    waiting = straggler.others_wait >= _NOBODY_WAITS
    if straggler.until_step is not None:
        when = f"from step {straggler.since_step} to step {straggler.until_step}"
        cost = (
            f"the others waited {_percent(straggler.others_wait)} of their time"
            if waiting
            else "nobody waited"
        )
        return f"{who} was {times} {when}: {cost}"
    when = "from the start" if straggler.from_the_start else f"since step {straggler.since_step}"
    if not waiting:
        return f"{who} is {times} {when}: nobody waits for it"
    sentence = f"{who} is {times} {when}: the others wait {_percent(straggler.others_wait)} of their time"
    return "; ".join(part for part in (sentence, straggler_advice(strategy)) if part)


def _about_late(workers: Sequence[WorkerTotals], suspects: Collection[int]) -> str | None:
    """One that computes as fast as the others and is waited for all the same spends its time elsewhere.

    In a few steps nobody is slow yet; of one that computed longer in them, that is said.
    """
    workers = [worker for worker in workers if worker.steps]
    if len(workers) < 2 or min(worker.steps for worker in workers) < _MIN_STEPS:
        return None
    awaited = [_share_waited_for(workers, worker.worker) for worker in workers]
    latest = awaited.index(max(awaited))
    alone = awaited[latest] >= 2 * sorted(awaited)[-2]
    pace = [worker.compute_s / worker.steps for worker in workers]
    slowness = _ratio(pace[latest], statistics.median(pace[:latest] + pace[latest + 1 :]))
    if awaited[latest] < _LATE_SHARE or not alone or slowness == 0 or workers[latest].worker in suspects:
        return None
    said = f"the others wait {_percent(awaited[latest])} of their time for worker {workers[latest].worker}, which"
    if slowness >= _LONGER:  # in too few steps to say since when
        return f"{said} computes {slowness:.1f} times their median: it has more to do, or a slower core"
    return (
        f"{said} computes only {slowness:.1f} times their median; "
        "look at its data loading, evaluation and checkpoints"
    )


def _share_waited_for(workers: Sequence[WorkerTotals], awaited: int) -> float:
    """The share of their time that all others spent waiting for one."""
    others = [worker for worker in workers if worker.worker != awaited]
    return _ratio(
        sum(other.wait_for_s[awaited] for other in others), sum(other.accounted_s for other in others)
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
