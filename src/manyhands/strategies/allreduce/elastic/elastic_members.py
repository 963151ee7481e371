"""The processes of an elastic run as its launcher sees them: it requests members and polls for their events."""

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
    """The members of a run, wherever they run; numbers come from the membership and are never reused."""

    @property
    def members(self) -> tuple[int, ...]:
        """The members that were requested, have started, and are not reported to have ended."""

    def start(self, member: int, slot: int) -> str:
        """Request a process for this slot and return its name. Does not wait: `poll` reports when it has started."""

    def begin(self, view: EpochView) -> None:
        """Give the members of an epoch its resources, before its view is announced to them."""

    def abort(self) -> None:
        """End every wait in the newest epoch; its members are notified separately."""

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """Return what happened; waits up to the given time for the first event."""

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON in order, without waiting.

        Raises Unread if too much is unread; does nothing for an ended member.
        """

    def kill(self, member: int) -> None:
        """Kill the member now; `poll` reports that it has ended."""


AssembleElastic = Callable[[Watched], AbstractContextManager[ElasticMembers]]
"""Creates the members of one run; on exit from the context none of them remains."""


class LocalElasticMembers:
    """Children of this process, which share memory; a context manager.

    `rings` has one ring for each possible slot; `weights` is where the final weights are left.
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
        """The children that were started and are not reported to have ended."""
        return self._supervisor.members

    def start(self, member: int, slot: int) -> str:
        """Start a child process for this slot."""
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
        """Send each member the shared memory of the epoch."""
        if self._files is not None:
            self._files.close()
        self._files = EpochFiles(len(view.seats), self._job.strategy, with_state=view.has_fresh)
        for rank, seat in enumerate(view.seats):
            connection = self._connections.get(seat.member)
            try:
                if connection is not None:
                    send_files(connection, view.epoch, self._files.of(rank))
            except OSError:  # it is dead or not reading: either way it does not enter this epoch
                self._supervisor.kill(seat.member)
        self._files.let_go()

    def abort(self) -> None:
        """Set the abort flag in the shared memory of the epoch."""
        assert self._files is not None, "an epoch that is ended was begun"
        self._files.abort(None)

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """Return what happened to the children."""
        events = self._supervisor.poll(timeout_s)
        for event in events:
            if isinstance(event, Ended):
                self._connections.pop(event.member).close()
        return events

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send over the channel that the child inherited."""
        self._supervisor.tell(member, payload)

    def kill(self, member: int) -> None:
        """Kill the child and its descendants."""
        self._supervisor.kill(member)

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        if self._files is not None:
            self._files.close()
