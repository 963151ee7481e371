"""Detects slow workers, and since when, while the run continues; shared by the page, the terminal and the end table.

The steps of every worker are kept as rows in bounded memory: the newest in full, older ones increasingly thinned, and
equally for all workers, so that shares of time stay correct. `pace` finds slow workers in them by compute times
alone: the exchange makes all steps equally long.

A worker may hold the others up without computing longer: it loads data, evaluates or saves. That is reported where
the others wait for it in the median step. The mean would not do: one long step of ten, often the first, is not a
pattern.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.observe.analyse.pace import SLOW_FACTOR, Pace, Slow, find_slow, slow_now
from manyhands.observe.analyse.recent import WINDOW_NS
from manyhands.observe.record.events import NOBODY, EventKind, Records

__all__ = ["Late", "Slowness", "Straggler"]

_ROW = np.dtype(
    [
        ("step", np.int64),
        ("start_ns", np.int64),
        ("compute_ns", np.int64),
        ("wait_ns", np.int64),
        ("accounted_ns", np.int64),
        ("peer", np.int64),
        ("peer_ns", np.int64),
    ]
)
_Rows = npt.NDArray[np.void]
_KINDS = np.zeros(256, np.bool_)  # indexed by the number of a kind
_KINDS[[EventKind.COMPUTE, EventKind.EXCHANGE, EventKind.WAIT]] = True
_MAX_ROWS = 4096  # per worker
_IN_FULL = 1536  # the newest of these, which are not thinned: more than 5 s of steps of 5 ms
_PORTION = _MAX_ROWS - _IN_FULL  # rows that are added between two checks whether to thin
_ENOUGH = 8  # steps per worker before a median is meaningful
_LATE_SHARE = 0.25  # share of the median step that the others must spend waiting
_NAMED_FACTOR = 1.5  # ratio of compute times above which a worker is mentioned


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A worker that computes longer per step than the others, and the cost to them."""

    worker: int
    ratio: float  # of its compute time per step to the median of the others
    since_step: int
    until_step: int | None  # None: it still is
    from_the_start: bool
    others_wait: float  # the share of their time that the others spent waiting meanwhile

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Straggler:
        """Read the row of a summary; unknown fields are ignored."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A worker that the others wait for although its compute time is no longer than theirs."""

    worker: int
    others_wait: float  # the share of their median step that the others wait for it

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Late:
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})


