"""What the launcher decides: a pure state machine over what its children say and do.

`handle(event, now_ns)` returns what to do; it holds no process, socket or clock. The rules:

- The first failure is the one that is told. A role that failed only because of another (`Aborted`,
  `PeerTimeout`) is told only if no other failure shows while the rest is taken down.
- At a failure the alarm is raised at once, everyone is asked to stop, and who has not left after `grace_s`
  is killed.
- A role whose heart has not beaten for `silent_after_s` has failed and is killed at once: it can not leave.
- What fails after an interruption is not told: it is part of the taking down.
- A role that has reported gets `EXIT_S` to leave, then it is killed; its result stands.
- Silence counts while the launcher watches: if it was itself paused, nobody is blamed for that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from manyhands.cluster.board import Line
from manyhands.cluster.control import Failed, Finished, Message, Note, Started, Stop
from manyhands.cluster.failure import Failure, describe_exit, describe_line
from manyhands.errors import ManyhandsError

__all__ = [
    "EXIT_S",
    "TICK_S",
    "Action",
    "Alarm",
    "AskToStop",
    "Deliver",
    "Event",
    "Exited",
    "Garbled",
    "Heard",
    "Interrupted",
    "Kill",
    "Looked",
    "Patience",
    "Watch",
]

TICK_S = 0.2
EXIT_S = 10.0
_PAUSE_S = 1.0  # more than this between two looks, and the launcher itself did not run


@dataclass(frozen=True, slots=True)
class Looked:
    """The board, as it is now; the first event of every turn."""

    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Heard:
    """A role sent a message."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Garbled:
    """A role sent something that is no message."""

    rank: int
    problem: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A role's process ended, after everything it sent was heard."""

    rank: int
    status: int
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user (or the launcher's own trouble) wants everything to end; if that has begun, then at once."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a role's note to the application."""

    rank: int
    note: Note


@dataclass(frozen=True, slots=True)
class Alarm:
    """Tell the application that a role failed, so that nobody waits for it any longer."""

    rank: int


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Send a role the request to leave."""

    rank: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a role's process group."""

    rank: int


Event = Looked | Heard | Garbled | Exited | Interrupted
Action = Deliver | Alarm | AskToStop | Kill


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the launcher waits for what, in seconds."""

    silent_after_s: float
    grace_s: float
    start_timeout_s: float


class _Phase(Enum):
    STARTING = auto()  # spawned; its job is not loaded yet
    RUNNING = auto()  # in its job
    REPORTED = auto()  # its job returned or raised; the process is leaving
    GONE = auto()  # the process has ended


@dataclass(slots=True)
class _Role:
    name: str
    pid: int
    since_ns: int
    phase: _Phase = _Phase.STARTING
    line: Line = field(default_factory=Line)
    finished: Finished | None = None
    killed_ns: int = 0
    silent_s: float = 0.0  # how long we have watched without seeing its heart beat

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Watch:
    """The launcher's decisions for one run."""

    def __init__(self, roles: Sequence[tuple[str, int]], patience: Patience, now_ns: int) -> None:
        """Watch the just spawned `roles`, given as name and process id by rank."""
        self._roles = [_Role(name, pid, now_ns) for name, pid in roles]
        self._patience = patience
        self._failure: Failure | None = None
        self._alarmed = False
        self._interrupted = False
        self._kill_at_ns: int | None = None
        self._looked_ns = now_ns

    @property
    def over(self) -> bool:
        """Whether every process has ended."""
        return all(role.phase is _Phase.GONE for role in self._roles)

    @property
    def failure(self) -> ManyhandsError | None:
        """The first failure, as the exception to raise."""
        return self._failure.error() if self._failure is not None else None

    def results(self) -> list[Finished]:
        """What each role returned, by rank; only after a run without failure or interruption."""
        return [role.finished for role in self._roles if role.finished is not None]

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """What to do about `event`."""
        match event:
            case Looked(lines):
                return self._look(lines, now_ns)
            case Heard(rank, message):
                return self._hear(rank, message, now_ns)
            case Garbled(rank, problem):
                return self._refuse(rank, problem, now_ns)
            case Exited(rank, status, last_words):
                return self._bury(rank, status, last_words, now_ns)
            case Interrupted():
                return self._interrupt(now_ns)

    def _look(self, lines: Sequence[Line], now_ns: int) -> list[Action]:
        watched_s = min((now_ns - self._looked_ns) / 1e9, _PAUSE_S)
        self._looked_ns = now_ns
        actions: list[Action] = []
        for rank, (role, line) in enumerate(zip(self._roles, lines, strict=True)):
            beats = line.heartbeat_ns != role.line.heartbeat_ns
            role.silent_s = 0.0 if beats or not line.heartbeat_ns else role.silent_s + watched_s
            role.line = line
            if role.phase is _Phase.GONE:
                continue
            if role.killed_ns:
                self._give_up_on(rank, now_ns)
                continue
            complaint = self._complaint(role, now_ns)
            if complaint is not None:
                actions += self._fail(Failure(rank=rank, sentence=complaint), now_ns)
            if complaint is not None or self._is_overdue(role, now_ns):
                role.killed_ns = now_ns
                actions.append(Kill(rank))
        return actions

    def _give_up_on(self, rank: int, now_ns: int) -> None:
        """Wait no longer for a process that is stuck in the kernel and so can not die."""
        role = self._roles[rank]
        if now_ns - role.killed_ns > EXIT_S * 1e9:
            role.phase = _Phase.GONE
            sentence = f"{role} did not end within {EXIT_S:g} s of being killed"
            self._failure = self._failure or Failure(rank=rank, sentence=sentence)

    def _complaint(self, role: _Role, now_ns: int) -> str | None:
        """What is wrong with a role that should be at work, if anything."""
        if role.phase is _Phase.REPORTED:
            return None
        waited_s = (now_ns - role.since_ns) / 1e9
        if role.phase is _Phase.STARTING and waited_s > self._patience.start_timeout_s:
            seen = describe_line(role.line, now_ns)
            return f"{role} did not start within {self._patience.start_timeout_s:g} s; {seen}"
        if role.silent_s > self._patience.silent_after_s - 2 * TICK_S:  # the next look may come too late
            seen = describe_line(role.line, now_ns)
            return f"{role} fell silent (stopped, or starved of processor time); {seen}"
        return None

    def _is_overdue(self, role: _Role, now_ns: int) -> bool:
        if self._kill_at_ns is not None and now_ns >= self._kill_at_ns:
            return True
        return role.phase is _Phase.REPORTED and now_ns - role.since_ns > EXIT_S * 1e9

    def _hear(self, rank: int, message: Message, now_ns: int) -> list[Action]:
        role = self._roles[rank]
        match message:
            case Started():
                role.phase, role.since_ns = _Phase.RUNNING, now_ns
            case Note():
                return [Deliver(rank, message)]
            case Finished():
                role.phase, role.since_ns, role.finished = _Phase.REPORTED, now_ns, message
            case Failed():
                role.phase, role.since_ns = _Phase.REPORTED, now_ns
                sentence = f"{role} raised {message.error} at step {message.step}: {message.message}"
                if 0 <= role.line.waiting_for < len(self._roles):
                    peer = self._roles[role.line.waiting_for]
                    sentence += f" (waiting for {peer}, {describe_line(peer.line, now_ns)})"
                return self._fail(Failure(rank=rank, sentence=sentence, reported=message), now_ns)
            case Stop():
                return self._refuse(rank, "a child may not ask its launcher to stop", now_ns)
        return []

    def _refuse(self, rank: int, problem: str, now_ns: int) -> list[Action]:
        sentence = f"{self._roles[rank]} broke the control channel's rules: {problem}"
        return self._fail(Failure(rank=rank, sentence=sentence), now_ns)

    def _bury(self, rank: int, status: int, last_words: str, now_ns: int) -> list[Action]:
        role = self._roles[rank]
        left_early = role.phase in (_Phase.STARTING, _Phase.RUNNING) and not role.killed_ns
        role.phase = _Phase.GONE
        if not left_early:
            return []
        sentence = f"{role} {describe_exit(status)}; {describe_line(role.line, now_ns)}"
        return self._fail(Failure(rank=rank, sentence=sentence, last_words=last_words), now_ns)

    def _fail(self, failure: Failure, now_ns: int) -> list[Action]:
        if not self._interrupted and (self._failure is None or failure.outranks(self._failure)):
            self._failure = failure
        if self._alarmed:
            return []
        self._alarmed = True
        return [Alarm(failure.rank), *self._take_down(now_ns)]

    def _interrupt(self, now_ns: int) -> list[Action]:
        self._interrupted = True
        if self._kill_at_ns is not None:
            self._kill_at_ns = now_ns
        return self._take_down(now_ns)

    def _take_down(self, now_ns: int) -> list[Action]:
        if self._kill_at_ns is not None:
            return []
        self._kill_at_ns = now_ns + round(self._patience.grace_s * 1e9)
        return [
            AskToStop(rank)
            for rank, role in enumerate(self._roles)
            if role.phase in (_Phase.STARTING, _Phase.RUNNING)
        ]
