"""The launcher's decisions: a state machine over what its children report and do. Does no I/O.

`handle(event, now_ns)` returns what to do; it holds no process, socket or clock. The rules:

- The first failure is the one that is reported. A role that failed only because of another (`Aborted`,
  `PeerTimeout`) is reported only if no other failure shows while the rest is taken down.
- At a failure the alarm is raised at once, every role is asked to stop, and one that has not left after `grace_s`
  is killed.
- A role without a heartbeat for `silent_after_s` has failed and is killed at once: it cannot leave.
- A failure after an interruption is not reported: it is part of the shutdown.
- A role that has reported gets `EXIT_S` to leave, then it is killed; its result stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.errors import ManyhandsError
from manyhands.places.local.control import Failed, Finished, Message, Note, RoleStarted, Stop
from manyhands.places.local.failure import Failure
from manyhands.places.local.hang import Found
from manyhands.places.local.member import (
    Exited,
    Garbled,
    Heard,
    KillProcess,
    Member,
    Patience,
    ProcessPhase,
    watched_s,
)
from manyhands.places.local.status import StatusRow

__all__ = [
    "AskToStop",
    "Deliver",
    "Event",
    "HangAlarm",
    "Looked",
    "Watch",
    "WatchInterrupted",
    "WatchStopWanted",
]


@dataclass(frozen=True, slots=True)
class Looked:
    """The current status table; the first event of every poll."""

    lines: Sequence[StatusRow]


@dataclass(frozen=True, slots=True)
class WatchInterrupted:
    """The user (or an error in the launcher) wants everything to end; a second one ends it at once."""


@dataclass(frozen=True, slots=True)
class WatchStopWanted:
    """The application wants the roles to come to an end by themselves: they are asked once, and nobody is killed."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a role's note to the application."""

    rank: int
    note: Note


