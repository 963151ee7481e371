"""The watchdog: monitors the roles of a launcher, and finds which of them holds up a run that makes no progress.

While the status table and the event rings change, nothing else is read. When they have not changed for a quarter of the
deadline, the processor time of every role that does not wait is read, too. Shortly before the deadline every role is
asked for its stacks, twice, and a stack that has changed between the two is progress.

A waiting role shows which role it waits for (`native.wait_sign`). So the roles form a graph in which every waiting
role has one edge, and a path along the edges ends in one of four ways:

    a role that waits for nobody      it is stuck in its own code: the culprit
    a role that is stopped            SIGSTOP or a debugger holds it: the culprit
    a role that has finished or left  the others wait for what will never come
    a cycle                           everyone on it waits for the next
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path, PurePath
from typing import NamedTuple

from manyhands.places.local.children import Children
from manyhands.places.local.host import check_watchdog_s
from manyhands.places.local.roster import Member, ProcessPhase, watched_s
from manyhands.places.local.stacks import Frame, call_of, main_stack, split_threads
from manyhands.places.local.status import NOBODY, State, StatusRow

_NUM_EVENTS = 50
_ASK_BEFORE_S = 1.0
_BETWEEN_LOOKS_S = 0.5
_ANSWER_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.05
"""Of one core: a role that uses more than this is at work. A role that waits or sleeps uses less than a thousandth."""

_PAGE_STACK, _PAGE_EVENTS, _PAGE_ROLES = 16, 10, 24


class Being(Enum):
    """What a role's process is in, as far as a hang is concerned."""

    RUNNING = auto()  # in its job
    STARTING = auto()  # its job has not begun
    STOPPED = auto()  # the kernel does not let it run: SIGSTOP, or a debugger
    LEFT = auto()  # its job has ended


class SeenRole(NamedTuple):
    """One role of a run that makes no progress."""

    name: str
    pid: int
    row: StatusRow
    being: Being = Being.RUNNING
    stack: tuple[
        Frame, ...
    ] = ()  # of its main thread, the innermost call first; empty where it could not be had
    other_threads: tuple[str, ...] = ()  # their stacks, as text
    events: tuple[str, ...] = ()  # the last ones, newest last


class End(Enum):
    """Where the arrows lead."""

    STUCK = auto()
    STOPPED = auto()
    LEFT = auto()
    CYCLE = auto()


class HangVerdict(NamedTuple):
    """Who holds the run up: `culprits` are roles by number, the one with the most behind it first; or a cycle."""

    end: End
    culprits: tuple[int, ...]
    behind: int  # how many wait for the first culprit, for one who waits for it, and so on


class Found(NamedTuple):
    """A hang: the number of the role to blame, a sentence, a page, and everything."""

    role: int
    sentence: str
    page: str
    details: str


class Stall:
    """How long nobody has made progress; time in which the launcher itself did not run does not count."""

    def __init__(self, deadline_s: float, now_ns: int) -> None:
        self._deadline_s = deadline_s
        self._looked_ns = now_ns
        self._signs: Hashable = None
        self.idle_s = 0.0

    @property
    def is_suspicious(self) -> bool:
        return self.idle_s > self._deadline_s / 4

    @property
    def is_over(self) -> bool:
        return self.idle_s >= self._deadline_s

    def look(self, signs: Hashable, now_ns: int) -> None:
        """Take what the roles show now: anything that differs from the last look is progress."""
        seconds = watched_s(self._looked_ns, now_ns)
        self._looked_ns = now_ns
        self.idle_s = self.idle_s + seconds if signs == self._signs else 0.0
        self._signs = signs

    def found_at_work(self) -> None:
        self.idle_s = 0.0


def is_busy(spent_s: float, elapsed_s: float) -> bool:
    return spent_s > _BUSY_SHARE * elapsed_s


def judge(roles: Mapping[int, SeenRole]) -> HangVerdict | None:
    """Who holds up the run; None where nobody is in its job, or none has begun to work and none waits."""
    waits = {
        number: role.row.waiting_for
        for number, role in roles.items()
        if role.being in (Being.RUNNING, Being.STOPPED) and role.row.waiting_for != NOBODY
    }
    ends = {number: _follow(number, waits) for number in roles}
    # Who waits for one that is not there any more is the launcher's to help.
    ends = {number: end for number, end in ends.items() if end[0] in roles}
    cycles = [end for end in ends.values() if len(end) > 1]
    behind = Counter(end[0] for number, end in ends.items() if len(end) == 1 and end[0] != number)
    stopped = [number for number, role in roles.items() if role.being is Being.STOPPED]
    left = [number for number, role in roles.items() if role.being is Being.LEFT and behind[number]]
    stuck = [
        number
        for number, role in roles.items()
        if number not in waits
        and role.being is Being.RUNNING
        # A script that trains by itself, or a server, is to blame only if somebody waits for it.
        and (behind[number] or role.row.state not in (State.STARTING, State.SERVING))
    ]
    waited_for = [number for number in stuck if behind[number]]
    for end, found in ((End.STOPPED, stopped), (End.STUCK, waited_for), (End.LEFT, left)):
        if found:
            return _blame(end, found, behind)
    if cycles:
        return HangVerdict(end=End.CYCLE, culprits=cycles[0], behind=len(waits) - len(cycles[0]))
    return _blame(End.STUCK, stuck, behind) if stuck else None


def _blame(end: End, found: Sequence[int], behind: Mapping[int, int]) -> HangVerdict:
    ordered = tuple(sorted(found, key=lambda number: (-behind[number], number)))
    return HangVerdict(end=end, culprits=ordered, behind=behind[ordered[0]])


