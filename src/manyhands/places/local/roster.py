"""The decisions of a supervisor: a register of members that come and go, with the events to report. Does no I/O.

It holds no process, socket or clock. A member goes from STARTING over RUNNING and REPORTED to GONE, or directly to GONE
from any phase. Its events are Started, Said..., perhaps Silent, and Ended, once. The rules:

- The end of one member is reported and changes nothing for the others.
- A member without a heartbeat for `silent_after_s` is reported as Silent, once until the next heartbeat. It is not
  killed: whether it is given up is for those who need it to say. Missed heartbeats count only while the launcher runs:
  if it was itself paused, no member is blamed for that time.
- One that did not start in time, or that breaks the rules of the control channel, is killed.
- One that was asked to stop is killed if it has not left after `grace_s`; one that has reported, after `EXIT_S`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from manyhands.errors import UserError
from manyhands.places.local.control import Failed, Finished, Message, Note, RoleStarted, Stop
from manyhands.places.local.failure import Failure, describe_exit, describe_status
from manyhands.places.local.status import HEARTBEAT_S, StatusRow

TICK_S = 0.2
EXIT_S = 10.0
_LEAST_SILENCE_S = 5 * HEARTBEAT_S
_PAUSE_S = 1.0  # more than this between two looks, and the launcher itself did not run


class Heard(NamedTuple):
    """A member sent a message."""

    rank: int
    message: Message


class Garbled(NamedTuple):
    """A member sent something that is not a message."""

    rank: int
    problem: str


class Exited(NamedTuple):
    """A member's process ended, after everything it sent was heard."""

    rank: int
    status: int
    last_words: str = ""


class KillProcess(NamedTuple):
    """To be done: kill a member's process group."""

    rank: int


class Started(NamedTuple):
    """The member has loaded its job and enters it."""

    member: int
    pid: int


class Said(NamedTuple):
    """The member sent something; everything it sent comes before its end."""

    member: int
    payload: Mapping[str, Any]


class Silent(NamedTuple):
    """The member's process seems to be stopped; `seen` says where it was last."""

    member: int
    seen: str


class Ended(NamedTuple):
    """The member's process is gone: with what its job returned, or with what went wrong."""

    member: int
    name: str
    status: int | None
    """As in `subprocess`: negative for a signal; None if the kernel keeps the process though it was killed."""
    last_words: str  # the end of what it wrote to stderr
    payload: Mapping[str, Any] | None  # what the job returned; None if it failed
    failure: Failure | None  # what went wrong, in a sentence, with what the job reported; None if it returned


class Interrupted(NamedTuple):
    """Someone pressed Ctrl-C or sent SIGTERM to the launcher."""

    signal: signal.Signals


