"""First and last times seen in a run: its bounds, each role's last activity, and lost events."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from manyhands.observe.record.events import EventKind, Records

__all__ = ["TOLD", "Seen"]

TOLD = {EventKind.JOIN: "joined", EventKind.LEAVE: "left", EventKind.FAULT: "fault"}
"""What a role tells of itself that is worth keeping, and its word."""

_MAX_TOLD = 100


class Seen:
    """First and last activity of a run and its roles, and the events lost between."""

    def __init__(self) -> None:
        self.first_ns = 0
        self.last_ns = 0
        self.first_step_ns = 0
        self.last_step_ns = 0  # end of the newest step
        self._step_ns: dict[int, int] = {}  # duration of each role's newest step
        self.last_event: dict[int, tuple[int, EventKind, int]] = {}
        self.lost: Counter[int] = Counter()
        self.told: list[tuple[int, int, EventKind]] = []
        self._last_id: dict[int, int] = {}

    def add(self, records: Records) -> None:
        """Add at least one event, those of one role in recording order."""
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
            self._step_ns.update(
                zip(records["role"][is_step].tolist(), (ends - starts)[is_step].tolist(), strict=True)
            )
        for role in np.unique(records["role"]).tolist():
            self._add_role(role, records[records["role"] == role], ends[records["role"] == role])
        for index in np.flatnonzero(np.isin(records["kind"], list(TOLD))).tolist():
            record = records[index]
            self.told.append((int(ends[index]), int(record["role"]), EventKind(int(record["kind"]))))
        self.told = sorted(self.told)[-_MAX_TOLD:]

    @property
    def newest_step_ns(self) -> int:
        """Return the longest duration among the roles' newest steps."""
        return max(self._step_ns.values(), default=0)

    def has_left(self, role: int) -> bool:
        """Return whether the role's last event is its leaving."""
        return role in self.last_event and self.last_event[role][1] is EventKind.LEAVE

    def _add_role(self, role: int, records: Records, ends: Any) -> None:
        newest = records[-1]
        self.last_event[role] = (int(ends[-1]), EventKind(int(newest["kind"])), int(newest["step"]))
        ids = np.concatenate([[self._last_id.get(role, -1)], records["id"].astype(np.int64)])
        gaps = np.diff(ids) - 1
        # A resumed run counts from 0 again: events lost before its first one are that event's number.
        gaps = np.where(gaps < 0, ids[1:], gaps)
        if gaps.any():
            self.lost[role] += int(gaps.sum())
        self._last_id[role] = int(ids[-1])
