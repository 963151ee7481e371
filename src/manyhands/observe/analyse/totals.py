"""Totals of a run's events: computing, exchanging and waiting per worker, and by the peer waited for.

Pure: records go in, numbers come out, and the same records give the same numbers in chunks of any size (times are
summed as integer nanoseconds). The only clock is the `now_ns` that a caller passes for rates.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from manyhands.errors import UserError, check_count
from manyhands.observe.analyse.recent import BIN_NS, BINS
from manyhands.observe.analyse.slow_workers import Late, Slowness, Straggler
from manyhands.observe.record.events import NOBODY, EventKind, Records

_NS_PER_S = 1_000_000_000


class TimeSplit(NamedTuple):
    """Shares of the time a worker accounted for; they sum to 1, or are all 0 before the first event."""

    compute: float
    exchange: float
    wait: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTotals:
    """The totals of one worker so far."""

    worker: int
    steps: int
    samples: int
    compute_s: float
    exchange_s: float
    wait_s: float
    wait_for_s: tuple[float, ...]  # by peer; the remainder of wait_s was for no particular peer
    bytes_sent: int
    messages_sent: int

    @property
    def accounted_s(self) -> float:
        return self.compute_s + self.exchange_s + self.wait_s

    def split(self) -> TimeSplit:
        parts = (self.compute_s, self.exchange_s, self.wait_s)
        return TimeSplit(*(part / self.accounted_s if self.accounted_s else 0.0 for part in parts))

    def waits_mostly_for(self) -> int | None:
        longest = max(self.wait_for_s, default=0.0)
        return self.wait_for_s.index(longest) if longest > 0 else None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"wait_for_s": list(self.wait_for_s)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> WorkerTotals:
        """Read the row of a summary; unknown fields are ignored."""
        fields = {field.name: row[field.name] for field in dataclasses.fields(cls)}
        return cls(**fields | {"wait_for_s": tuple(row["wait_for_s"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsSnapshot:
    """The totals of a run at one moment, for views."""

    workers: tuple[WorkerTotals, ...]
    step: int  # global batches done, including those before a resume
    loss: float | None  # of the last step, weighted by samples
    samples_per_s: float  # recent, all workers together
    steps_per_s: float  # recent
    evaluating: bool = False  # an evaluation is in progress and training is paused
    slow: tuple[Straggler, ...] = ()  # currently slow workers, slowest first
    late: Late | None = None  # the worker that is waited for now although it computes no longer


_INTEGERS = ("bytes_sent", "messages_sent", "steps", "samples", "last_step", "last_samples")
_EVALUATION = ("evaluation_ns", "is_evaluating")  # of each worker's newest: its start, and whether it lasts
_ROW = np.dtype(
    [
        *((name, np.int64) for name in (*_INTEGERS, *_EVALUATION)),
        ("last_loss", np.float64),
        ("duration_ns", np.int64, len(EventKind) + 1),  # by kind of event
    ]
)
_NO_STEP_YET = np.zeros((), _ROW)
_NO_STEP_YET["last_step"] = -1


class Totals:
    """The totals of all events of `workers` workers, whose roles are 0 to workers − 1."""

    def __init__(self, workers: int) -> None:
        check_count("workers", workers)
        self.workers = workers
        self.rows = np.full(workers, _NO_STEP_YET, _ROW)
        self._wait_for_ns = np.zeros((workers, workers), np.int64)
        self._pace = _Pace()
        self.slowness = Slowness()

    def widen(self, workers: int) -> None:
        more = workers - self.workers
        if more > 0:
            self.rows = np.concatenate([self.rows, np.full(more, _NO_STEP_YET, _ROW)])
            self._wait_for_ns = np.pad(self._wait_for_ns, (0, more))
            self.workers = workers

    def update(self, records: Records) -> None:
        roles = records["role"].astype(np.intp)
        if len(roles) and roles.max() >= self.workers:
            raise UserError(f"role={roles.max()} is not allowed; there are workers 0 to {self.workers - 1}")
        kinds, peers = records["kind"], records["peer"]
        durations = records["duration_ns"].astype(np.int64)
        np.add.at(self.rows["duration_ns"], (roles, kinds), durations)
        waits = (kinds == EventKind.WAIT) & (peers > NOBODY) & (peers < self.workers)
        np.add.at(self._wait_for_ns, (roles[waits], peers[waits]), durations[waits])
        exchanges = kinds == EventKind.EXCHANGE
        np.add.at(self.rows["bytes_sent"], roles[exchanges], records["num_bytes"][exchanges].astype(np.int64))
        np.add.at(self.rows["messages_sent"], roles[exchanges], records["count"][exchanges])
        evaluations = kinds == EventKind.EVALUATE
        # Numpy keeps the last of several assignments to one index: each worker's newest.
        self.rows["evaluation_ns"][roles[evaluations]] = records["start_ns"][evaluations]
        self.rows["is_evaluating"][roles[evaluations]] = records["count"][evaluations] == 0
        self.slowness.add(records)
        steps = kinds == EventKind.STEP
        if steps.any():
            roles, records = roles[steps], records[steps]
            np.add.at(self.rows["steps"], roles, 1)
            np.add.at(self.rows["samples"], roles, records["count"])
            self.rows["last_step"][roles] = records["step"]
            self.rows["last_samples"][roles] = records["count"]
            self.rows["last_loss"][roles] = records["value"]
            self._pace.add(records)

    def worker(self, worker: int) -> WorkerTotals:
        row = self.rows[worker]
        duration_s = row["duration_ns"] / _NS_PER_S
        return WorkerTotals(
            worker=worker,
            steps=int(row["steps"]),
            samples=int(row["samples"]),
            compute_s=float(duration_s[EventKind.COMPUTE]),
            exchange_s=float(duration_s[EventKind.EXCHANGE]),
            wait_s=float(duration_s[EventKind.WAIT]),
            wait_for_s=tuple((self._wait_for_ns[worker] / _NS_PER_S).tolist()),
            bytes_sent=int(row["bytes_sent"]),
            messages_sent=int(row["messages_sent"]),
        )

    def snapshot(self, now_ns: int) -> TotalsSnapshot:
        began_ns = self.rows["evaluation_ns"]
        idle = began_ns >= self._pace.newest_ns  # evaluating, or nothing else has happened since
        # Report the training rate as of the start of the evaluation.
        until_ns = int(began_ns[idle].min()) if idle.any() else now_ns
        samples_per_s, steps_per_s = self._pace.rates(min(now_ns, until_ns))
        loss = None  # one, whether workers report that of their share or that of the whole batch
        shares = self.rows[self.rows["last_samples"] > 0]  # a worker without samples may report any value
        if len(shares):
            shares = shares[shares["last_step"] == shares["last_step"].max()]  # others may be steps behind
            loss = float((shares["last_loss"] * shares["last_samples"]).sum() / shares["last_samples"].sum())
        return TotalsSnapshot(
            workers=tuple(self.worker(worker) for worker in range(self.workers)),
            step=int(self.rows["last_step"].max()) + 1,
            loss=loss,
            samples_per_s=samples_per_s,
            steps_per_s=steps_per_s,
            evaluating=bool(self.rows["is_evaluating"][idle].any()),
            slow=self.slowness.now(),
            late=self.slowness.late_now(),
        )


class _Pace:
    """Recent rate of steps: samples by bin, kept for the window of recent events."""

    def __init__(self) -> None:
        self._samples_by_bin: Counter[int] = Counter()
        self._samples = 0
        self._begin_ns: int | None = None
        self.newest_ns = 1  # when the newest step ended
        self._step_range = range(0)  # the global batches seen so far

    def add(self, steps: Records) -> None:
        begin_ns = int(steps["start_ns"].min())
        first, end = int(steps["step"].min()), int(steps["step"].max()) + 1
        if self._begin_ns is not None:
            begin_ns = min(begin_ns, self._begin_ns)
            first, end = min(first, self._step_range.start), max(end, self._step_range.stop)
        self._begin_ns, self._step_range = begin_ns, range(first, end)
        self._samples += int(steps["count"].sum())

        ends = steps["start_ns"] + steps["duration_ns"]
        self.newest_ns = max(self.newest_ns, int(ends.max()))
        bins = ends // np.uint64(BIN_NS)
        for index in np.unique(bins):
            self._samples_by_bin[int(index)] += int(steps["count"][bins == index].sum())
        oldest = max(self._samples_by_bin) - BINS
        for index in [one for one in self._samples_by_bin if one <= oldest]:
            del self._samples_by_bin[index]

    def rates(self, now_ns: int) -> tuple[float, float]:
        """Return samples and steps per second over the window, or over the whole run if no step ended within it."""
        if self._begin_ns is None:
            return 0.0, 0.0
        oldest = now_ns // BIN_NS - BINS + 1
        samples = sum(count for index, count in self._samples_by_bin.items() if index >= oldest)
        begin_ns = max(self._begin_ns, oldest * BIN_NS)
        if samples == 0:
            samples, begin_ns = self._samples, self._begin_ns
        if samples == 0 or now_ns <= begin_ns:
            return 0.0, 0.0
        samples_per_s = samples * _NS_PER_S / (now_ns - begin_ns)
        return samples_per_s, samples_per_s * len(self._step_range) / self._samples