Event = Started | Said | Silent | Ended | Interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the launcher waits for what, in seconds."""

    silent_after_s: float
    grace_s: float
    start_timeout_s: float

    def __post_init__(self) -> None:
        if not self.silent_after_s >= _LEAST_SILENCE_S:
            raise UserError(
                f"silent_after_s={self.silent_after_s:g} must be at least {_LEAST_SILENCE_S:g}, five heartbeats"
            )
        if not self.grace_s >= 0:
            raise UserError(f"grace_s={self.grace_s:g} must be at least 0")
        if not self.start_timeout_s > 0:
            raise UserError(f"start_timeout_s={self.start_timeout_s:g} must be above 0")


class ProcessPhase(Enum):
    """How far a member is."""

    STARTING = auto()  # spawned; its job is not loaded yet
    RUNNING = auto()  # in its job
    REPORTED = auto()  # its job returned or raised; the process is leaving
    GONE = auto()  # the process has ended


@dataclass(slots=True)
class Member:
    """What is known of one process, and what to report at its end."""

    name: str
    pid: int
    since_ns: int  # when it entered its phase
    phase: ProcessPhase = ProcessPhase.STARTING
    row: StatusRow = field(default_factory=StatusRow)
    finished: Finished | None = None
    failure: Failure | None = None
    kill_at_ns: int | None = None  # when it is killed unless it has left; None: not asked to leave
    killed_ns: int = 0
    silent_s: float = 0.0  # how long the launcher has watched without a heartbeat from it
    reported_silent: bool = False

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def at_work(self) -> bool:
        """Whether a result is still to come."""
        return self.phase in (ProcessPhase.STARTING, ProcessPhase.RUNNING)

    def enter(self, phase: ProcessPhase, now_ns: int) -> None:
        self.phase, self.since_ns = phase, now_ns


class Roster:
    """The members that are there, and the decisions about them."""

    def __init__(self, patience: Patience, now_ns: int) -> None:
        self._patience = patience
        self.known: dict[int, Member] = {}  # the members that are there, by number
        self.failures: list[Failure] = []
        """Of members, in order, each as soon as it is known; without what the launcher's own kills do."""
        self._looked_ns = now_ns

    def add(self, number: int, name: str, pid: int, now_ns: int) -> Member:
        self.known[number] = member = Member(name, pid, now_ns)
        return member

    def ask_to_stop(self, number: int, now_ns: int) -> None:
        """The member is asked to leave; its grace begins, unless it has begun before."""
        member = self.known[number]
        if member.kill_at_ns is None:
            member.kill_at_ns = now_ns + round(self._patience.grace_s * 1e9)

    def kill(self, number: int, now_ns: int) -> list[KillProcess]:
        """Kill a member, once; its result or its first failure stands."""
        member = self.known[number]
        if member.killed_ns:
            return []
        member.killed_ns = now_ns
        if member.failure is None:
            seen = describe_status(member.row, now_ns)
            member.failure = Failure(rank=number, sentence=f"{member} was killed by its launcher; {seen}")
        return [KillProcess(number)]

    def look(self, rows: Mapping[int, StatusRow], now_ns: int) -> list[Event | KillProcess]:
        """What follows from the current status table; called before the events of every poll."""
        seconds = watched_s(self._looked_ns, now_ns)
        self._looked_ns = now_ns
        events: list[Event | KillProcess] = []
        for number, member in list(self.known.items()):
            row = rows[number]
            has_beaten = row.heartbeat_ns != member.row.heartbeat_ns or not row.heartbeat_ns
            member.silent_s = 0.0 if has_beaten else member.silent_s + seconds
            member.row = row
            in_phase_s = (now_ns - member.since_ns) / 1e9
            if member.killed_ns:
                if now_ns - member.killed_ns <= EXIT_S * 1e9:
                    # Again: an exception of a signal handler may have cut the first kill.
                    events.append(KillProcess(number))
                else:  # it is stuck in the kernel
                    sentence = f"{member} did not end within {EXIT_S:g} s of being killed"
                    member.failure = Failure(rank=number, sentence=sentence)
                    events.append(self._end(number, None, "", now_ns))
            elif member.phase is ProcessPhase.STARTING and in_phase_s > self._patience.start_timeout_s:
                seen = describe_status(row, now_ns)
                late = f"{member} did not start within {self._patience.start_timeout_s:g} s; {seen}"
                events += self._fail(number, late, now_ns)
            elif (member.kill_at_ns is not None and now_ns >= member.kill_at_ns) or (
                member.phase is ProcessPhase.REPORTED and in_phase_s > EXIT_S
            ):
                events += self.kill(number, now_ns)
            else:
                # Two ticks early: the next look may come too late. After the report, no heartbeat is expected.
                is_silent = member.at_work and member.silent_s > self._patience.silent_after_s - 2 * TICK_S
                if is_silent and not member.reported_silent:
                    seen = describe_status(row, now_ns)
                    stopped = f"{member} fell silent (it was stopped, or got no CPU time); {seen}"
                    events.append(Silent(number, stopped))
                member.reported_silent = is_silent
        return events

    def handle(self, event: Heard | Garbled | Exited, now_ns: int) -> list[Event | KillProcess]:
        """What follows from what a member did; nothing if it was given up before."""
        number = event.rank
        if number not in self.known:
            return []
        member = self.known[number]
        match event:
            case Heard(_, RoleStarted(pid=pid)):
                member.enter(ProcessPhase.RUNNING, now_ns)
                return [Started(number, pid)]
            case Heard(_, Note(payload=payload)):
                return [Said(number, payload)]
            case Heard(_, Finished() as finished):
                member.enter(ProcessPhase.REPORTED, now_ns)
                member.finished = finished
            case Heard(_, Failed() as reported):
                member.enter(ProcessPhase.REPORTED, now_ns)
                sentence = f"{member} raised {reported.error} at step {reported.step}: {reported.message}"
                peer = self.known.get(member.row.waiting_for)
                if peer is not None:
                    sentence += f" (waiting for {peer}, {describe_status(peer.row, now_ns)})"
                member.failure = Failure(rank=number, sentence=sentence, reported=reported)
                self.failures.append(member.failure)
            case Heard(_, Stop()) | Garbled():
                problem = event.problem if isinstance(event, Garbled) else "a child must not send Stop"
                sentence = f"{member} violated the control protocol: {problem}"
                return self._fail(number, sentence, now_ns)
            case Exited(_, status, last_words):
                return [self._end(number, status, last_words, now_ns)]
        return []

    def _fail(self, number: int, sentence: str, now_ns: int) -> list[Event | KillProcess]:
        """Kill a member for what it did; its first failure stands."""
        member = self.known[number]
        failure = Failure(rank=number, sentence=sentence)
        self.failures.append(failure)
        member.failure = member.failure or failure
        return [*self.kill(number, now_ns)]

    def _end(self, number: int, status: int | None, last_words: str, now_ns: int) -> Ended:
        member = self.known.pop(number)
        member.phase = ProcessPhase.GONE
        finished, failure = member.finished, member.failure
        if finished is None and failure is None and status is not None:
            sentence = f"{member} {describe_exit(status)}; {describe_status(member.row, now_ns)}"
            failure = Failure(rank=number, sentence=sentence, last_words=last_words)
            self.failures.append(failure)
        return Ended(
            member=number,
            name=member.name,
            status=status,
            last_words=last_words,
            payload=finished.payload if finished is not None else None,
            failure=replace(failure, name=member.name) if failure and finished is None else None,
        )


def watched_s(looked_ns: int, now_ns: int) -> float:
    """How much of the time since the last look counts as watching."""
    return min((now_ns - looked_ns) / 1e9, _PAUSE_S)
