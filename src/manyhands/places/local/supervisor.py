"""The processes of this host that a run consists of, monitored one by one; none is left behind.

Under a `Supervisor` every end is an event, and the caller decides what it means; a `LocalCluster` ends all roles at the
first failure. `roster` decides what to report, and the processes are those of `children`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self

from manyhands.errors import ManyhandsError, UserError
from manyhands.native.closeable import Closeable
from manyhands.places.local.children import Children, Role
from manyhands.places.local.control import Finished, Note, Stop, Unread
from manyhands.places.local.failure import Failure
from manyhands.places.local.packed_job import pack
from manyhands.places.local.roster import (
    TICK_S,
    Ended,
    Event,
    Exited,
    Garbled,
    Heard,
    Interrupted,
    KillProcess,
    Patience,
    Roster,
    Said,
    Silent,
    Started,
)
from manyhands.places.local.signals import as_exception, counted_signals
from manyhands.places.local.watchdog import Found, Watchdog, Watched
from manyhands.transport.liveness import SILENT_AFTER_S

__all__ = [
    "Ended",
    "Event",
    "Hung",
    "Interrupted",
    "LocalCluster",
    "Role",
    "Said",
    "Silent",
    "Started",
    "Supervisor",
]


class Hung(NamedTuple):
    """Nobody has made progress for as long as `watched` says."""

    found: Found


class Supervisor(Closeable):
    """Starts members at any time and reports what becomes of them; a context manager.

    `num_members` is how many are at work at a time: the cores are divided among so many, and their contexts say so as
    `world`. At most `capacity` processes, spares included, are there at once. Unless the caller `replaces` those that
    leave, waiting for one of them is a hang.

    All calls come from one thread, which must `poll` several times a second. Leaving asks all to stop, kills those that
    have not left after `grace_s`, and returns when all are gone. Ctrl-C, SIGTERM and SIGHUP (in the main thread, where
    they have their default meaning) are events; one that `poll` has not reported is raised on leaving. A signal while
    leaving kills at once.
    """

    def __init__(
        self,
        *,
        num_members: int,
        silent_after_s: float = SILENT_AFTER_S,
        grace_s: float = 2.0,
        start_timeout_s: float = 120.0,
        watched: Watched | None = None,
        capacity: int = 1024,
        replaces: bool = True,
    ) -> None:
        if not 1 <= num_members <= capacity:
            raise UserError(f"{num_members=} must be between 1 and {capacity=}")
        self._num_members = num_members
        self._capacity = capacity
        patience = Patience(silent_after_s=silent_after_s, grace_s=grace_s, start_timeout_s=start_timeout_s)
        self._roster = Roster(patience, time.monotonic_ns())
        self.failures = self._roster.failures
        self._watched_members = self._roster.known if replaces else {}
        self._watchdog = Watchdog(watched or Watched(deadline_s=0.0), time.monotonic_ns())
        self._numbers: set[int] = set()
        self._signals: list[int] = []
        self._signals_reported = 0
        self._arrived: deque[Heard | Garbled | Exited] = deque()
        self._unreported: list[Event | Hung] = []
        self._stack = ExitStack()
        self._children: Children | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._signals = stack.enter_context(counted_signals())
            self._children = stack.enter_context(Children(capacity=self._capacity, world=self._num_members))
            stack.callback(self._take_down)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        try:
            self._stack.close()
        finally:
            self._children = None
        unreported = self._signals[self._signals_reported :]
        self._signals_reported = len(self._signals)
        if unreported:
            raise as_exception(unreported[0])

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._roster.known)

    def batch(self) -> AbstractContextManager[None]:
        """Members that are started inside come right one after the other; all of them begin when this is left."""
        return self._open_children().batch()

    def start(self, role: Role, member: int | None = None, job: int | None = None) -> int:
        """Start `role` and return its number: `member`, or one more than the highest so far, from 1.

        The number is the `rank` of the role's context, and is never used again. Nothing is waited for: `Started` is
        reported when the role enters its job. Its target is packed now, unless `job` is a packed file that has it as
        item `member`; pack what many members need once, and give it to them as a descriptor.
        """
        children = self._open_children()
        number = max(self._numbers, default=0) + 1 if member is None else member
        if number < 0 or number in self._numbers:
            raise UserError(f"member={number} must be a number of at least 0 that no member has had before")
        with ExitStack() as stack:
            if job is None:
                job = pack({number: role.target})
                stack.callback(os.close, job)
            pid = children.start(number, role, job)
        self._numbers.add(number)
        self._watched_members[number] = self._roster.add(number, role.name, pid, time.monotonic_ns())
        return number

    def poll(self, timeout_s: float) -> list[Event | Hung]:
        """What happened, waiting up to `timeout_s` until something has; all output is passed on meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            events = self._poll(min(TICK_S, left_s))
            for number in self._signals[self._signals_reported :]:
                self._signals_reported += 1
                events.append(Interrupted(signal.Signals(number)))
            if events or left_s == 0.0:
                return events

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON, in order, without waiting; a no-op if the member has ended, Unread if it leaves 16 MiB unread."""
        self._check_known(member)
        self._open_children().post(member, Note(payload=payload))

    def ask_to_stop(self, member: int, *, patiently: bool = False) -> None:
        """Ask the member to leave; killed if it has not after `grace_s`, but for `patiently`. No-op if it has ended."""
        self._check_known(member)
        if member not in self._roster.known:
            return
        if not patiently:
            self._roster.ask_to_stop(member, time.monotonic_ns())
        with suppress(Unread):  # it will not see the request either; the grace has begun
            self._open_children().post(member, Stop())

    def kill(self, member: int) -> None:
        """Kill the member and its children now; `poll` reports `Ended`. A no-op if it has ended."""
        self._check_known(member)
        if member in self._roster.known:
            self._do(self._roster.kill(member, time.monotonic_ns()))

    def _poll(self, timeout_s: float) -> list[Event | Hung]:
        """Everything on the way is kept here: an exception of a user's signal handler must not lose an event."""
        children = self._open_children()
        self._arrived.extend(children.wait(0.0 if self._unreported else timeout_s))
        rows = {number: children.status(number) for number in self._roster.known}
        self._unreported += self._do(self._roster.look(rows, time.monotonic_ns()))
        while self._arrived:
            self._unreported += self._do(self._roster.handle(self._arrived.popleft(), time.monotonic_ns()))
        found = self._watchdog.look(self._watched_members, children, time.monotonic_ns())
        if found is not None:
            self._unreported.append(Hung(found))
        events, self._unreported = self._unreported, []
        return events

    def _do(self, decided: Sequence[Event | KillProcess]) -> list[Event]:
        """Kill the members that the roster wants killed; the other events are for the caller."""
        for item in decided:
            if isinstance(item, KillProcess):
                self._open_children().kill(item.rank)
        return [item for item in decided if not isinstance(item, KillProcess)]

    def _take_down(self) -> None:
        """Ask all members to stop, wait for the grace period, kill; `children` ends what is left after that."""
        for member in self.members:
            self.ask_to_stop(member)
        patient = len(self._signals)
        while self.members:
            self._poll(TICK_S)
            for member in self.members if len(self._signals) > patient else ():
                self.kill(member)

    def _check_known(self, member: int) -> None:
        if member not in self._numbers:
            raise UserError(f"{member=} was never started")

    def _open_children(self) -> Children:
        if self._children is None:
            raise RuntimeError("a supervisor is a context manager: with Supervisor(...) as supervisor")
        return self._children