class Slowness:
    """The steps of all workers of a run, kept for finding slow ones; workers may be added later."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._found: tuple[Straggler, ...] | None = None

    def add(self, records: Records) -> None:
        counted = _KINDS[records["kind"]] & (records["step"] >= 0)
        if not counted.any():
            return
        self._found = None
        for role in np.unique(records["role"][counted]).tolist():
            rows = _rows_of(records, np.flatnonzero(counted & (records["role"] == role)))
            steps = self._steps.setdefault(role, _Steps())
            for begin in range(0, len(rows), _PORTION):
                steps.add(rows[begin : begin + _PORTION])
                while len(steps.rows) > _MAX_ROWS:
                    before_ns = int(steps.rows["start_ns"][-_IN_FULL])
                    for others in self._steps.values():
                        others.thin(before_ns)

    def now(self) -> tuple[Straggler, ...]:
        if self._found is None:
            self._found = self._named(slow_now(self._paces()))
        return self._found

    def late_now(self) -> Late | None:
        """Return the worker that the others wait for in their newest steps although it computes no longer."""
        newest = max((int(steps.rows["start_ns"][-1]) for steps in self._steps.values()), default=0)
        return _late({role: steps.newest(newest - WINDOW_NS) for role, steps in self._steps.items()})

    def late_ever(self) -> Late | None:
        return _late({role: steps.rows for role, steps in self._steps.items()})

    def ever(self) -> tuple[Straggler, ...]:
        return self._named(find_slow(self._paces(), None))

    def _paces(self) -> list[Pace]:
        paces = []
        for role, steps in sorted(self._steps.items()):
            rows = steps.rows[steps.rows["compute_ns"] > 0]
            if len(rows):
                compute = rows["compute_ns"].astype(np.float64)
                paces.append(Pace(role, f"worker {role}", rows["step"], rows["start_ns"], compute))
        return paces

    def _named(self, found: Iterable[Slow]) -> tuple[Straggler, ...]:
        return tuple(
            Straggler(
                worker=slow.worker,
                ratio=slow.ratio,
                since_step=slow.since_step,
                until_step=slow.until_step,
                from_the_start=slow.from_the_start,
                others_wait=self._others_wait(slow),
            )
            for slow in found
            if slow.ratio >= _NAMED_FACTOR
        )

    def _others_wait(self, slow: Slow) -> float:
        own = self._steps[slow.worker].rows
        begin_ns = int(own["start_ns"][np.flatnonzero(own["step"] == slow.since_step)[-1]])
        end_ns = np.iinfo(np.int64).max
        if slow.until_step is not None:
            end_ns = int(own["start_ns"][np.flatnonzero(own["step"] == slow.until_step)[-1]])
        waited = accounted = 0
        for role, steps in self._steps.items():
            starts = steps.rows["start_ns"]
            if role != slow.worker:
                meanwhile = steps.rows[(starts >= begin_ns) & (starts <= end_ns)]
                waited += int(meanwhile["wait_ns"].sum())
                accounted += int(meanwhile["accounted_ns"].sum())
        return waited / accounted if accounted else 0.0


class _Steps:
    """The steps of one worker."""

    def __init__(self) -> None:
        self.rows: _Rows = np.zeros(0, _ROW)

    def add(self, rows: _Rows) -> None:
        if len(self.rows) and self.rows["step"][-1] == rows["step"][0]:  # more of the step that was newest
            for name in ("compute_ns", "wait_ns", "accounted_ns"):
                self.rows[name][-1] += rows[name][0]
            if rows["peer_ns"][0] > self.rows["peer_ns"][-1]:
                for name in ("peer", "peer_ns"):
                    self.rows[name][-1] = rows[name][0]
            rows = rows[1:]
        self.rows = np.concatenate([self.rows, rows])

    def newest(self, since_ns: int) -> _Rows:
        """Return the steps that began since then, up to the number needed."""
        begin = int(np.searchsorted(self.rows["start_ns"], since_ns))
        return self.rows[max(0, min(begin, len(self.rows) - _ENOUGH)) :]

    def thin(self, before_ns: int) -> None:
        keep = np.flatnonzero(self.rows["start_ns"] < before_ns)[::2]
        self.rows = np.concatenate([self.rows[keep], self.rows[self.rows["start_ns"] >= before_ns]])


def _rows_of(records: Records, chosen: npt.NDArray[np.intp]) -> _Rows:
    """Merge consecutive records of one worker and one step into one row."""
    steps, kinds = records["step"][chosen], records["kind"][chosen]
    durations = records["duration_ns"][chosen].astype(np.int64)
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    rows = np.zeros(len(begins), _ROW)
    rows["step"] = steps[begins]
    rows["start_ns"] = np.minimum.reduceat(records["start_ns"][chosen].astype(np.int64), begins)
    for name, kind in (("compute_ns", EventKind.COMPUTE), ("wait_ns", EventKind.WAIT)):
        rows[name] = np.add.reduceat(np.where(kinds == kind, durations, 0), begins)
    rows["accounted_ns"] = np.add.reduceat(durations, begins)
    waits = np.where(kinds == EventKind.WAIT, durations, 0)
    peers = records["peer"][chosen]
    owner = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(waits)))
    longest = np.lexsort((waits, owner))[np.append(begins[1:], len(waits)) - 1]
    rows["peer"], rows["peer_ns"] = np.where(waits[longest] > 0, peers[longest], NOBODY), waits[longest]
    return rows


def _late(rows: Mapping[int, _Rows]) -> Late | None:
    """Decide by medians over at least `_ENOUGH` steps each; None also where the worker waited for computes longer."""
    rows = {role: own for role, own in rows.items() if len(own) >= _ENOUGH}
    if len(rows) < 2:
        return None
    awaited = dict.fromkeys(rows, 0.0)
    for role, own in rows.items():
        peers, counts = np.unique(own["peer"], return_counts=True)
        peer = int(peers[counts.argmax()])  # any other peer has a median share of 0
        if peer in awaited and peer != role:
            shares = np.where(own["peer"] == peer, own["peer_ns"] / np.maximum(1, own["accounted_ns"]), 0.0)
            awaited[peer] += float(np.median(shares)) / (len(rows) - 1)
    *_, (second, _), (share, worker) = sorted((share, role) for role, share in awaited.items())
    own_ns, *others_ns = (
        float(np.median(rows[role]["compute_ns"])) for role in sorted(rows, key=lambda role: role != worker)
    )
    is_alone = share >= _LATE_SHARE and share >= 2 * second
    is_busy_elsewhere = 0 < own_ns <= SLOW_FACTOR * float(np.median(others_ns))
    return Late(worker=worker, others_wait=share) if is_alone and is_busy_elsewhere else None