def _follow(number: int, waits: Mapping[int, int]) -> tuple[int, ...]:
    """The end of the arrows from `number`: one role, or the roles of a cycle from the lowest on."""
    path: list[int] = []
    while number in waits and number not in path:
        path.append(number)
        number = waits[number]
    if number not in waits:
        return (number,)
    cycle = path[path.index(number) :]
    lowest = cycle.index(min(cycle))
    return (*cycle[lowest:], *cycle[:lowest])


def headline(roles: Mapping[int, SeenRole], verdict: HangVerdict, idle_s: float) -> str:
    first = roles[verdict.culprits[0]]
    where = call_of(first.stack)
    waiters = [
        f": {role.name} {call_of(role.stack)}"
        for role in roles.values()
        if role.being is Being.RUNNING and role.row.waiting_for == verdict.culprits[0]
    ]
    others = "1 other waits" if verdict.behind == 1 else f"{verdict.behind} others wait"
    waiting = f"{others} for it{(waiters or [''])[0]}" if verdict.behind else "no other waits for it"
    match verdict.end:
        case End.CYCLE:
            circle = " waits for ".join(roles[n].name for n in (*verdict.culprits, verdict.culprits[0]))
            return f"no progress for {idle_s:.0f} s, a cycle of waits: {circle}; {first.name} is {where}"
        case End.STOPPED:
            stopped = f"{first.name} (pid {first.pid}) is stopped (SIGSTOP, or a debugger)"
            return f"{stopped} at step {first.row.step}; {waiting}"
        case End.LEFT:
            return f"{first.name} left after step {first.row.step}, and {waiting}"
        case End.STUCK:
            return (
                f"{first.name} holds up the run: for {idle_s:.0f} s it has been {where} at step {first.row.step}; "
                f"it waits for no other, and {waiting}"
            )


def page(roles: Mapping[int, SeenRole], verdict: HangVerdict, idle_s: float, now_ns: int) -> str:
    lines = [f"No progress for {idle_s:.1f} s. Which process waits for which:", ""]
    width = max(len(role.name) for role in roles.values())
    shown = sorted(roles, key=lambda number: (number not in verdict.culprits, number))[:_PAGE_ROLES]
    for number in sorted(shown):
        role = roles[number]
        sign = ">" if number in verdict.culprits else " "
        lines.append(f"{sign} {role.name:<{width}}  {_doing(role, roles, now_ns)}")
    if len(roles) > len(shown):
        lines.append(f"  and {len(roles) - len(shown)} more")
    for number in verdict.culprits[:1]:
        lines += ["", *_close_up(roles[number], _PAGE_STACK, _PAGE_EVENTS)]
    return "\n".join(lines)


def details(roles: Mapping[int, SeenRole]) -> str:
    blocks = []
    for role in roles.values():
        lines = [f"── {role.name} (pid {role.pid}) ──", *_close_up(role, 10_000, 10_000)]
        for thread in role.other_threads:
            lines += ["  another thread:", *(f"  {line}" for line in thread.splitlines())]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _doing(role: SeenRole, roles: Mapping[int, SeenRole], now_ns: int) -> str:
    if role.being is Being.LEFT:
        return f"left after step {role.row.step}"
    if role.being is Being.STARTING:
        return "starting"
    state = f"{role.row.state.name.lower()} step {role.row.step}"
    if role.row.state in (State.STARTING, State.SERVING):
        state = "not started yet" if role.row.state is State.STARTING else "serving"
    if role.being is Being.STOPPED:
        return f"{state:<20} is stopped (SIGSTOP, or a debugger)"
    waited = role.row.waiting_for
    if waited == NOBODY:
        wait = "does not wait"
    else:
        since = role.row.waiting_since_ns or role.row.marked_ns
        name = roles[waited].name if waited in roles else f"role {waited}"
        wait = f"has waited {(now_ns - since) / 1e9:.1f} s for {name}"
    return f"{state:<20} {wait:<32} {call_of(role.stack)}"


def _close_up(role: SeenRole, num_frames: int, num_events: int) -> list[str]:
    """A role's stack, the user's own frames whole and the library's in one line each run, and its last events."""
    lines = []
    if role.stack:
        lines.append(f"{role.name} is here (main thread, innermost call last):")
        lines += [f"    {line}" for line in _stack_lines(role.stack)[-num_frames:]]
    else:
        lines.append(f"{role.name} returned no stack")
    if role.events:
        lines += [
            "",
            f"Its last events (of {len(role.events)} kept):"
            if len(role.events) > num_events
            else "Its last events:",
        ]
        lines += [f"    {event}" for event in role.events[-num_events:]]
    return lines


def _stack_lines(stack: Sequence[Frame]) -> list[str]:
    """Outermost first; library frames in a row become one line with their functions' names."""
    lines: list[str] = []
    inside: list[str] = []
    for frame in (*reversed(stack), None):
        if frame is not None and not frame.is_users:
            inside.append(f"{PurePath(frame.file).stem}.{frame.function}")
            continue
        if inside:
            shown = inside if len(inside) <= 6 else [*inside[:2], "…", *inside[-3:]]
            lines.append(f"… {' → '.join(shown)}")
            inside = []
        if frame is not None:
            lines.append(f"{frame.place} in {frame.function}:  {frame.text}".rstrip())
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """For how long no role may make progress, and where the events of the roles are."""

    deadline_s: float  # in seconds; 0 disables the watchdog
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
                if role.phase is ProcessPhase.RUNNING:  # before that it has no handler for the signal
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
    return Being.STOPPED if is_stopped(role.pid) else Being.RUNNING


def is_stopped(pid: int) -> bool:
    return _proc_fields(pid)[:1] in (["T"], ["t"])


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
