"""The server and worker processes as the launcher sees them: it requests one and receives its events, local or
remote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from manyhands.engine.computing import worker_environment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.packed_job import pack
from manyhands.places.local.supervisor import Event, Hung, Role, Supervisor
from manyhands.places.local.watchdog import Watched
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.server_process import serve
from manyhands.strategies.ps.live.worker_process import work

__all__ = ["Assemble", "LocalMembers", "RunFiles", "RunMembers"]


class RunMembers(Protocol):
    """The servers and workers of a run; member numbers come from the membership and are never reused."""

    @property
    def members(self) -> tuple[int, ...]:
        """The members that were requested and not reported as ended."""

    def together(self) -> AbstractContextManager[None]:
        """Members requested inside this context are started together and may begin when it is left."""

    def start_server(self, member: int, place: int) -> str:
        """Request the server of this index; returns its name without waiting: `poll` reports when it has started."""

    def start_worker(self, member: int, slot: int) -> str:
        """Request a worker for this slot; returns its name without waiting, like `start_server`."""

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """The events so far, waiting up to `timeout_s` for the first."""

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON, in order and without blocking; Unread if too much is unread. A no-op if the member has
        ended.
        """

    def kill(self, member: int) -> None:
        """Kill the member now; `poll` reports its end."""

    def ask_to_stop(self, member: int) -> None:
        """Ask the member to leave."""


Assemble = Callable[[Watched], AbstractContextManager[RunMembers]]
"""Creates the members of one run; leaving the context ends all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Memory files of the launcher, which its children inherit."""

    final: int
    """The final parameters in the flat layout; if workers read in place, the current ones throughout."""

    buffers: int
    """The final buffers of a worker's model."""

    rings: Mapping[int, EventRing]
    """By slot."""

    server_rings: Sequence[EventRing]
    """By server index; the successor of a dead server takes its index."""


class LocalMembers:
    """Members that are children of this process; a context manager."""

    def __init__(self, job: Job, files: RunFiles, watched: Watched) -> None:
        self._job, self._files = job, files
        num_members = job.workers + job.strategy.num_server_processes
        self._supervisor = Supervisor(num_members=num_members, watched=watched)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._packed = pack(self._job)  # the task, with all its data, once and not for every process
            stack.callback(os.close, self._packed)
            stack.enter_context(self._supervisor)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def members(self) -> tuple[int, ...]:
        """The members that were started and not reported as ended."""
        return self._supervisor.members

    def together(self) -> AbstractContextManager[None]:
        """Fork the requested members one right after the other."""
        return self._supervisor.together()

    def start_server(self, member: int, place: int) -> str:
        """Start the server as a child process."""
        events = self._files.server_rings[place].descriptor
        return self._start(member, f"server {place}", serve, {"events": events})

    def start_worker(self, member: int, slot: int) -> str:
        """Start the worker as a child process."""
        files = {"events": self._files.rings[slot].descriptor, "buffers": self._files.buffers}
        return self._start(member, f"worker {slot}", partial(work, slot=slot), files)

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """The supervisor's events."""
        return self._supervisor.poll(timeout_s)

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send over the child's inherited channel."""
        self._supervisor.tell(member, payload)

    def kill(self, member: int) -> None:
        """Kill the member and its children."""
        self._supervisor.kill(member)

    def ask_to_stop(self, member: int) -> None:
        """Ask the member to leave; it is killed if it has not left after a while."""
        self._supervisor.ask_to_stop(member)

    def _start(
        self, member: int, name: str, target: Callable[..., Mapping[str, Any]], files: Mapping[str, int]
    ) -> str:
        role = Role(
            name=name,
            target=target,
            descriptors={"job": self._packed, "final": self._files.final, **files},
            env=worker_environment(self._job.plan, self._job.threads, loads=target is not serve),
        )
        self._supervisor.start(role, member)
        return name
