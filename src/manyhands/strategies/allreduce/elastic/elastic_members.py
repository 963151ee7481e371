"""The processes of an elastic run, as its launcher sees them: it asks for one and hears of it, wherever that is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, Self

from manyhands.engine.computing import worker_environment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.packed_job import pack
from manyhands.places.local.supervisor import Ended, Event, Hung, Role, Supervisor
from manyhands.places.local.watchdog import Watched
from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView
from manyhands.strategies.allreduce.elastic.epoch_files import EpochFiles, send_files
from manyhands.strategies.allreduce.elastic.member_process import ElasticJob, work

__all__ = ["AssembleElastic", "ElasticMembers", "LocalElasticMembers"]


class ElasticMembers(Protocol):
    """Who works; numbers are the membership's, and none is used twice."""

    @property
    def members(self) -> tuple[int, ...]:
        """Who was asked for, is there and is not told to have ended."""

    def start(self, member: int, slot: int) -> str:
        """Ask for a process for this slot; what to call it. Nothing is waited for: `poll` tells when it is there."""

    def begin(self, view: EpochView) -> None:
        """Give the members of an epoch what it needs, before they are told of it."""

    def abort(self) -> None:
        """End every wait in the newest epoch; its members are told besides."""

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """What happened, waiting up to so long until something has."""

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON, in order and without waiting; Unread if it leaves too much unread. Nothing if it has ended."""

    def kill(self, member: int) -> None:
        """Be rid of it now; `poll` tells that it has ended."""


AssembleElastic = Callable[[Watched], AbstractContextManager[ElasticMembers]]
"""Makes the members of one run; leaving the context leaves none of them."""


class LocalElasticMembers:
    """Children of this process, which share memory; a context manager.

    `rings` has one ring for each slot there may ever be, `weights` is where the last weights are left.
    """

    def __init__(
        self, job: ElasticJob, rings: Sequence[EventRing], weights: int, num_members: int, watched: Watched
    ) -> None:
        self._job, self._rings, self._weights = job, rings, weights
        self._supervisor = Supervisor(num_members=num_members, watched=watched)
        self._connections: dict[int, socket.socket] = {}
        self._files: EpochFiles | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._close)
            self._packed = pack(self._job)
            stack.callback(os.close, self._packed)
            stack.enter_context(self._supervisor)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def members(self) -> tuple[int, ...]:
        """Who was started and is not told to have ended."""
        return self._supervisor.members

    def start(self, member: int, slot: int) -> str:
        """As a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            role = Role(
                name=f"worker {slot}",
                target=partial(work, slot=slot),
                descriptors={
                    "job": self._packed,
                    "events": self._rings[slot].descriptor,
                    "weights": self._weights,
                    "files": theirs.fileno(),
                },
                env=worker_environment(self._job.plan, self._job.threads),
            )
            self._connections[member] = ours
            self._supervisor.start(role, member)
        return role.name

    def begin(self, view: EpochView) -> None:
        """Each member gets the memory of the epoch."""
        if self._files is not None:
            self._files.close()
        self._files = EpochFiles(len(view.seats), self._job.strategy, with_state=view.has_fresh)
        for rank, seat in enumerate(view.seats):
            connection = self._connections.get(seat.member)
            try:
                if connection is not None:
                    send_files(connection, view.epoch, self._files.of(rank))
            except OSError:  # it is gone, or reads nothing: either way it is not in this epoch
                self._supervisor.kill(seat.member)
        self._files.let_go()

    def abort(self) -> None:
        """In its memory."""
        assert self._files is not None, "an epoch that is ended was begun"
        self._files.abort(None)

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """What happened."""
        events = self._supervisor.poll(timeout_s)
        for event in events:
            if isinstance(event, Ended):
                self._connections.pop(event.member).close()
        return events

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Over its inherited channel."""
        self._supervisor.tell(member, payload)

    def kill(self, member: int) -> None:
        """With its children."""
        self._supervisor.kill(member)

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        if self._files is not None:
            self._files.close()
