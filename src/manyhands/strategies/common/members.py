"""The processes of a run as its launcher sees them: it requests one and receives its events, local or remote.

ChildMembers      children of this process
ExternalMembers   processes that somebody else started, on control connections, and perhaps a child of the leader
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, Protocol, Self

from manyhands.errors import PeerTimeout, printable
from manyhands.places.external.control_server import (
    ControlEvent,
    ControlServer,
    Delivered,
    ProcessRejected,
    Warned,
)
from manyhands.places.local.packed_job import pack
from manyhands.places.local.supervisor import Ended, Event, Hung, Role, Said, Started, Supervisor
from manyhands.places.local.watchdog import Watched

__all__ = ["ChildMembers", "ExternalMembers", "MemberProcesses"]

_LOOK_S: Final = 0.02


class MemberProcesses(Protocol):
    """The processes of a run, wherever they are; their numbers come from the membership and are never reused."""

    @property
    def members(self) -> tuple[int, ...]:
        """The members that have started, or are children, and were not reported as ended."""

    def together(self) -> AbstractContextManager[None]:
        """Members requested inside this context are started together and may begin when it is left."""

    def start_worker(self, member: int, slot: int) -> str:
        """Request a worker for this slot; returns its name without waiting: `poll` reports when it has started."""

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """The events so far, waiting up to `timeout_s` for the first."""

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON, in order and without blocking; Unread if too much is unread. A no-op if the member has ended."""

    def kill(self, member: int) -> None:
        """Kill the member now, or stop listening to it; `poll` reports its end."""

    def ask_to_stop(self, member: int) -> None:
        """Ask the member to leave."""


class ChildMembers(Supervisor):
    """Members that are children of this process. The job, with all its data, is packed once for all of them."""

    def __init__(self, job: Any, num_members: int, watched: Watched) -> None:
        super().__init__(num_members=num_members, watched=watched)
        self._job = job
        self._packed = -1

    def __enter__(self) -> Self:
        self._packed = pack(self._job)
        try:
            return super().__enter__()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            packed, self._packed = self._packed, -1
            if packed >= 0:
                os.close(packed)

    def start_child(
        self,
        member: int,
        name: str,
        target: Callable[..., Mapping[str, Any]],
        files: Mapping[str, int],
        env: Mapping[str, str],
    ) -> str:
        self.start(
            Role(name=name, target=target, descriptors={"job": self._packed, **files}, env=env), member
        )
        return name


