"""The supervisor: processes of this host that come and go, monitored one by one; none is left behind.

    with Supervisor(num_members=4) as supervisor:
        number = supervisor.start(Role(name="worker 0", target=job))
        while supervisor.members:
            for event in supervisor.poll(1.0):
                match event:
                    case Ended(member=number, failure=failure) if failure is not None:
                        supervisor.start(...)

`local.LocalCluster` ends all roles at the first failure; here every end is an event, and the caller decides what it
means. `roster` decides what to report, and the processes are those of `children`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Self

from manyhands.errors import UserError
from manyhands.places.local.children import Children, Role
from manyhands.places.local.control import Note, Stop, Unread
from manyhands.places.local.hang import Found
from manyhands.places.local.member import TICK_S, Exited, Garbled, Heard, KillProcess, Patience
from manyhands.places.local.packed_job import pack
from manyhands.places.local.roster import Ended, Event, Interrupted, Roster, Said, Silent, Started
from manyhands.places.local.signals import as_exception, counted_signals
from manyhands.places.local.status import StatusRow
from manyhands.places.local.watchdog import Watchdog, Watched
from manyhands.transport.liveness import SILENT_AFTER_S

__all__ = ["Ended", "Event", "Hung", "Interrupted", "Role", "Said", "Silent", "Started", "Supervisor"]


@dataclass(frozen=True, slots=True)
class Hung:
    """Nobody has made progress for as long as `watched` says."""

    found: Found


class Supervisor:
    """Starts members at any time and tells what becomes of them; a context manager.

    `num_members` is how many are at work at a time: the cores are shared out among so many, and their contexts say
    so as `world`. At most `capacity` processes, spares included, are there at once; there is no limit on how many
    come one after another.

    All calls come from one thread, which must `poll` several times a second for anything to be noticed. Leaving asks
    everyone to stop, kills who has not left after `grace_s`, and returns when all are gone. Ctrl-C, SIGTERM and SIGHUP
    (in the main thread, where they have their default meaning) are events; one that `poll` has not told is raised on
    leaving. A signal while leaving kills at once. Members show each other's numbers where they wait for one another.
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
    ) -> None:
        if not 1 <= num_members <= capacity:
            raise UserError(f"{num_members=} must lie between 1 and {capacity=}")
        self._num_members = num_members
        self._capacity = capacity
        self._patience = Patience(
            silent_after_s=silent_after_s, grace_s=grace_s, start_timeout_s=start_timeout_s
        )
        self._roster = Roster(self._patience, time.monotonic_ns())
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

    def __exit__(self, *_: object) -> None:
        self.close()

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
        return self._roster.members

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The first signal that came to end it, if any; `signals.as_exception` is what Python makes of it."""
        return signal.Signals(self._signals[0]) if self._signals else None

    def together(self) -> AbstractContextManager[None]:
        """Members that are started inside come right one after the other; all of them begin when this is left."""
        return self._open_children().together()

    def start(self, role: Role, member: int | None = None) -> int:
        """Start `role` and return its number: `member`, or one more than the highest so far, from 1.

        The number is the `rank` of the role's context, and is never used again. Nothing is waited for: `Started` is
        told when the role enters its job. Its target is packed now; pack what many members need once, and give it to
        them as a descriptor.
        """
        children = self._open_children()
        number = max(self._numbers, default=0) + 1 if member is None else member
        if number < 0 or number in self._numbers:
            raise UserError(f"member={number} must be a number from 0 on that no member has had before")
        job = pack({number: role.target})
        try:
            pid = children.start(number, role, job)
        finally:
            os.close(job)
        self._numbers.add(number)
        self._roster.add(number, role.name, pid, time.monotonic_ns())
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
        """Send JSON, which the member's `context.received` returns; in order, without waiting: `poll` sends the rest.

        A no-op if the member has ended. Unread if it has left more than 16 MiB unread.
        """
        self._check_known(member)
        self._open_children().post(member, Note(payload=payload))

    def ask_to_stop(self, member: int) -> None:
        """Ask the member to leave; it is killed if it has not after `grace_s`. Nothing happens if it has ended."""
        self._check_known(member)
        if member not in self._roster.members:
            return
        self._roster.ask_to_stop(member, time.monotonic_ns())
        try:
            self._open_children().post(member, Stop())
        except Unread:  # it will not see the request either; the grace has begun
            pass

    def kill(self, member: int) -> None:
        """Kill the member and its children now; `poll` reports `Ended`. A no-op if it has ended."""
        self._check_known(member)
        if member in self._roster.members:
            self._do(self._roster.kill(member, time.monotonic_ns()))

    def line(self, member: int) -> StatusRow:
        """The status of a member that has not ended: what it is doing, and when it was last seen."""
        if member not in self._roster.members:
            raise UserError(f"{member=} is not among those who are there: {self._roster.members}")
        return self._open_children().line(member)

    def _poll(self, timeout_s: float) -> list[Event | Hung]:
        """Everything on the way is kept here: an exception of a user's signal handler must not lose an event."""
        children = self._open_children()
        self._arrived.extend(children.wait(0.0 if self._unreported else timeout_s))
        lines = {number: children.line(number) for number in self._roster.members}
        self._unreported += self._do(self._roster.look(lines, time.monotonic_ns()))
        while self._arrived:
            self._unreported += self._do(self._roster.handle(self._arrived.popleft(), time.monotonic_ns()))
        found = self._watchdog.look(self._roster.known(), children, time.monotonic_ns())
        if found is not None:
            self._unreported.append(Hung(found))
        events, self._unreported = self._unreported, []
        return events

    def _do(self, items: Sequence[Event | KillProcess]) -> list[Event]:
        """Kill the members that the roster wants killed; the other events are for the caller."""
        events: list[Event] = []
        for item in items:
            if isinstance(item, KillProcess):
                self._open_children().kill(item.rank)
            else:
                events.append(item)
        return events

    def _take_down(self) -> None:
        """Ask all members to stop, wait for the grace period, kill; `children` ends what is left after that."""
        for member in self._roster.members:
            self.ask_to_stop(member)
        patient = len(self._signals)
        while self._roster.members:
            self._poll(TICK_S)
            if len(self._signals) > patient:
                for member in self._roster.members:
                    self.kill(member)

    def _check_known(self, member: int) -> None:
        if member not in self._numbers:
            raise UserError(f"{member=} was never started")

    def _open_children(self) -> Children:
        if self._children is None:
            raise RuntimeError(
                "a supervisor is used as a context manager: with Supervisor(...) as supervisor"
            )
        return self._children
