"""One child process as its launcher sees it: its phase, its status, and what is wrong with it. Does no I/O.

A member goes from STARTING over RUNNING and REPORTED to GONE, or directly to GONE from any phase.
`watch_core.Watch` (the first failure ends the run) and `roster.Roster` (members come and go) decide what follows
for the other members.

Missed heartbeats count only while the launcher runs: if it was itself paused, no member is blamed for that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from manyhands.errors import UserError
from manyhands.places.local.control import Failed, Finished, Message
from manyhands.places.local.failure import describe_exit, describe_status
from manyhands.places.local.sentinel import HEARTBEAT_S
from manyhands.places.local.status import StatusRow

__all__ = [
    "TICK_S",
    "Exited",
    "Garbled",
    "Heard",
    "KillProcess",
    "Member",
    "Patience",
    "ProcessPhase",
    "watched_s",
]

TICK_S = 0.2
EXIT_S = 10.0
_LEAST_SILENCE_S = 5 * HEARTBEAT_S
_PAUSE_S = 1.0  # more than this between two looks, and the launcher itself did not run


@dataclass(frozen=True, slots=True)
class Heard:
    """A member sent a message."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Garbled:
    """A member sent something that is not a message."""

    rank: int
    problem: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A member's process ended, after everything it sent was heard."""

    rank: int
    status: int
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class KillProcess:
    """To be done: kill a member's process group."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the launcher waits for what, in seconds."""

    silent_after_s: float
    grace_s: float
    start_timeout_s: float

    def __post_init__(self) -> None:
        if not self.silent_after_s >= _LEAST_SILENCE_S:
            raise UserError(
                f"silent_after_s={self.silent_after_s:g} must be at least {_LEAST_SILENCE_S:g}: five heartbeats"
            )
        if not self.grace_s >= 0:
            raise UserError(f"grace_s={self.grace_s:g} must not be negative")
        if not self.start_timeout_s > 0:
            raise UserError(f"start_timeout_s={self.start_timeout_s:g} must be positive")


class ProcessPhase(Enum):
    """How far a member is."""

    STARTING = auto()  # spawned; its job is not loaded yet
    RUNNING = auto()  # in its job
    REPORTED = auto()  # its job returned or raised; the process is leaving
    GONE = auto()  # the process has ended


@dataclass(slots=True)
class Member:
    """What is known of one process."""

    name: str
    pid: int
    since_ns: int
    """When it entered its phase."""

    phase: ProcessPhase = ProcessPhase.STARTING
    line: StatusRow = field(default_factory=StatusRow)
    finished: Finished | None = None
    kill_at_ns: int | None = None
    """When it is killed unless it has left; None while it was not asked to leave."""

    killed_ns: int = 0
    silent_s: float = 0.0
    """How long the launcher has watched without a heartbeat from it."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def at_work(self) -> bool:
        """Whether a result is still owed."""
        return self.phase in (ProcessPhase.STARTING, ProcessPhase.RUNNING)

    def enter(self, phase: ProcessPhase, now_ns: int) -> None:
        self.phase, self.since_ns = phase, now_ns

    def look(self, line: StatusRow, seconds: float) -> None:
        """Take its current row of the status table, `seconds` of watching after the last look."""
        heartbeats = line.heartbeat_ns != self.line.heartbeat_ns
        self.silent_s = 0.0 if heartbeats or not line.heartbeat_ns else self.silent_s + seconds
        self.line = line

    def is_late(self, patience: Patience, now_ns: int) -> bool:
        """Whether its job should have begun by now."""
        return (
            self.phase is ProcessPhase.STARTING and (now_ns - self.since_ns) / 1e9 > patience.start_timeout_s
        )

    def is_silent(self, patience: Patience) -> bool:
        """Whether its heartbeats have stopped; none are expected after the report."""
        # Two ticks early: the next look may come too late.
        return self.at_work and self.silent_s > patience.silent_after_s - 2 * TICK_S

    def is_overdue(self, now_ns: int) -> bool:
        """Whether it should have left by now: it was asked to, or it has reported."""
        if self.kill_at_ns is not None and now_ns >= self.kill_at_ns:
            return True
        return self.phase is ProcessPhase.REPORTED and now_ns - self.since_ns > EXIT_S * 1e9

    def is_stuck(self, now_ns: int) -> bool:
        """Whether it was killed and still has not ended: the kernel holds it."""
        return self.killed_ns > 0 and now_ns - self.killed_ns > EXIT_S * 1e9

    def late(self, patience: Patience, now_ns: int) -> str:
        seen = describe_status(self.line, now_ns)
        return f"{self} did not start within {patience.start_timeout_s:g} s; {seen}"

    def silent(self, now_ns: int) -> str:
        seen = describe_status(self.line, now_ns)
        return f"{self} fell silent (stopped, or starved of processor time); {seen}"

    def stuck(self) -> str:
        return f"{self} did not end within {EXIT_S:g} s of being killed"

    def raised(self, report: Failed, peer_of: Callable[[int], Member | None], now_ns: int) -> str:
        """The sentence for a member whose job raised; `peer_of` finds the one it was waiting for."""
        sentence = f"{self} raised {report.error} at step {report.step}: {report.message}"
        peer = peer_of(self.line.waiting_for)
        if peer is not None:
            sentence += f" (waiting for {peer}, {describe_status(peer.line, now_ns)})"
        return sentence

    def refused(self, problem: str) -> str:
        return f"{self} broke the control channel's rules: {problem}"

    def died(self, status: int, now_ns: int) -> str:
        return f"{self} {describe_exit(status)}; {describe_status(self.line, now_ns)}"


def watched_s(looked_ns: int, now_ns: int) -> float:
    """How much of the time since the last look counts as watching."""
    return min((now_ns - looked_ns) / 1e9, _PAUSE_S)
