"""Worker processes of a model server: started, monitored and replaced, in a thread of their own.

All of them, including replacements, have the model as of the server's start: its weights are packed once, and every
worker maps the same pages.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.places.local.packed_job import pack
from manyhands.places.local.supervisor import Ended, Role, Said, Silent, Supervisor
from manyhands.places.local.template import warm
from manyhands.serving.model_replica import replica
from manyhands.workloads.predictor import Predictor

__all__ = ["Replicas", "Staffing"]

START_S = 120.0
_POLL_S = 0.05
_STOP_S = 10.0


class Staffing:
    """Decides when a worker that ended is replaced, and when to give up; pure."""

    MOST_FAILED = 3  # workers that may end, one after another, before one of them was ready

    def __init__(self) -> None:
        self._ready: set[int] = set()
        self._failed = 0

    def ready(self, worker: int) -> None:
        """A worker has become ready."""
        self._ready.add(worker)
        self._failed = 0

    def replaces(self, worker: int) -> bool:
        """A worker has ended: return whether to replace it; False after too many consecutive failed starts."""
        self._failed += worker not in self._ready
        self._ready.discard(worker)
        return self._failed < self.MOST_FAILED


class Replicas:
    """`count` processes that serve `predictor`; `start` returns when one answers, `stop` when all are gone.

    `on_start(worker, socket)` and `on_note(sentence, death)` are called in the thread of the replicas.
    """

    def __init__(
        self,
        predictor: Predictor[Any],
        count: int,
        on_start: Callable[[int, socket.socket], None],
        on_note: Callable[[str, bool], None],
    ) -> None:
        self._predictor, self._count = predictor, count
        self._on_start, self._on_note = on_start, on_note
        self._last = 0
        self._to_kill: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._wanted = threading.Event()
        self._answers = threading.Event()
        self._ended = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        """Start the workers, and wait until one answers; raises the failure of the first ones."""
        self._wanted.set()
        warm()  # start the fork server here: it would otherwise end with the thread that first used it
        deadline = time.monotonic() + START_S
        self._thread.start()
        try:
            while not self._answers.wait(_POLL_S):
                if self.failure is not None or time.monotonic() > deadline:
                    raise ManyhandsError(
                        f"no worker could serve the model: {self.failure or 'none was ready in time'}"
                    )
        except BaseException:  # Ctrl-C as well: workers that load their model would be left behind
            self.stop()
            raise

    def kill(self, worker: int) -> None:
        """Kill a worker, which is then replaced; from any thread."""
        self._to_kill.put(worker)

    @property
    def over(self) -> bool:
        """Whether the workers have ended on their own; `failure` says why."""
        return self._ended.is_set()

    def stop(self) -> None:
        """Stop all workers."""
        self._wanted.clear()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            packed = pack(self._predictor)
            try:
                with Supervisor(num_members=self._count, start_timeout_s=START_S) as supervisor:
                    self._watch(supervisor, packed)
            finally:
                os.close(packed)
        except BaseException as failure:  # reported by `start`, and on the server's page
            self.failure = failure
        finally:
            self._ended.set()

    def _watch(self, supervisor: Supervisor, packed: int) -> None:
        staffing = Staffing()
        for _ in range(self._count):
            self._start(supervisor, packed)
        while self._wanted.is_set():
            while not self._to_kill.empty():
                supervisor.kill(self._to_kill.get())
            for event in supervisor.poll(_POLL_S):
                match event:
                    case Said(member=worker):
                        staffing.ready(worker)
                        self._on_note(f"worker {worker} is ready", False)
                        self._answers.set()
                    case Silent(member=worker, seen=seen):
                        self._on_note(f"worker {worker} gives no sign of life ({seen}); it is killed", False)
                        supervisor.kill(worker)
                    case Ended(member=worker):
                        self._on_note(f"{_why(event)}; another takes its place", True)
                        if not staffing.replaces(worker):
                            raise ManyhandsError(_why(event))
                        self._start(supervisor, packed)

    def _start(self, supervisor: Supervisor, packed: int) -> None:
        self._last += 1
        ours, theirs = socket.socketpair()
        with theirs:  # the worker has its copy; when it dies, ours must reach end of file
            descriptors = {"model": packed, "requests": theirs.fileno()}
            role = Role(name=f"worker {self._last}", target=replica, descriptors=descriptors)
            supervisor.start(role, self._last)
        self._on_start(self._last, ours)


def _why(end: Ended) -> str:
    """Return why a worker ended, in a sentence."""
    return end.failure.sentence if end.failure is not None else f"{end.name} has left"
