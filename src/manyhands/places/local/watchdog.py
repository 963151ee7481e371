"""The watchdog: monitors the roles of a launcher, and asks them for their stacks when none makes progress.

`hang` decides what counts as progress and which role is to blame; here are the clock, /proc and the signals. While
the status table and the event rings change, nothing else is read. When they have not changed for a quarter of the
deadline, the processor time of every role that does not wait is read, too. Shortly before the deadline every role
is asked for its stacks, twice, and a stack that has changed between the two is progress.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.places.local.children import Children
from manyhands.places.local.hang import Being, Found, SeenRole, Stall, details, headline, is_busy, judge, page
from manyhands.places.local.host import check_watchdog_s
from manyhands.places.local.roster import Member, ProcessPhase
from manyhands.places.local.stacks import main_stack, split_threads
from manyhands.places.local.status import NOBODY

__all__ = ["Watchdog", "Watched"]

_NUM_EVENTS = 50
_ASK_BEFORE_S = 1.0
_BETWEEN_LOOKS_S = 0.5
_ANSWER_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """For how long no role may make progress, and where the events of the roles are."""

    deadline_s: float
    """In seconds; 0 disables the watchdog."""
    count_events: Callable[[], Sequence[int]] = tuple
    """How many events each role has recorded: one more is progress."""
    last_events: Callable[[int, int], Sequence[str]] = lambda _role, _count: ()
    """The last events of a role in words: its number, and how many at most."""

    def __post_init__(self) -> None:
        check_watchdog_s(self.deadline_s)


class Watchdog:
    """Looks at roles by `look`, several times a second; the roles are numbered as they are on each other's signs."""

    def __init__(self, watched: Watched, now_ns: int) -> None:
        self._watched = watched
        self._stall = Stall(watched.deadline_s - _ASK_BEFORE_S, now_ns)
        self._stacks_ns = 0  # when stacks were last requested, 0 while none are
        self._first_stacks: dict[int, str] | None = None  # of the first of two requests
        self._spent: dict[int, float] = {}
        self._measured_ns = now_ns

    def look(self, roles: Mapping[int, Member], children: Children, now_ns: int) -> Found | None:
        """The hang, if the deadline has passed; `roles` are those of `children`, by number."""
        if not self._watched.deadline_s or not any(role.at_work for role in roles.values()):
            return None
        # What is progress if it changes: neither a heartbeat nor a wait is.
        shown = tuple(
            (number, role.phase, role.row.marked_ns, role.row.step, role.row.state)
            for number, role in roles.items()
        )
        self._stall.look((shown, tuple(self._watched.count_events())), now_ns)
        if not self._stall.is_suspicious:
            self._stacks_ns, self._spent, self._measured_ns = 0, {}, now_ns
            return None
        # Writing its stacks is work as well, so no role is measured meanwhile.
        if not self._stacks_ns and self._is_someone_busy(roles, now_ns):
            self._stall.found_at_work()
            return None
        return self._inquire(roles, children, now_ns) if self._stall.is_over else None

    def _is_someone_busy(self, roles: Mapping[int, Member], now_ns: int) -> bool:
        """Whether one that waits for nobody has used its processor since the last measurement."""
        elapsed_s = (now_ns - self._measured_ns) / 1e9
        if self._spent and elapsed_s < self._watched.deadline_s / 10:
            return False
        at_work = (number for number, role in roles.items() if role.at_work)
        spent = {
            number: _spent_s(roles[number].pid)
            for number in at_work
            if roles[number].row.waiting_for == NOBODY
        }
        before, self._spent, self._measured_ns = self._spent, spent, now_ns
        return any(is_busy(now_s - before[n], elapsed_s) for n, now_s in spent.items() if n in before)

    def _inquire(self, roles: Mapping[int, Member], children: Children, now_ns: int) -> Found | None:
        """Request all stacks twice; a role whose stack has changed between the two is at work."""
        first, since_s = self._first_stacks, (now_ns - self._stacks_ns) / 1e9
        if not self._stacks_ns or (first is None and since_s >= _BETWEEN_LOOKS_S):
            # Nothing is read before the first request.
            stacks = {number: children.read_stacks(number) for number in roles}
            self._first_stacks, self._stacks_ns = stacks if self._stacks_ns else None, now_ns
            for number, role in roles.items():
                if (
                    role.phase is ProcessPhase.RUNNING
                ):  # before that, the signal would kill it: it has no handler
                    children.ask_for_stacks(number)
            return None
        if first is None or since_s < _ANSWER_S:
            return None
        self._stacks_ns, self._first_stacks = 0, None
        return self._conclude(roles, children, first, now_ns)

    def _conclude(
        self, roles: Mapping[int, Member], children: Children, first: Mapping[int, str], now_ns: int
    ) -> Found | None:
        dumps = {number: children.read_stacks(number) for number in roles}
        moved = any(
            main_stack(dumps[number]) != main_stack(first.get(number, ""))
            for number, role in roles.items()
            if role.row.waiting_for == NOBODY
        )
        seen = {
            number: SeenRole(
                name=role.name,
                pid=role.pid,
                row=role.row,
                being=_being(role),
                stack=main_stack(dumps[number]),
                other_threads=tuple(split_threads(dumps[number])[:-1]),
                events=tuple(self._watched.last_events(number, _NUM_EVENTS)),
            )
            for number, role in roles.items()
        }
        verdict = None if moved else judge(seen)
        if verdict is None:
            self._stall.found_at_work()
            return None
        idle_s = self._stall.idle_s
        return Found(
            role=verdict.culprits[0],
            sentence=headline(seen, verdict, idle_s),
            page=page(seen, verdict, idle_s, now_ns),
            details=details(seen),
        )


def _being(role: Member) -> Being:
    if role.phase in (ProcessPhase.REPORTED, ProcessPhase.GONE):
        return Being.LEFT
    if role.phase is ProcessPhase.STARTING:
        return Being.STARTING
    return Being.STOPPED if _proc_fields(role.pid)[:1] in (["T"], ["t"]) else Being.RUNNING


def _proc_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the name, which may hold anything; empty for one who is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _spent_s(pid: int) -> float:
    """Seconds that a process and its children have computed, or waited for a disk in units of its traffic."""
    fields = _proc_fields(pid)
    ticks = sum(map(int, fields[11:15])) if fields else 0
    return ticks / _TICKS_PER_S + _moved_s(pid) + sum(map(_spent_s, _children(pid)))


_DISK_BYTES_PER_S = 200e3  # a process that reads or writes files is at work, whatever its processor time


def _moved_s(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0.0
    counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    return (counts.get("rchar", 0) + counts.get("wchar", 0) + counts.get("read_bytes", 0)) / _DISK_BYTES_PER_S


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
