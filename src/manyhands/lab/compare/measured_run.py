"""What a run left in its directory, as the numbers that a comparison needs.

The clock stands still for evaluations, which are no part of training: what they took is taken off the times of all rows
after them. Where all workers evaluate together, or wait for the one who does, that is the time it took; where one
evaluates while the others go on, it is that worker's share of the work. Waiting for one who evaluates alone is taken
off the waiting, too.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import DataError, UserError
from manyhands.lab.compare.comparison import Trial
from manyhands.lab.compare.figures import Measured, Point
from manyhands.observe.analyse.totals import WorkerTotals
from manyhands.observe.record.checked_values import text, whole
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import RoleEvents, RunEvents, read_run_events
from manyhands.strategy import Strategy

__all__ = ["Stops", "measure"]


class Stops:
    """How long training stood still for evaluations, by the number of steps before each."""

    def __init__(self, stops: dict[int, float]) -> None:
        self._steps = np.array(sorted(stops), np.int64)
        self._until_s = np.concatenate([[0.0], np.cumsum([stops[step] for step in sorted(stops)])])

    @classmethod
    def of(cls, evaluations: dict[int, dict[int, float]], workers: int, *, together: bool) -> Stops:
        """From what each worker's evaluations took: the longest where all stop, and else the mean over all workers."""
        return cls(
            {
                step: max(took.values()) if together else sum(took.values()) / workers
                for step, took in evaluations.items()
            }
        )

    def before_s(self, step: int, *, inclusive: bool) -> float:
        """Those after fewer than `step` steps, or after `step` too."""
        place = np.searchsorted(self._steps, step, side="right" if inclusive else "left")
        return float(self._until_s[place])


def measure(trial: Trial, run: Path, strategy: Strategy, notes: tuple[str, ...] = ()) -> Measured:
    """The numbers of the run that ended in this directory; `notes` are what was said while it ran."""
    directory = RunDirectory.open(run, lock=False)
    summary = directory.read_summary()
    if summary is None:
        raise DataError(f"{run} has no summary: the run has not ended")
    events = read_run_events(directory.events_path)
    try:
        return _measured(trial, strategy, summary, events, directory.metrics.read(), notes)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        raise DataError(
            f"{run}: its summary or its history does not hold what the end of a run writes ({error!r:.200})"
        ) from error


def _measured(
    trial: Trial,
    strategy: Strategy,
    summary: dict[str, Any],
    events: RunEvents,
    rows: list[dict[str, Any]],
    notes: tuple[str, ...],
) -> Measured:
    workers = [WorkerTotals.from_dict(row) for row in summary["per_worker"]]
    evaluations = _evaluations(events)
    stops = Stops.of(evaluations, len(workers), together=strategy.facts.meets_to_evaluate)
    losses, measured = _points(rows, stops)
    idle_s = _waits_for_evaluations(events, evaluations)
    others = _sent_by_others(events)
    sent = [(one.messages_sent, one.bytes_sent) for one in workers] + others
    stale = summary.get("staleness") or summary.get("overlap") or {"mean": 0.0, "max": 0}
    return Measured(
        place=trial.place,
        repeat=trial.repeat,
        steps=_whole(summary, "steps"),
        samples=_whole(summary, "samples"),
        seconds=max((point.at_s for point in losses or measured), default=0.0),  # some tell no losses
        losses=tuple(losses),
        evaluations=tuple(sorted(measured, key=lambda point: point.step)),
        accounted_s=sum(worker.accounted_s for worker in workers) - sum(idle_s.values()),
        waited_s=sum(worker.wait_s for worker in workers) - sum(idle_s.values()),
        waited_for_s={
            peer: sum(worker.wait_for_s[peer] for worker in workers if peer < len(worker.wait_for_s))
            - idle_s.get(peer, 0.0)
            for peer in range(len(workers))
        },
        messages=sum(messages for messages, _ in sent),
        num_bytes=sum(num_bytes for _, num_bytes in sent),
        busiest_bytes=max((num_bytes for _, num_bytes in sent), default=0),
        staleness_mean=float(stale["mean"]),
        staleness_max=int(stale["max"]),
        notes=(*notes, *map(text, summary["notes"]), *events.notes),
    )


def _whole(summary: dict[str, Any], key: str) -> int:
    found = whole(summary[key])
    if found is None:
        raise ValueError(f"{key} is no whole number")
    return found


def _is_worker(role: RoleEvents) -> bool:
    return role.name.startswith("worker")


def _evaluations(events: RunEvents) -> dict[int, dict[int, float]]:
    """By the number of steps before it and by worker: the seconds that an evaluation took."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for role in filter(_is_worker, events.roles):
        for one in role.of(EventKind.EVALUATE):
            found[int(one["step"]) + 1][role.role] = int(one["duration_ns"]) / 1e9
    return found


def _waits_for_evaluations(events: RunEvents, evaluations: dict[int, dict[int, float]]) -> dict[int, float]:
    """The seconds that others waited for a worker while it evaluated alone, by that worker."""
    alone = {step: next(iter(took.items())) for step, took in evaluations.items() if len(took) == 1}
    idle_s: dict[int, float] = defaultdict(float)
    for role in filter(_is_worker, events.roles):
        for wait in role.of(EventKind.WAIT):
            evaluator, took_s = alone.get(int(wait["step"]), (None, 0.0))
            if evaluator is not None and int(wait["peer"]) == evaluator:
                idle_s[evaluator] += min(took_s, int(wait["duration_ns"]) / 1e9)
    return idle_s


def _points(rows: list[dict[str, Any]], stops: Stops) -> tuple[list[Point], list[Point]]:
    losses, evaluations = [], []
    for row in rows:
        step, at_s = row["step"], row["at_s"]
        if row.get("loss") is not None:
            at_s -= stops.before_s(step, inclusive=False)
            losses.append(Point(step=step, at_s=at_s, values={"loss": row["loss"]}))
        elif "metrics" in row:
            at_s -= stops.before_s(step, inclusive=True)
            known = {name: value for name, value in row["metrics"].items() if value is not None}
            evaluations.append(Point(step=step, at_s=at_s, values=known))
    return losses, evaluations


def _sent_by_others(events: RunEvents) -> list[tuple[int, int]]:
    """Messages and bytes that each server or helper sent; those of workers are in their own totals."""
    found = []
    for role in events.roles:
        if not _is_worker(role):
            sends = role.of(EventKind.SEND)
            found.append((int(sends["count"].sum()), int(sends["num_bytes"].sum())))
    return found
