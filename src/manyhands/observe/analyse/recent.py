"""Sums over the last five seconds of each role: the newest twenty bins of a quarter of a second.

An event counts in the bin in which it ended. The same events give the same sums in whatever portions they
arrive.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from manyhands.observe.record.events import MAX_SHOWN, NOBODY, EventKind, Records

BIN_NS = 250_000_000
BINS = 20
WINDOW_NS = BINS * BIN_NS
"""How long ago an event may have ended to be recent: what every rate and every share "now" is taken over."""

_KINDS = len(EventKind) + 1
_Counts = npt.NDArray[np.int64]


class Recent:
    """Sums over the newest bins by role; holds at most `MAX_SHOWN` roles, which may be added later."""

    def __init__(self) -> None:
        self._bin = np.full(BINS, -1, np.int64)  # the bin number that each slot holds
        self._duration_ns = np.zeros((BINS, 0, _KINDS), np.int64)
        self._events = np.zeros((BINS, 0, _KINDS), np.int64)
        self._wait_for_ns = np.zeros((BINS, 0, 0), np.int64)

    def add(self, records: Records) -> None:
        if not len(records):
            return
        bins = ((records["start_ns"] + records["duration_ns"]) // np.uint64(BIN_NS)).astype(np.int64)
        newest = max(int(bins.max()), int(self._bin.max()))
        recent = bins > newest - BINS
        peers = np.where(records["peer"] < MAX_SHOWN, records["peer"], NOBODY)
        more = 1 + int(max(records["role"].max(), peers.max())) - self._wait_for_ns.shape[1]
        if more > 0:
            self._duration_ns = np.pad(self._duration_ns, ((0, 0), (0, more), (0, 0)))
            self._events = np.pad(self._events, ((0, 0), (0, more), (0, 0)))
            self._wait_for_ns = np.pad(self._wait_for_ns, ((0, 0), (0, more), (0, more)))
        old = self._bin <= newest - BINS
        self._bin[old] = -1
        for table in (self._duration_ns, self._events, self._wait_for_ns):
            table[old] = 0
        records, peers, place = records[recent], peers[recent], bins[recent] % BINS
        self._bin[place] = bins[recent]
        roles = records["role"].astype(np.intp)
        durations = records["duration_ns"].astype(np.int64)
        np.add.at(self._duration_ns, (place, roles, records["kind"]), durations)
        np.add.at(self._events, (place, roles, records["kind"]), 1)
        waits = (records["kind"] == EventKind.WAIT) & (peers > NOBODY)
        np.add.at(self._wait_for_ns, (place[waits], roles[waits], peers[waits]), durations[waits])

    def sums(self, now_ns: int) -> tuple[_Counts, _Counts, _Counts]:
        """Return, as of `now_ns`, durations and numbers of events by role and kind, and waits by role and peer."""
        chosen = self._bin > now_ns // BIN_NS - BINS
        durations, events, waits = (
            np.asarray(table[chosen].sum(axis=0), np.int64)
            for table in (self._duration_ns, self._events, self._wait_for_ns)
        )
        return durations, events, waits


SHOWN = {EventKind.JOIN: "joined", EventKind.LEAVE: "left", EventKind.FAULT: "fault"}
"""What is shown of a role in a run without membership rows, and its word."""

_MAX_KEPT = 100


class Seen:
    """First and last activity of a run and its roles, and the events lost between."""

    def __init__(self) -> None:
        self.first_ns = 0
        self.last_ns = 0
        self.first_step_ns = 0
        self.last_step_ns = 0  # end of the newest step
        self.step_ns: dict[int, int] = {}  # duration of each role's newest step
        self.last_event: dict[int, tuple[int, EventKind, int]] = {}
        self.lost: Counter[int] = Counter()
        self.shown: list[tuple[int, int, EventKind]] = []
        self._last_id: dict[int, int] = {}

    def add(self, records: Records) -> None:
        starts = records["start_ns"].astype(np.int64)
        ends = starts + records["duration_ns"].astype(np.int64)
        self.first_ns = min(self.first_ns or int(starts.min()), int(starts.min()))
        self.last_ns = max(self.last_ns, int(ends.max()))
        is_step = records["kind"] == EventKind.STEP
        if is_step.any():
            begin = int(starts[is_step].min())
            self.first_step_ns = min(self.first_step_ns or begin, begin)
            self.last_step_ns = max(self.last_step_ns, int(ends[is_step].max()))
            # Of several assignments for one role, numpy keeps the last.
            took = (ends - starts)[is_step].tolist()
            self.step_ns.update(zip(records["role"][is_step].tolist(), took, strict=True))
        for role in np.unique(records["role"]).tolist():
            own, own_ends = records[records["role"] == role], ends[records["role"] == role]
            self.last_event[role] = (int(own_ends[-1]), EventKind(int(own[-1]["kind"])), int(own[-1]["step"]))
            ids = np.concatenate([[self._last_id.get(role, -1)], own["id"].astype(np.int64)])
            gaps = np.diff(ids) - 1
            # A resumed run counts from 0 again: events lost before its first one are that event's number.
            gaps = np.where(gaps < 0, ids[1:], gaps)
            if gaps.any():
                self.lost[role] += int(gaps.sum())
            self._last_id[role] = int(ids[-1])
        for index in np.flatnonzero(np.isin(records["kind"], list(SHOWN))).tolist():
            record = records[index]
            self.shown.append((int(ends[index]), int(record["role"]), EventKind(int(record["kind"]))))
        self.shown = sorted(self.shown)[-_MAX_KEPT:]

    def has_left(self, role: int) -> bool:
        return role in self.last_event and self.last_event[role][1] is EventKind.LEAVE