@dataclass(frozen=True, slots=True)
class HangAlarm:
    """Tell the application that a role failed, so that its waits for that role end."""

    rank: int


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Send a role the request to leave."""

    rank: int


Event = Looked | Heard | Garbled | Exited | Found | WatchInterrupted | WatchStopWanted
Action = Deliver | HangAlarm | AskToStop | KillProcess


class Watch:
    """The launcher's decisions for one run."""

    def __init__(self, roles: Sequence[tuple[str, int]], patience: Patience, now_ns: int) -> None:
        """Watch the just spawned `roles`, given as name and process id by rank."""
        self._roles = [Member(name, pid, now_ns) for name, pid in roles]
        self._patience = patience
        self._failure: Failure | None = None
        self._alarmed = False
        self._interrupted = False
        self._taking_down = False
        self._stop_asked = False
        self._looked_ns = now_ns

    @property
    def over(self) -> bool:
        return all(role.phase is ProcessPhase.GONE for role in self._roles)

    @property
    def members(self) -> Sequence[Member]:
        return self._roles

    @property
    def taking_down(self) -> bool:
        return self._taking_down

    @property
    def failure(self) -> ManyhandsError | None:
        failure = self._failure
        return replace(failure, name=self._roles[failure.rank].name).error() if failure is not None else None

    def results(self) -> list[Finished]:
        """What each role returned, by rank; only after a run without failure or interruption."""
        return [role.finished for role in self._roles if role.finished is not None]

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Looked(lines):
                return self._look(lines, now_ns)
            case Heard(rank, message):
                return self._hear(rank, message, now_ns)
            case Garbled(rank, problem):
                return self._refuse(rank, problem, now_ns)
            case Exited(rank, status, last_words):
                return self._bury(rank, status, last_words, now_ns)
            case Found(role=rank, sentence=sentence, page=page, details=details):
                return self._fail(Failure(rank=rank, sentence=sentence, page=page, details=details), now_ns)
            case WatchInterrupted():
                return self._interrupt(now_ns)
            case WatchStopWanted():
                return self._ask_to_stop()

    def _look(self, lines: Sequence[StatusRow], now_ns: int) -> list[Action]:
        seconds = watched_s(self._looked_ns, now_ns)
        self._looked_ns = now_ns
        actions: list[Action] = []
        for rank, (role, line) in enumerate(zip(self._roles, lines, strict=True)):
            role.look(line, seconds)
            if role.phase is ProcessPhase.GONE:
                continue
            if role.killed_ns:
                actions += self._go_on_killing(rank, now_ns)
                continue
            complaint = self._complaint(role, now_ns)
            if complaint is not None:
                actions += self._fail(Failure(rank=rank, sentence=complaint), now_ns)
            if complaint is not None or role.is_overdue(now_ns):
                role.killed_ns = now_ns
                actions.append(KillProcess(rank))
        return actions

    def _go_on_killing(self, rank: int, now_ns: int) -> list[Action]:
        """Repeat the kill, which an exception of a signal handler may have cut; not for one stuck in the kernel."""
        role = self._roles[rank]
        if not role.is_stuck(now_ns):
            return [KillProcess(rank)]
        role.phase = ProcessPhase.GONE
        self._failure = self._failure or Failure(rank=rank, sentence=role.stuck())
        return []

    def _complaint(self, role: Member, now_ns: int) -> str | None:
        """What is wrong with a role that should be at work, if anything."""
        if role.is_late(self._patience, now_ns):
            return role.late(self._patience, now_ns)
        if role.is_silent(self._patience):
            return role.silent(now_ns)
        return None

    def _hear(self, rank: int, message: Message, now_ns: int) -> list[Action]:
        role = self._roles[rank]
        match message:
            case RoleStarted():
                role.enter(ProcessPhase.RUNNING, now_ns)
            case Note():
                return [Deliver(rank, message)]
            case Finished():
                role.enter(ProcessPhase.REPORTED, now_ns)
                role.finished = message
            case Failed():
                role.enter(ProcessPhase.REPORTED, now_ns)
                sentence = role.raised(message, self._peer_of, now_ns)
                return self._fail(Failure(rank=rank, sentence=sentence, reported=message), now_ns)
            case Stop():
                return self._refuse(rank, f"a child may not send {type(message).__name__}", now_ns)
        return []

    def _peer_of(self, rank: int) -> Member | None:
        return self._roles[rank] if 0 <= rank < len(self._roles) else None

    def _refuse(self, rank: int, problem: str, now_ns: int) -> list[Action]:
        return self._fail(Failure(rank=rank, sentence=self._roles[rank].refused(problem)), now_ns)

    def _bury(self, rank: int, status: int, last_words: str, now_ns: int) -> list[Action]:
        role = self._roles[rank]
        left_early = role.at_work and not role.killed_ns
        role.phase = ProcessPhase.GONE
        if not left_early:
            return []
        sentence = role.died(status, now_ns)
        return self._fail(Failure(rank=rank, sentence=sentence, last_words=last_words), now_ns)

    def _fail(self, failure: Failure, now_ns: int) -> list[Action]:
        if not self._interrupted and (self._failure is None or failure.outranks(self._failure)):
            self._failure = failure
        if self._alarmed:
            return []
        self._alarmed = True
        return [HangAlarm(failure.rank), *self._take_down(now_ns)]

    def _interrupt(self, now_ns: int) -> list[Action]:
        self._interrupted = True
        if self._taking_down:
            self._kill_at(now_ns)
        return self._take_down(now_ns)

    def _take_down(self, now_ns: int) -> list[Action]:
        if self._taking_down:
            return []
        self._taking_down = True
        self._kill_at(now_ns + round(self._patience.grace_s * 1e9))
        return self._ask_to_stop()

    def _ask_to_stop(self) -> list[Action]:
        """Ask the roles at work to stop, once: each finishes what it is doing."""
        asked, self._stop_asked = self._stop_asked, True
        return [] if asked else [AskToStop(rank) for rank, role in enumerate(self._roles) if role.at_work]

    def _kill_at(self, moment_ns: int) -> None:
        for role in self._roles:
            role.kill_at_ns = moment_ns
