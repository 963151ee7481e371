"""The server and worker processes of a run that are children of its launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from manyhands.engine.computing import worker_environment
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.watchdog import Watched
from manyhands.strategies.common.run_launcher import ChildMembers, MemberProcesses
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.server_process import serve
from manyhands.strategies.ps.live.worker_process import work

__all__ = ["Assemble", "LocalMembers", "RunFiles", "RunMembers"]


class RunMembers(MemberProcesses, Protocol):
    """The servers and workers of a run."""

    def start_server(self, member: int, place: int) -> str:
        """Request the server of this index; returns its name without waiting, like `start_worker`."""


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


class LocalMembers(ChildMembers):
    """Servers and workers that are children of this process; a context manager."""

    def __init__(self, job: Job, files: RunFiles, watched: Watched) -> None:
        super().__init__(job, job.workers + job.strategy.num_server_processes, watched)
        self._files = files

    def start_server(self, member: int, place: int) -> str:
        files = {"events": self._files.server_rings[place].descriptor}
        return self._start(member, f"server {place}", serve, files)

    def start_worker(self, member: int, slot: int) -> str:
        files = {"events": self._files.rings[slot].descriptor, "buffers": self._files.buffers}
        return self._start(member, f"worker {slot}", partial(work, slot=slot), files)

    def _start(
        self, member: int, name: str, target: Callable[..., Mapping[str, Any]], files: Mapping[str, int]
    ) -> str:
        env = worker_environment(self._job.plan, self._job.threads, loads=target is not serve)
        return self.start_child(member, name, target, {"final": self._files.final, **files}, env)