class ExternalMembers(ABC):
    """Externally started processes on control connections, and the leader's child if it has one; a context manager.

    Starting a member means giving its part to the process of a rank: as soon as that has connected, and again when
    another of the same rank replaces one that died. A lost member is reported as dead in any case: its messages are
    ignored, and it is told so if it still lives.

        worker 1 on hostB    joins  ──►  rank 2 is there          start_worker(member=4, slot=1)  ──►  its part
        kill -9              lost   ──►  member 4 has ended       start_worker(member=6, slot=1)       … waits
        worker 1 on hostB    joins  ──►  rank 2 is there again                                    ──►  its part

    `come_within_s` limits how long a requested process may stay away; None if the run continues without it.
    """

    def __init__(
        self,
        control_server: ControlServer,
        child: ChildMembers | None,
        say: Callable[[str], None],
        come_within_s: float | None = None,
    ) -> None:
        self._control_server, self._child, self._say = control_server, child, say
        self._come_within_s = come_within_s
        self._wanted: dict[int, tuple[int, float]] = {}  # by rank: the member requested, and since when
        self._at: dict[int, int] = {}  # by member: its rank
        self._member_of: dict[int, int] = {}  # by rank
        self._unreported: list[Event | Hung] = []

    def __enter__(self) -> Self:
        if self._child is not None:
            self._child.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    @property
    def members(self) -> tuple[int, ...]:
        """The members that are connected, without those still awaited."""
        return (*self._at, *(self._child.members if self._child is not None else ()))

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """The events so far; PeerTimeout that names a process which was not started in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._child is not None:
                self._unreported += self._child.poll(0.0)
            for event in self._control_server.poll(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                self._unreported += self._hear(event)
            self._require_in_time()
            if self._unreported or time.monotonic() >= deadline:
                events, self._unreported = self._unreported, []
                return events

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send over the control connection, or the child's channel; a no-op if the member is not connected."""
        if member in self._at:
            self._control_server.tell(self._at[member], payload)
        elif self._child is not None and member in self._child.members:
            self._child.tell(member, payload)

    def kill(self, member: int) -> None:
        """Stop listening to a member and tell it so; one that is not connected is no longer awaited."""
        if member in self._at:
            self._control_server.dismiss(self._at[member], "the run continues without it, or is over")
        elif self._child is not None and member in self._child.members:
            self._child.kill(member)
        self._wanted = {rank: wanted for rank, wanted in self._wanted.items() if wanted[0] != member}

    def ask_to_stop(self, member: int) -> None:
        if member in self._at:
            self._control_server.ask_to_stop(self._at[member])
        elif self._child is not None and member in self._child.members:
            self._child.ask_to_stop(member)

    def _want(self, rank: int, member: int) -> None:
        self._wanted[rank] = member, time.monotonic()
        if rank in self._control_server.members:
            self._take_in(rank)

    def _take_in(self, rank: int) -> None:
        if rank not in self._wanted:
            return  # it stands by until its predecessor's end is reported
        member, _ = self._wanted.pop(rank)
        self._at[member], self._member_of[rank] = rank, member
        self._give_part(rank, member)
        self._unreported.append(Started(member, self._control_server.line(rank).pid))

    def _require_in_time(self) -> None:
        for rank, (_, since_s) in self._wanted.items():
            waited_s = time.monotonic() - since_s
            if self._come_within_s is not None and waited_s > self._come_within_s:
                remote = "".join(f"; {sentence}" for sentence in self._control_server.register.rejected[-3:])
                raise PeerTimeout(
                    f"{self._name(rank)} did not come within {waited_s:.0f} s; start it, or see on its host why "
                    f"it ended{remote}",
                    peer=-1,
                )

    def _hear(self, event: ControlEvent) -> list[Event | Hung]:
        match event:
            case Started(member=rank):
                self._take_in(rank)
            case Said(member=rank, payload=payload) if rank in self._member_of:
                return self._said(rank, payload)
            case Delivered(member=rank, name=name, data=data):
                self._receive(rank, name, data)
            case Ended(member=rank):
                ended = self._ended(rank, event)
                member = self._member_of.pop(rank, None)
                if member is None:
                    return []  # it had no part yet: another may come in its place
                del self._at[member]
                failure = replace(ended.failure, rank=member) if ended.failure is not None else None
                return [replace(ended, member=member, failure=failure)]
            case ProcessRejected(sentence=sentence) | Warned(sentence=sentence):
                self._say(sentence)
        return []

    def _refuse(self, rank: int, error: Exception) -> None:
        """Dismiss a member that violated the protocol; the run continues without it."""
        self._control_server.dismiss(rank, f"it sent what nobody may send: {error}")
        self._say(f"{self._name(rank)} sent what nobody may send: {printable(str(error))}")

    # ── a strategy's part ─────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _name(self, rank: int) -> str:
        """What users call the process of a rank."""

    @abstractmethod
    def _give_part(self, rank: int, member: int) -> None:
        """Tell a process which member it is."""

    @abstractmethod
    def _receive(self, rank: int, name: str, data: bytearray) -> None:
        """Store what a process sent, or refuse it."""

    def _said(self, rank: int, payload: Mapping[str, Any]) -> list[Event | Hung]:
        return [Said(self._member_of[rank], payload)]

    def _ended(self, rank: int, ended: Ended) -> Ended:
        del rank
        return ended
