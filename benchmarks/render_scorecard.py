"""The tables of the scorecard: what each strategy promises beside what it did, and the measures of each."""

from __future__ import annotations

from typing import Any

from manyhands.errors import format_bytes, num_of
from manyhands.facts import Answer
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from results_read import load, markdown

KILLS = {"worker_dies": "worker killed", "server_dies": "server killed"}
PROMISED = Answer.YES, Answer.PARTLY
TOLERANCE = 1e-9  # in float64
NOT_MEASURED = "not measured"


def promises() -> str:
    """Each promise, with what the run did; ValueError for a promise without a measured cell."""
    apart = load("scorecard-numbers")["apart"]
    rows = [
        [
            "strategy",
            "a worker is killed",
            "a server is killed",
            "everything is killed",
            "workers join and leave",
            "numbers of one process",
        ]
    ]
    for name, one in _measured().items():
        faults = {row["fault"]: row for row in one["rows"]}
        cells = [_kept(name, promise, faults.get(fault)) for promise, fault in KILLS.items()]
        joins, same = _joins(name, one), _same(name, apart)
        rows.append([f"`{name}`", *cells, _cost(faults.get("all killed")), joins, same])
    return f"{_about()}\n\n{markdown(rows).replace('---:', '---')}"


def measures() -> str:
    """Convergence, bandwidth, the other faults, elasticity and ease."""
    rows = [
        [
            "strategy", "steps, seconds to it", "messages, bytes a step", "a worker stops for 8 s",
            "a worker 3× slower", "a link is cut for 8 s", "the disk is full for 2 s", "one more worker, one less",
            "lines", "processes",
        ]
    ]  # fmt: skip
    for name, one in _measured().items():
        (alone,) = one["alone"]["strategies"]
        faults = {" ".join(row["fault"].split()[:2]): row for row in one["rows"]}
        (ease,) = one["ease"].values()
        reached, unit = alone["target_s"], " rounds" * name.startswith("federated")
        has_link = "link=tcp" in name
        has_others = name != "single"
        rows.append(
            [
                f"`{name}`",
                f"{alone['target_steps']['median']:.0f}{unit}, {reached['median']:.1f} s"
                if reached
                else "not reached",
                f"{alone['messages_per_step']['median']:.3g}, {format_bytes(alone['bytes_per_step']['median'])}",
                _cost(faults.get("worker stopped")) if has_others else "–",
                _cost(faults.get("worker 3×")) if has_others else "–",
                _cost(faults.get("link cut")) if has_link else "–",
                _cost(faults.get("disk full")),
                _newcomer(one),
                "a `Task`" if ease["lines"] is None else str(ease["lines"]),
                ", ".join(num_of(count, kind) for kind, count in ease["processes"].items()),
            ]
        )
    return f"{_about()}\n\n{markdown(rows).replace('---:', '---')}"


def _measured() -> dict[str, Any]:
    """Those of which something was measured."""
    return {name: one for name, one in load("scorecard")["strategies"].items() if one.get("rows")}


def _about() -> str:
    found = load("scorecard")
    places: dict[str, list[str]] = {}
    for name, one in _measured().items():
        busy = ", which was busy" * bool(one.get("busy"))
        where = f"{one['cores']} cores of {one['machine']['cores'].split()[-1]}{busy}"
        places.setdefault(where, []).append(f"`{name}`")
    here = "; ".join(
        f"{where}: {', '.join(names)}" if place else f"2 workers on {where}, unless another is named"
        for place, (where, names) in enumerate(sorted(places.items(), key=lambda item: -len(item[1])))
    )
    missing = sorted(STRATEGIES.keys() - {name.split()[0] for name in _measured()} - {"auto"})
    without = f" Not measured yet: {', '.join(f'`{word}`' for word in missing)}." if missing else ""
    return f"**digits to {found['target'].replace('=', ' ')}; {here}**.{without}"


def _kept(name: str, promise: str, row: dict[str, Any] | None) -> str:
    """The promise's answer, and what the run did; ValueError where it was not kept, or not measured."""
    answer = getattr(Strategy.parse(name).facts.promises, promise).answer
    if answer is Answer.NONE or name == "single":
        return "–"
    if row is None and answer is Answer.NO:
        return f"no: {NOT_MEASURED}"
    if row is None or row["problem"] or row["went_on"] != (answer in PROMISED):
        raise ValueError(f"{name}: {promise}={answer.value} is not backed by a measured cell: {row}")
    return f"{answer.value}: {_cost(row)}"


def _joins(name: str, one: dict[str, Any]) -> str:
    answer = Strategy.parse(name).facts.promises.workers_join.answer
    if answer not in PROMISED:
        return answer.value
    (row,) = one["elastic"]
    if row["problem"] or row["computes_s"] is None:
        raise ValueError(f"{name}: workers_join={answer.value} is not backed by a measured cell: {row}")
    return f"{answer.value}: computes after {row['computes_s']:.1f} s"


def _same(name: str, apart: dict[str, float]) -> str:
    """How far the weights are from those of one process, in float64, relative to the largest."""
    answer = Strategy.parse(name).facts.promises.same_numbers.answer
    if answer is not Answer.YES or name == "single":
        return answer.value
    if apart[name] > TOLERANCE:
        raise ValueError(f"{name}: same_numbers=yes, and weights differ by {apart[name]}")
    return f"yes: {apart[name]:.0e}"


def _newcomer(one: dict[str, Any]) -> str:
    """Samples per second of each worker, before a join, after it, and after a leave."""
    each = next((row.get("each") for row in one["elastic"]), None)
    if not each:
        return "–"
    before, during, after = ("–" if rate is None else f"{rate:,.0f}" for rate in each)
    return f"{before}, {during}, {after} samples/s each"


def _cost(row: dict[str, Any] | None) -> str:
    if row is None:
        return NOT_MEASURED
    if row["skipped"]:
        return "skipped"
    parts = ["went on" if row["went_on"] else "resumed"]
    if row["still_s"] is not None:
        parts.append(f"{row['still_s']:.1f} s")
    if row["slower"] is not None:
        parts.append(f"{row['slower']:.1f}×")
    parts += [f"{row['repeated']} again"] * bool(row["repeated"])
    parts += [f"{row['lost']} lost"] * bool(row["lost"])
    return ", ".join(parts)
