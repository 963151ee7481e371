"""Which role holds a run up. Does no I/O: the status of every role in, the verdict and a page for the user out.

A waiting role shows which role it waits for (`native.wait_sign`). So the roles form a graph in which every waiting
role has one edge, and a path along the edges ends in one of four ways:

    a role that waits for nobody      it is stuck in its own code: the culprit
    a role that is stopped            SIGSTOP or a debugger holds it: the culprit
    a role that has finished or left  the others wait for what will never come
    a cycle                           everyone on it waits for the next

`Stall` is over when no role has made progress for the deadline; progress is a new mark in the status table, a new
event, or processor time used by a role that does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum, auto
from pathlib import PurePath
from typing import NamedTuple

from manyhands.places.local.roster import watched_s
from manyhands.places.local.stacks import Frame, call_of
from manyhands.places.local.status import NOBODY, State, StatusRow

__all__ = ["Being", "Found", "SeenRole", "Stall", "details", "headline", "is_busy", "judge", "page"]

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
    stack: tuple[Frame, ...] = ()
    """Of its main thread, the innermost call first; empty where it could not be had."""
    other_threads: tuple[str, ...] = ()
    """The stacks of the other threads, as text."""
    events: tuple[str, ...] = ()
    """The last ones, newest last."""


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
    behind: int
    """How many wait for the first culprit, for one who waits for it, and so on."""


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
        """Whether it is worth looking at processor times."""
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
        """A role that shows nothing was seen to work."""
        self.idle_s = 0.0


def is_busy(spent_s: float, elapsed_s: float) -> bool:
    """Whether a role that used `spent_s` of processor time in `elapsed_s` is at work."""
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
    waiting = f"{others} for it{(waiters or [''])[0]}" if verdict.behind else "nobody waits for it"
    match verdict.end:
        case End.CYCLE:
            circle = " waits for ".join(roles[n].name for n in (*verdict.culprits, verdict.culprits[0]))
            return f"nobody has made progress for {idle_s:.0f} s: a cycle of waits: {circle}; {first.name} is {where}"
        case End.STOPPED:
            stopped = f"{first.name} (pid {first.pid}) is stopped (SIGSTOP, or a debugger)"
            return f"{stopped} at step {first.row.step}; {waiting}"
        case End.LEFT:
            return f"{first.name} has left after step {first.row.step}, and {waiting}"
        case End.STUCK:
            return (
                f"{first.name} holds up the run: for {idle_s:.0f} s it has been {where} at step {first.row.step}; "
                f"it waits for nobody, and {waiting}"
            )


def page(roles: Mapping[int, SeenRole], verdict: HangVerdict, idle_s: float, now_ns: int) -> str:
    """What the launcher prints: who waits for whom, and where the culprits are."""
    lines = [f"No progress for {idle_s:.1f} s. Who waits for whom:", ""]
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
    """All that is known of everyone: whole stacks of all threads, and all events that were asked for."""
    blocks = []
    for role in roles.values():
        lines = [f"── {role.name} (pid {role.pid}) ──", *_close_up(role, 10_000, 10_000)]
        for thread in role.other_threads:
            lines += ["  another thread:", *(f"  {line}" for line in thread.splitlines())]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _doing(role: SeenRole, roles: Mapping[int, SeenRole], now_ns: int) -> str:
    if role.being is Being.LEFT:
        return f"has left after step {role.row.step}"
    if role.being is Being.STARTING:
        return "starting"
    state = f"{role.row.state.name.lower()} step {role.row.step}"
    if role.row.state in (State.STARTING, State.SERVING):
        state = "not at work yet" if role.row.state is State.STARTING else "serving"
    if role.being is Being.STOPPED:
        return f"{state:<20} is stopped (SIGSTOP, or a debugger)"
    waited = role.row.waiting_for
    if waited == NOBODY:
        wait = "waits for nobody"
    else:
        since = role.row.waiting_since_ns or role.row.marked_ns
        name = roles[waited].name if waited in roles else f"role {waited}"
        wait = f"waits for {name} since {(now_ns - since) / 1e9:.1f} s"
    return f"{state:<20} {wait:<32} {call_of(role.stack)}"


def _close_up(role: SeenRole, num_frames: int, num_events: int) -> list[str]:
    """A role's stack, the user's own frames whole and the library's in one line each run, and its last events."""
    lines = []
    if role.stack:
        lines.append(f"{role.name} is here (main thread, innermost call last):")
        lines += [f"    {line}" for line in _stack_lines(role.stack)[-num_frames:]]
    else:
        lines.append(f"{role.name} gave no stack")
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
