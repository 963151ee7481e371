"""The decisions of a supervisor: a register of members that come and go, with the events to report. Does no I/O.

It holds no process, socket or clock. The events of a member are Started, Said..., perhaps Silent, and Ended, once.
The rules:

- The end of one member is reported and changes nothing for the others.
- A member without a heartbeat for `silent_after_s` is reported as Silent, once until the next heartbeat. It is not
  killed: whether it is given up is for those who need it to say.
- One that did not start in time, or that breaks the rules of the control channel, is killed.
- One that was asked to stop is killed if it has not left after `grace_s`; one that has reported, after `EXIT_S`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.places.local.control import Failed, Finished, Message, Note, RoleStarted, Stop
from manyhands.places.local.failure import Failure, describe_status
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

__all__ = ["Ended", "Event", "Interrupted", "Roster", "Said", "Silent", "Started"]


@dataclass(frozen=True, slots=True)
class Started:
    """The member has loaded its job and enters it."""

    member: int
    pid: int


@dataclass(frozen=True, slots=True)
class Said:
    """The member sent something; everything it sent comes before its end."""

    member: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Silent:
    """The member's process seems to be stopped; `seen` says where it was last."""

    member: int
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The member's process is gone: with what its job returned, or with what went wrong."""

    member: int
    name: str
    status: int | None
    """As in `subprocess`: negative for a signal; None if the kernel keeps the process though it was killed."""

    last_words: str
    """The end of what it wrote to stderr."""

    payload: Mapping[str, Any] | None
    """What the job returned; None if it failed."""

    failure: Failure | None
    """What went wrong, in a sentence, with what the job reported; None if it returned."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Someone pressed Ctrl-C or sent SIGTERM to the launcher."""

    signal: signal.Signals


Event = Started | Said | Silent | Ended | Interrupted


@dataclass(slots=True)
class _Entry:
    """A member, and what to report at its end."""

    member: Member
    failure: Failure | None = None
    reported_silent: bool = False


class Roster:
    """The members that are there, and the decisions about them."""

    def __init__(self, patience: Patience, now_ns: int) -> None:
        self._patience = patience
        self._entries: dict[int, _Entry] = {}
        self._looked_ns = now_ns

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._entries)

    def known(self) -> dict[int, Member]:
        return {number: entry.member for number, entry in self._entries.items()}

    def add(self, number: int, name: str, pid: int, now_ns: int) -> None:
        self._entries[number] = _Entry(Member(name, pid, now_ns))

    def ask_to_stop(self, number: int, now_ns: int) -> None:
        """The member is asked to leave; its grace begins, unless it has begun before."""
        member = self._entries[number].member
        if member.kill_at_ns is None:
            member.kill_at_ns = now_ns + round(self._patience.grace_s * 1e9)

    def kill(self, number: int, now_ns: int) -> list[KillProcess]:
        entry = self._entries[number]
        sentence = f"{entry.member} was killed by its launcher; {describe_status(entry.member.line, now_ns)}"
        return self._kill(number, Failure(rank=number, sentence=sentence), now_ns)

    def look(self, lines: Mapping[int, StatusRow], now_ns: int) -> list[Event | KillProcess]:
        """What follows from the current status table; called before the events of every poll."""
        seconds = watched_s(self._looked_ns, now_ns)
        self._looked_ns = now_ns
        events: list[Event | KillProcess] = []
        for number, entry in list(self._entries.items()):
            member = entry.member
            member.look(lines[number], seconds)
            if member.killed_ns:
                events += self._go_on_killing(number, now_ns)
            elif member.is_late(self._patience, now_ns):
                sentence = member.late(self._patience, now_ns)
                events += self._kill(number, Failure(rank=number, sentence=sentence), now_ns)
            elif member.is_overdue(now_ns):
                events += self.kill(number, now_ns)
            else:
                events += self._listen(number, now_ns)
        return events

    def handle(self, event: Heard | Garbled | Exited, now_ns: int) -> list[Event | KillProcess]:
        """What follows from what a member did; nothing if it was given up before."""
        if event.rank not in self._entries:
            return []
        match event:
            case Heard(number, message):
                return self._hear(number, message, now_ns)
            case Garbled(number, problem):
                return self._refuse(number, problem, now_ns)
            case Exited(number, status, last_words):
                return [self._end(number, status, last_words, now_ns)]

    def _listen(self, number: int, now_ns: int) -> list[Event | KillProcess]:
        entry = self._entries[number]
        was_reported, entry.reported_silent = entry.reported_silent, entry.member.is_silent(self._patience)
        if entry.reported_silent and not was_reported:
            return [Silent(number, entry.member.silent(now_ns))]
        return []

    def _hear(self, number: int, message: Message, now_ns: int) -> list[Event | KillProcess]:
        entry = self._entries[number]
        match message:
            case RoleStarted(pid=pid):
                entry.member.enter(ProcessPhase.RUNNING, now_ns)
                return [Started(number, pid)]
            case Note(payload=payload):
                return [Said(number, payload)]
            case Finished():
                entry.member.enter(ProcessPhase.REPORTED, now_ns)
                entry.member.finished = message
            case Failed():
                entry.member.enter(ProcessPhase.REPORTED, now_ns)
                sentence = entry.member.raised(message, self._peer_of, now_ns)
                entry.failure = Failure(rank=number, sentence=sentence, reported=message)
            case Stop():
                return self._refuse(number, f"a child may not send {type(message).__name__}", now_ns)
        return []

    def _peer_of(self, number: int) -> Member | None:
        return self._entries[number].member if number in self._entries else None

    def _refuse(self, number: int, problem: str, now_ns: int) -> list[Event | KillProcess]:
        sentence = self._entries[number].member.refused(problem)
        return [*self._kill(number, Failure(rank=number, sentence=sentence), now_ns)]

    def _kill(self, number: int, failure: Failure, now_ns: int) -> list[KillProcess]:
        """Kill a member, once; its result or its first failure stands."""
        entry = self._entries[number]
        if entry.member.killed_ns:
            return []
        entry.member.killed_ns = now_ns
        entry.failure = entry.failure or failure
        return [KillProcess(number)]

    def _go_on_killing(self, number: int, now_ns: int) -> list[Event | KillProcess]:
        """Repeat the kill, which an exception of a signal handler may have cut; not for one stuck in the kernel."""
        member = self._entries[number].member
        if not member.is_stuck(now_ns):
            return [KillProcess(number)]
        self._entries[number].failure = Failure(rank=number, sentence=member.stuck())
        return [self._end(number, None, "", now_ns)]

    def _end(self, number: int, status: int | None, last_words: str, now_ns: int) -> Ended:
        entry = self._entries.pop(number)
        finished, failure = entry.member.finished, entry.failure
        if finished is None and failure is None and status is not None:
            sentence = entry.member.died(status, now_ns)
            failure = Failure(rank=number, sentence=sentence, last_words=last_words)
        return Ended(
            member=number,
            name=entry.member.name,
            status=status,
            last_words=last_words,
            payload=finished.payload if finished is not None else None,
            failure=replace(failure, name=entry.member.name) if failure and finished is None else None,
        )
