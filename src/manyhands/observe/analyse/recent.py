"""Sums over the last five seconds of each role: the newest twenty bins of a quarter of a second.

An event counts in the bin in which it ended. The same events give the same sums in whatever portions they
arrive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.observe.record.events import MAX_SHOWN, NOBODY, EventKind, Records

__all__ = ["BINS", "BIN_NS", "WINDOW_NS", "Recent"]

BIN_NS = 250_000_000
BINS = 20
WINDOW_NS = BINS * BIN_NS
"""How long ago an event may have ended to be recent: what every rate and every share "now" is taken over."""

_KINDS = len(EventKind) + 1
_Counts = npt.NDArray[np.int64]


class Recent:
    """Sums over the newest bins by role; holds at most `MAX_SHOWN` roles, which may be added later."""

    def __init__(self) -> None:
        self._roles = 0
        self._bin = np.full(BINS, -1, np.int64)  # the bin number that each slot holds
        self._duration_ns = np.zeros((BINS, 0, _KINDS), np.int64)
        self._events = np.zeros((BINS, 0, _KINDS), np.int64)
        self._wait_for_ns = np.zeros((BINS, 0, 0), np.int64)

    def add(self, records: Records) -> None:
        """Add events of any roles."""
        if not len(records):
            return
        bins = ((records["start_ns"] + records["duration_ns"]) // np.uint64(BIN_NS)).astype(np.int64)
        newest = max(int(bins.max()), int(self._bin.max()))
        recent = bins > newest - BINS
        peers = np.where(records["peer"] < MAX_SHOWN, records["peer"], NOBODY)
        self._widen(1 + int(max(records["role"].max(), peers.max())))
        self._forget(newest)
        records, peers, place = records[recent], peers[recent], bins[recent] % BINS
        self._bin[place] = bins[recent]
        roles = records["role"].astype(np.intp)
        durations = records["duration_ns"].astype(np.int64)
        np.add.at(self._duration_ns, (place, roles, records["kind"]), durations)
        np.add.at(self._events, (place, roles, records["kind"]), 1)
        waits = (records["kind"] == EventKind.WAIT) & (peers > NOBODY)
        np.add.at(self._wait_for_ns, (place[waits], roles[waits], peers[waits]), durations[waits])

    def durations_ns(self, now_ns: int) -> _Counts:
        """Return durations by role and kind, as of `now_ns`."""
        return self._sum(self._duration_ns, now_ns)

    def events(self, now_ns: int) -> _Counts:
        """Return the number of events by role and kind."""
        return self._sum(self._events, now_ns)

    def wait_for_ns(self, now_ns: int) -> _Counts:
        """Return waiting times by role and by the role waited for."""
        return self._sum(self._wait_for_ns, now_ns)

    def _sum(self, table: _Counts, now_ns: int) -> _Counts:
        total: Any = table[self._bin > now_ns // BIN_NS - BINS].sum(axis=0)
        return np.asarray(total, np.int64)

    def _forget(self, newest: int) -> None:
        old = self._bin <= newest - BINS
        self._bin[old] = -1
        for table in (self._duration_ns, self._events, self._wait_for_ns):
            table[old] = 0

    def _widen(self, roles: int) -> None:
        more = roles - self._roles
        if more > 0:
            self._duration_ns = np.pad(self._duration_ns, ((0, 0), (0, more), (0, 0)))
            self._events = np.pad(self._events, ((0, 0), (0, more), (0, 0)))
            self._wait_for_ns = np.pad(self._wait_for_ns, ((0, 0), (0, more), (0, more)))
            self._roles = roles
