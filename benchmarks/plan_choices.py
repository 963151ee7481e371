"""What choosing by predictions costs: the choice of one round, judged by the others, under many constraints.

The constraints were fixed before the tasks that are held out were measured under them. One that leaves a single plan is
no case, nor is one that leaves the same plans as another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from manyhands.foresight.plan.plan_search import PlanRow, worth_trying
from manyhands.strategies.auto.promised import Must
from manyhands.strategy import Strategy

__all__ = ["LIKELY", "WAYS", "choices", "regret_of"]

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


def choices(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each constraint and round: what each way of choosing takes by that round, judged by all other rounds."""
    found, left_before = [], set[frozenset[str]]()
    for name, allows in constraints(rows):
        left = [row for row in rows if allows(row)]
        texts = frozenset(row["strategy"] for row in left)
        if len(left) < 2 or texts in left_before:
            continue
        left_before.add(texts)
        found += [_chosen(name, number, left) for number in range(len(rows[0]["seen_rounds_ms"]))]
    return found


def _chosen(name: str, number: int, left: Sequence[Row]) -> dict[str, Any]:
    """The fastest as predicted, the fastest of what is worth a trial, and so on; and how far each is from the best."""
    truth = {
        row["strategy"]: statistics.median(
            took for other, took in enumerate(row["seen_rounds_ms"]) if other != number
        )
        for row in left
    }
    seen = {row["strategy"]: row["seen_rounds_ms"][number] for row in left}
    fastest = sorted(left, key=lambda row: row["predicted_rounds_ms"][number])
    plans = [PlanRow(strategy=Strategy.parse(row["strategy"]), workers=row["workers"]) for row in fastest]
    taken = {
        "predicted": fastest[0]["strategy"],
        "tried": min((str(plan.strategy) for plan in worth_trying(plans, LIKELY)), key=seen.__getitem__),
        "all_tried": min(seen, key=seen.__getitem__),
        **{rule: rule if rule in truth else None for rule in ("mirrored", "single")},
    }
    best = min(truth, key=truth.__getitem__)
    regret = {
        way: None if text is None else round(truth[text] / truth[best] - 1, 4) for way, text in taken.items()
    }
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
