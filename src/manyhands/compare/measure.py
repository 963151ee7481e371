"""What a run left in its directory, as the numbers that a comparison needs.

Workers that evaluate together stop the clock for it: the evaluations that worker 0 recorded are taken off the times of
all rows after them. A run on parameter servers evaluates at its end alone; what its model was worth on the way is
measured afterwards, on the snapshots of its shards, which takes none of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.compare.figures import Measured, Point
from manyhands.compare.plan import Trial
from manyhands.errors import DataError
from manyhands.observe.events import EventKind
from manyhands.observe.recorded import RunEvents, read_run_events
from manyhands.observe.totals import WorkerTotals
from manyhands.store.rundir import RunDirectory

__all__ = ["Stops", "measure"]


class Stops:
    """When training stood still for evaluations, in steps and seconds, as worker 0 recorded it."""

    def __init__(self, stops: list[tuple[int, float]]) -> None:
        self._steps = np.array([step for step, _ in stops], np.int64)
        self._until_s = np.concatenate([[0.0], np.cumsum([seconds for _, seconds in stops])])

    @classmethod
    def of(cls, events: RunEvents) -> Stops:
        """Those in a run's events."""
        for role in events.roles:
            if role.role == 0:
                found = role.of(EventKind.EVALUATE)
                return cls([(int(one["step"]) + 1, int(one["duration_ns"]) / 1e9) for one in found])
        return cls([])

    @property
    def total_s(self) -> float:
        """All of them."""
        return float(self._until_s[-1])

    def before_s(self, step: int, *, inclusive: bool) -> float:
        """Those after fewer than `step` steps, or after `step` too."""
        side = "right" if inclusive else "left"
        return float(self._until_s[np.searchsorted(self._steps, step, side=side)])  # type: ignore[call-overload]


def measure(
    trial: Trial, run: Path, snapshots: Mapping[int, Mapping[str, float]], notes: tuple[str, ...]
) -> Measured:
    """The numbers of the run that ended in this directory.

    `snapshots` are metrics by the number of steps, measured after the run where it did not measure them itself.
    """
    directory = RunDirectory.open(run, lock=False)
    summary = directory.read_summary()
    if summary is None:
        raise DataError(f"{run} has no summary: the run has not ended")
    events = read_run_events(directory.events_path)
    stops = Stops.of(events)
    losses, evaluations = _points(directory.metrics.read(), stops)
    at_s = sorted(point.at_s for point in losses)
    for step, metrics in snapshots.items():
        if 0 < step <= len(at_s) and all(step != point.step for point in evaluations):
            evaluations.append(Point(step=step, at_s=at_s[step - 1], values=metrics))
    workers = [WorkerTotals.from_dict(row) for row in summary["per_worker"]]
    sent = _sent_by_servers(events)
    stale = summary.get("staleness") or summary.get("overlap") or {"mean": 0.0, "max": 0}
    return Measured(
        place=trial.place,
        repeat=trial.repeat,
        steps=summary["steps"],
        samples=summary["samples"],
        seconds=summary["seconds"] - stops.total_s,
        losses=tuple(losses),
        evaluations=tuple(sorted(evaluations, key=lambda point: point.step)),
        accounted_s=sum(worker.accounted_s for worker in workers),
        waited_s=sum(worker.wait_s for worker in workers),
        waited_for_s={
            peer: sum(worker.wait_for_s[peer] for worker in workers if peer < len(worker.wait_for_s))
            for peer in range(len(workers))
        },
        messages=sum(worker.messages_sent for worker in workers) + sent[0],
        num_bytes=sum(worker.bytes_sent for worker in workers) + sent[1],
        staleness_mean=float(stale["mean"]),
        staleness_max=int(stale["max"]),
        notes=(*notes, *summary["notes"], *events.notes),
    )


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


def _sent_by_servers(events: RunEvents) -> tuple[int, int]:
    """Messages and bytes that servers sent; those of workers are in their own totals."""
    messages = num_bytes = 0
    for role in events.roles:
        if role.name.startswith("server"):
            sends = role.of(EventKind.SEND)
            messages += int(sends["count"].sum())
            num_bytes += int(sends["num_bytes"].sum())
    return messages, num_bytes