class LocalCluster:
    """Runs `roles` side by side, rank by position, which succeed or fail together; a context manager, for one `run`.

    `on_note(rank, payload)` gets what the roles send; `on_failure(rank)` is called at the first failure, before the
    others learn of it (to end waits in shared memory). Both are called in the thread of `run`. A silent role is killed
    after `silent_after_s`. After a failure or an interruption, the others have `grace_s` to leave. Where no role makes
    progress for as long as `watched` says, the run fails with a `Hang` that names the culprit. Once `stop_wanted()`,
    the roles are asked to stop and end by themselves, with results. `settings` are the `Supervisor`'s.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        on_note: Callable[[int, Mapping[str, Any]], None] = lambda _rank, _payload: None,
        on_failure: Callable[[int], None] = lambda _rank: None,
        stop_wanted: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> None:
        if not roles:
            raise UserError("roles=[] must have at least one role")
        self._roles = tuple(roles)
        self._on_note = on_note
        self._on_failure = on_failure
        self._stop_wanted = stop_wanted
        self._supervisor = Supervisor(num_members=len(roles), capacity=len(roles), replaces=False, **settings)
        self._job = -1
        self._results: dict[int, Finished] = {}
        self._failure: Failure | None = None
        self._num_failures = 0
        self._alarmed = self._taking_down = self._stop_asked = False
        self._interrupted: signal.Signals | None = None

    def __enter__(self) -> Self:
        """Pack the job; no process is started yet."""
        self._job = pack([role.target for role in self._roles])
        return self

    def __exit__(self, *_: object) -> None:
        job, self._job = self._job, -1
        if job >= 0:
            os.close(job)

    def run(self) -> list[Finished]:
        """Start every role and wait for all results, by rank; called once.

        Raises WorkerFailed for the first failure, or the role's own error if that was a UserError. On Ctrl-C and on
        SIGTERM (in the main thread, where they have their default meaning) all roles are taken down first; then
        KeyboardInterrupt or SystemExit(143) is raised. When this returns or raises, every process is gone.
        """
        if self._job < 0:
            raise RuntimeError("a cluster runs once, as a context manager: with LocalCluster(...) as cluster")
        try:
            with self._supervisor as supervisor:
                with supervisor.batch():
                    for rank, role in enumerate(self._roles):
                        supervisor.start(role, rank, self._job)
                while supervisor.members:
                    self.look(supervisor.poll(TICK_S))
        except BaseException as error:  # from a callback, or from a signal handler of the user's own
            if self.failure is not None:
                error.add_note(f"before that: {self.failure}")
            raise
        if self._interrupted is not None:
            raise as_exception(self._interrupted) from self.failure
        if self.failure is not None:
            raise self.failure
        return [self._results[rank] for rank in sorted(self._results)]

    @property
    def failure(self) -> ManyhandsError | None:
        failure = self._failure
        return replace(failure, name=self._roles[failure.rank].name).error() if failure is not None else None

    def look(self, events: Sequence[Event | Hung]) -> None:
        # A role that failed only because of another (`Aborted`, `PeerTimeout`) is reported only if no other shows while
        # the rest is taken down. A failure after an interruption is part of the shutdown and not reported.
        for event in sorted(events, key=lambda one: not isinstance(one, Interrupted)):
            match event:
                case Interrupted(number):
                    self._interrupted = self._interrupted or number
                    if self._taking_down:  # for the second time: at once
                        for rank in self._supervisor.members:
                            self._supervisor.kill(rank)
                    self._take_down()
                case Said(rank, payload):
                    self._on_note(rank, payload)
                case Silent(rank, seen):
                    self._fail(Failure(rank=rank, sentence=seen))
                    self._supervisor.kill(rank)  # it cannot leave
                case Hung(found) if not self._taking_down:
                    failure = Failure(rank=found.role, sentence=found.sentence)
                    self._fail(replace(failure, page=found.page, details=found.details))
                case Ended(member=rank, payload=payload) if payload is not None:
                    self._results[rank] = Finished(payload=payload)
                case Ended(status=None, failure=failure):  # stuck in the kernel, whatever came before
                    self._failure = self._failure or failure
        failures = self._supervisor.failures[self._num_failures :]
        self._num_failures += len(failures)
        for failure in failures:
            self._fail(failure)
        if self._stop_wanted() and not self._stop_asked:
            self._stop_asked = True
            for rank in self._supervisor.members:
                self._supervisor.ask_to_stop(rank, patiently=True)

    def _fail(self, failure: Failure) -> None:
        earlier = self._failure
        # A later failure replaces the first one only if it is the cause of which that was a consequence.
        if earlier is None or (earlier.is_consequence and not failure.is_consequence):
            self._failure = failure if self._interrupted is None else earlier
        if not self._alarmed:
            self._alarmed = True
            self._on_failure(failure.rank)
            self._take_down()

    def _take_down(self) -> None:
        if not self._taking_down:
            self._taking_down = True
            for rank in self._supervisor.members:
                self._supervisor.ask_to_stop(rank)
