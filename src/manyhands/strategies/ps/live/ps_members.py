"""The processes that serve and work, as the launcher sees them: it asks for one and hears of it, wherever that is."""

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
    """Who serves and works; numbers are the membership's, and none is used twice."""

    @property
    def members(self) -> tuple[int, ...]:
        """Who was asked for and is not told to have ended."""

    def together(self) -> AbstractContextManager[None]:
        """Those who are asked for inside are asked for at once, and may begin when this is left."""

    def start_server(self, member: int, place: int) -> str:
        """Ask for a server at this place; what to call it. Nothing is waited for: `poll` tells when it is there."""

    def start_worker(self, member: int, slot: int) -> str:
        """Ask for a worker for this slot; likewise."""

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """What happened, waiting up to so long until something has."""

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON, in order and without waiting; Unread if it leaves too much unread. Nothing if it has ended."""

    def kill(self, member: int) -> None:
        """Be rid of it now; `poll` tells that it has ended."""

    def ask_to_stop(self, member: int) -> None:
        """Ask it to leave."""


Assemble = Callable[[Watched], AbstractContextManager[RunMembers]]
"""Makes the members of one run; leaving the context leaves none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Memory files of the launcher, by what they hold; its children inherit them."""

    final: int
    """The parameters at the end, as the flat layout has them; where workers read in place, all the time."""

    buffers: int
    """The buffers of a worker's model at the end."""

    rings: Mapping[int, EventRing]
    """By slot."""

    server_rings: Sequence[EventRing]
    """By the place of a server: one that died leaves its place to the next."""


class LocalMembers:
    """Children of this process; a context manager."""

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
        """Who was started and is not told to have ended."""
        return self._supervisor.members

    def together(self) -> AbstractContextManager[None]:
        """As forks that come one right after the other."""
        return self._supervisor.together()

    def start_server(self, member: int, place: int) -> str:
        """As a child."""
        events = self._files.server_rings[place].descriptor
        return self._start(member, f"server {place}", serve, {"events": events})

    def start_worker(self, member: int, slot: int) -> str:
        """As a child."""
        files = {"events": self._files.rings[slot].descriptor, "buffers": self._files.buffers}
        return self._start(member, f"worker {slot}", partial(work, slot=slot), files)

    def poll(self, timeout_s: float) -> Sequence[Event | Hung]:
        """What happened."""
        return self._supervisor.poll(timeout_s)

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Over its inherited channel."""
        self._supervisor.tell(member, payload)

    def kill(self, member: int) -> None:
        """With its children."""
        self._supervisor.kill(member)

    def ask_to_stop(self, member: int) -> None:
        """It is killed if it has not left after a while."""
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
