"""The local cluster: starts the roles of a run on this host, monitors them, and leaves no process behind.

    with LocalCluster([Role(name=f"worker {rank}", target=job) for rank in range(4)]) as cluster:
        results = cluster.run()

`watch_core` decides what to do, and this module does it, on the processes of `children`. For processes that come
and go, see `supervisor`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from manyhands.errors import UserError
from manyhands.places.local.children import Children, Role
from manyhands.places.local.control import Finished, Stop
from manyhands.places.local.member import TICK_S, Exited, Garbled, Heard, KillProcess, Patience
from manyhands.places.local.packed_job import pack
from manyhands.places.local.signals import as_exception, counted_signals
from manyhands.places.local.watch_core import (
    AskToStop,
    Deliver,
    Event,
    HangAlarm,
    Looked,
    Watch,
    WatchInterrupted,
    WatchStopWanted,
)
from manyhands.places.local.watchdog import Watchdog, Watched
from manyhands.transport.liveness import SILENT_AFTER_S

__all__ = ["LocalCluster", "OnFailure", "OnNote", "Role"]

OnNote = Callable[[int, Mapping[str, Any]], None]
OnFailure = Callable[[int], None]


class LocalCluster:
    """Runs `roles` side by side, rank by position; a context manager, used for one `run`.

    `on_note(rank, payload)` gets what the roles send, `on_failure(rank)` is called at the first failure,
    before anyone else is told (to end waits in shared memory). Both are called in the thread of `run`.

    A role whose process gives no sign of life is noticed within `silent_after_s`. After a failure or an
    interruption, the others have `grace_s` to leave. Where nobody makes progress for as long as `watched` says, the
    run fails with a `Hang` that names who is to blame. Once `stop_wanted()`, which is asked after all that came, the
    roles are asked to stop and come to their end by themselves, with results.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        on_note: OnNote | None = None,
        on_failure: OnFailure | None = None,
        stop_wanted: Callable[[], bool] = lambda: False,
        watched: Watched | None = None,
        silent_after_s: float = SILENT_AFTER_S,
        grace_s: float = 2.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if not roles:
            raise UserError("roles=[] must hold at least one role")
        self._roles = tuple(roles)
        self._on_note = on_note
        self._on_failure = on_failure
        self._stop_wanted = stop_wanted
        self._watched = watched or Watched(deadline_s=0.0)
        self._patience = Patience(
            silent_after_s=silent_after_s, grace_s=grace_s, start_timeout_s=start_timeout_s
        )
        self._stack = ExitStack()
        self._job = -1
        self._children: Children | None = None
        self._arrived: deque[Heard | Garbled | Exited] = deque()
        self._signals_handled = 0

    def __enter__(self) -> LocalCluster:
        """Pack the job and make what all roles share; no process is started yet."""
        with ExitStack() as stack:
            self._job = pack([role.target for role in self._roles])
            stack.callback(os.close, self._job)
            children = Children(capacity=len(self._roles), world=len(self._roles))
            self._children = stack.enter_context(children)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release what `__enter__` made; the processes are gone when `run` returns or raises."""
        self._children = None
        self._stack.close()

    def run(self) -> list[Finished]:
        """Start every role and wait for all results, by rank; called once.

        Raises WorkerFailed for the first failure, or the role's own error if that was a UserError. On Ctrl-C
        and on SIGTERM (in the main thread, where they have their default meaning) all roles are taken down
        first; then KeyboardInterrupt or SystemExit(143) is raised. When this returns or raises, every process
        is gone.
        """
        if self._children is None:
            raise RuntimeError("a cluster runs once, as a context manager: with LocalCluster(...) as cluster")
        children, self._children = self._children, None
        with counted_signals() as signals:
            try:
                with children.together():
                    pids = [children.start(rank, role, self._job) for rank, role in enumerate(self._roles)]
                names = [role.name for role in self._roles]
                watch = Watch(list(zip(names, pids, strict=True)), self._patience, time.monotonic_ns())
                try:
                    self._until_over(watch, children, signals)
                except BaseException as error:  # from a callback, or from a signal handler of the user's own
                    self._on_note = self._on_failure = None
                    self._stop_wanted = lambda: False
                    self._handle(watch, children, WatchInterrupted())
                    self._until_over(watch, children, signals)
                    if watch.failure is not None:
                        error.add_note(f"before that: {watch.failure}")
                    raise
            finally:
                children.end()
        if signals:
            raise as_exception(signals[0]) from watch.failure
        if watch.failure is not None:
            raise watch.failure
        return watch.results()

    def _until_over(self, watch: Watch, children: Children, signals: Sequence[int]) -> None:
        watchdog = Watchdog(self._watched, time.monotonic_ns())
        while not watch.over:
            self._arrived.extend(children.wait(TICK_S))
            lines = [children.line(rank) for rank in range(len(self._roles))]
            self._handle(watch, children, Looked(lines))
            for _ in signals[self._signals_handled :]:
                self._signals_handled += 1
                self._handle(watch, children, WatchInterrupted())
            while self._arrived:  # one by one: what a callback's error leaves is for the taking down
                self._handle(watch, children, self._arrived.popleft())
            if self._stop_wanted():
                self._handle(watch, children, WatchStopWanted())
            if not watch.taking_down:
                found = watchdog.look(dict(enumerate(watch.members)), children, time.monotonic_ns())
                if found is not None:
                    self._handle(watch, children, found)

    def _handle(self, watch: Watch, children: Children, event: Event) -> None:
        """Let the watch decide about `event`, and do what it says."""
        for action in watch.handle(event, time.monotonic_ns()):
            match action:
                case Deliver(rank, note):
                    if self._on_note is not None:
                        self._on_note(rank, note.payload)
                case HangAlarm(rank):
                    if self._on_failure is not None:
                        self._on_failure(rank)
                case AskToStop(rank):
                    children.post(rank, Stop())
                case KillProcess(rank):
                    children.kill(rank)
