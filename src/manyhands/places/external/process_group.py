"""The process group of an externally started run, at its leader and at every other process.

    leader                                            another process
      with lead_group(…) as group:                      with join_group(…) as member:
          group.gather()                all have joined      member.line
          group.control_server                               …
          group.give("run", …)          the result           member.line.take("run", …)

When the leader's block ends, whatever the cause, the other processes are told why and end too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed, first_line
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.external.control_messages import Term
from manyhands.places.external.control_server import ControlEvent, ProcessRejected, Warned
from manyhands.places.external.leader_address import Following, Leading, follow, lead
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.roster import Ended, Started
from manyhands.transport.security import Security

__all__ = ["GroupMember", "ProcessGroup", "join_group", "lead_group"]

_TICK_S: Final = 0.1
_SHUTDOWN_S: Final = 30.0
_BREAK_OFF_S: Final = 3.0
_STARTING_S: Final = 5.0


class ProcessGroup:
    """All processes of a run, at its leader; a context manager. Call it from one thread at a time."""

    def __init__(self, place: ProcessPlace, leading: Leading, security: Security, timeout_s: float) -> None:
        self.place = place
        self.control_server = leading.control_server
        self.token = leading.token
        self.address = leading.address
        """Where links of this process listen for other hosts; empty if there are none."""

        self.security = security
        self.timeout_s = timeout_s
        self.early: list[ControlEvent] = []
        """Events that arrived before every member had joined."""

    def gather(self, notice: Callable[[str], None] = lambda _sentence: None) -> None:
        """Wait until every rank has joined, except those that may come later.

        UserError if a process does not belong to the run, PeerTimeout naming the ranks that are late.
        """
        began = time.monotonic()
        needed = self.place.world - self.place.later
        while any(rank < needed for rank in self.control_server.missing):
            waited_s = time.monotonic() - began
            if waited_s >= self.timeout_s:
                raise PeerTimeout(
                    self.control_server.late("join", waited_s, self._named), self.control_server.missing[0]
                )
            for event in self.control_server.poll(_TICK_S):
                match event:
                    case Started():
                        pass
                    case Warned(_, sentence):
                        notice(sentence)
                    case ProcessRejected(sentence, field) if field != "rank":
                        self._await_those_who_start()
                        raise UserError(sentence)
                    case Ended(failure=failure) if failure is not None:
                        raise failure.error()
                    case _:
                        self.early.append(event)

    def _await_those_who_start(self) -> None:
        """Before the run is given up, let processes that are about to join do so: they are then told why."""
        deadline = time.monotonic() + min(_STARTING_S, self.timeout_s)
        while self.control_server.missing and time.monotonic() < deadline:
            self.control_server.poll(_TICK_S)

    def _named(self, rank: int) -> str:
        spec = self.place.cluster
        if spec is None:
            return f"rank {rank}"
        role = spec.ranked[rank]
        return f"{role} at {spec.address(role)}"

    def tell_all(self, payload: Mapping[str, Any]) -> None:
        for rank in range(1, self.place.world):
            self.control_server.tell(rank, payload)

    def give(self, name: str, chunks: Callable[[], Iterable[Any]]) -> None:
        """Give every member that joined a large object; `chunks` produces its buffers anew for each member."""
        for rank in range(1, self.place.world):
            if rank < self.place.world - self.place.later or rank in self.control_server.known:
                self.control_server.give(rank, name, chunks())

    def shutdown(self) -> None:
        """Wait until every member has received what was given and has left; ManyhandsError names those that have
        not.
        """
        left = self.control_server.shutdown(max(_SHUTDOWN_S, self.timeout_s))
        if left:
            raise ManyhandsError(
                f"{self.control_server.name_of(left[0])} has not taken the result of the run in time"
            )

    def break_off(self, rank: int, sentence: str) -> None:
        """Tell every member that the run has failed, and wait briefly for them to leave."""
        self.control_server.break_off(rank, sentence)
        self.control_server.shutdown(_BREAK_OFF_S)

    def close(self) -> None:
        self.control_server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                rank = error.worker_rank if isinstance(error, WorkerFailed) else 0
                sentence = first_line(error)
                if not isinstance(error, ManyhandsError):
                    sentence = f"{self.place.name} ended with {type(error).__name__}: {sentence}"
                self.break_off(rank, sentence)
        finally:
            self.close()


class GroupMember:
    """One process's membership in a run that another process leads; a context manager."""

    def __init__(
        self, place: ProcessPlace, following: Following, security: Security, timeout_s: float
    ) -> None:
        self.place = place
        self.line: ControlConnection = following.line
        self.token = following.token
        self.address = following.address
        self.security = security
        self.timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()


def lead_group(
    place: ProcessPlace,
    terms: Sequence[Term],
    name: str,
    *,
    security: Security,
    timeout_s: float,
    comes_again: bool = False,
) -> ProcessGroup:
    leading = lead(place, terms, name, security=security, timeout_s=timeout_s, comes_again=comes_again)
    return ProcessGroup(place, leading, security, timeout_s)


def join_group(
    place: ProcessPlace,
    terms: Sequence[Term],
    name: str,
    *,
    security: Security,
    timeout_s: float,
    comes_again: bool = False,
) -> GroupMember:
    following = follow(place, terms, name, security=security, timeout_s=timeout_s, comes_again=comes_again)
    return GroupMember(place, following, security, timeout_s)
