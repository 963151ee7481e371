"""What choosing by predictions costs: the choice of each round under many constraints, held against what was seen.

A choice by trials is judged by the other rounds, as a plan that was lucky in its trial would be lucky in its judgement;
a choice that saw no trial is judged by all of them. The constraints were fixed before the tasks that are held out were
measured under them. One that leaves a single plan is no case, nor is one that leaves the same plans as another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from manyhands.foresight.plan.plan_search import PlanRow, worth_trying
from manyhands.strategies.auto.promised import Must
from manyhands.strategy import Strategy

__all__ = ["LIKELY", "WAYS", "again", "choices", "regret_of"]

NEAR = 1.25  # times as long as the fastest of a constraint: such a plan is run in every round
LIKELY = 3  # plans that `--verify 3` tries
WAYS = ("predicted", "tried", "all_tried", "mirrored", "single")  # to choose
PROMISES = ("equal", "sync", "survives=1", "none")
MEMORY = (0.7, 0.5, 0.35)  # of what a worker of `mirrored` needs
SPLIT = ("sharded", "pipeline", "tensor")  # of whose workers none has the whole model in use

Row = dict[str, Any]


def constraints(rows: Sequence[Row]) -> Iterator[tuple[str, Callable[[Row], bool]]]:
    """What a choice is limited to: promises, the memory of a worker, and the strategies that are asked for."""
    whole = next(row["memory"] for row in rows if row["strategy"] == "mirrored")

    def keeping(promise: str) -> Callable[[Row], bool]:
        return lambda row: (
            not any(
                must.lacking(Strategy.parse(row["strategy"]), row["workers"]) for must in Must.parse(promise)
            )
        )

    def kept_and(promise: str, allowed: Callable[[Row], bool]) -> Callable[[Row], bool]:
        keeps = keeping(promise)
        return lambda row: allowed(row) and keeps(row)

    for promise in PROMISES:
        yield promise, keeping(promise)
    for promise in ("equal", "none"):
        yield f"{promise}, several workers", kept_and(promise, lambda row: row["workers"] > 1)
        yield f"{promise}, no servers", kept_and(promise, lambda row: _word(row) != "ps")
        yield f"{promise}, a part of the model each", kept_and(promise, lambda row: _word(row) in SPLIT)
    for share, promise in product(MEMORY, ("equal", "none")):
        most = share * whole
        fits = kept_and(promise, lambda row, most=most: row["memory"] <= most)
        yield f"{promise}, {share:.0%} of the memory", fits
    for word, promise in product(dict.fromkeys(map(_word, rows)), ("equal", "none")):
        yield f"{promise}, {word}", kept_and(promise, lambda row, word=word: _word(row) == word)
    yield "ps consistency=async", lambda row: "consistency=async" in row["strategy"]


def _word(row: Row) -> str:
    word: str = Strategy.parse(row["strategy"]).word
    return word


def _cases(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Each constraint with the plans it leaves, where these are several and not those of an earlier one."""
    before = set[frozenset[str]]()
    for name, allows in constraints(rows):
        left = [row for row in rows if allows(row)]
        texts = frozenset(row["strategy"] for row in left)
        if len(left) > 1 and texts not in before:
            before.add(texts)
            yield name, left


def again(rows: Sequence[Row], first: Mapping[str, float]) -> list[str]:
    """The plans that run in every round: by the first round near the best of a case, or `predicted` to be it now."""
    found = {row["strategy"] for row in rows if row["strategy"] in ("mirrored", "single")}
    for _, left in _cases(rows):
        best = min(first[row["strategy"]] for row in left)
        found |= {row["strategy"] for row in left if first[row["strategy"]] <= NEAR * best}
        found.add(min(left, key=lambda row: row["predicted"])["strategy"])
    return [row["strategy"] for row in rows if row["strategy"] in found]


def choices(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each case and round: what each way of choosing takes by that round, and how far that is from the best."""
    rounds = range(len(rows[0]["seen_rounds_ms"]))
    return [_chosen(name, number, left) for name, left in _cases(rows) for number in rounds]


def _truth(row: Row, without: int | None = None) -> float:
    """Seen in the other rounds; in any if it ran in no other, since it was far from the best then."""
    seen = {number: took for number, took in enumerate(row["seen_rounds_ms"]) if took is not None}
    others = [took for number, took in seen.items() if number != without]
    return statistics.median(others or seen.values())


def _chosen(name: str, number: int, left: Sequence[Row]) -> dict[str, Any]:
    """The fastest as predicted, the fastest of what is worth a trial, and so on; and how far each is from the best."""
    by_all = {row["strategy"]: _truth(row) for row in left}
    by_others = {row["strategy"]: _truth(row, number) for row in left}
    seen = {row["strategy"]: row["seen_rounds_ms"][number] or by_others[row["strategy"]] for row in left}
    fastest = sorted(left, key=lambda row: row["predicted_rounds_ms"][number])
    plans = [PlanRow(strategy=Strategy.parse(row["strategy"]), workers=row["workers"]) for row in fastest]
    taken = {
        "predicted": fastest[0]["strategy"],
        "tried": min((str(plan.strategy) for plan in worth_trying(plans, LIKELY)), key=seen.__getitem__),
        "all_tried": min(seen, key=seen.__getitem__),
        **{rule: rule if rule in seen else None for rule in ("mirrored", "single")},
    }
    regret = {}
    for way, text in taken.items():
        truth = by_others if way in ("tried", "all_tried") else by_all
        regret[way] = None if text is None else round(truth[text] / min(truth.values()) - 1, 4)
    best = min(by_all, key=by_all.__getitem__)
    return {
        "constraint": name, "round": number, "plans": len(left), "best": best, "taken": taken, "regret": regret
    }  # fmt: skip


def regret_of(picks: Sequence[dict[str, Any]], way: str, noise: float) -> dict[str, float]:
    """How often a way of choosing is within 5 % of the best, or as near as a plan is to itself; and its worst."""
    # Where a rule's strategy is not allowed it has no choice at all: that case counts against it.
    found = [math.inf if (regret := one["regret"][way]) is None else regret for one in picks]
    return {
        "within_5_percent": statistics.mean(one <= 0.05 for one in found),
        "within_noise": statistics.mean(one <= max(0.05, noise) for one in found),
        "worst": max((one for one in found if one < math.inf), default=math.inf),
    }
