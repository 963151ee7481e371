"""The launcher of a run whose members come and go: starts, watches and replaces processes as a membership decides.

The membership is a pure core: every report of a member and every event of its process goes to `handle`, and what
that returns is done here. The launcher itself decides nothing. Its death ends the run.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Generic, Protocol, TypeVar

from manyhands.errors import Hang, UserError
from manyhands.observe.record.event_ring import BlackBoxes, EventRing
from manyhands.places.local.control import Unread
from manyhands.places.local.failure import Failure
from manyhands.places.local.notes import TypedNotes
from manyhands.places.local.signals import as_exception
from manyhands.places.local.supervisor import Ended, Hung, Interrupted, Said, Silent, Started
from manyhands.places.local.watchdog import Watched
from manyhands.places.run_commands import AddWorker, Command
from manyhands.strategies.common.members import MemberProcesses
from manyhands.strategies.common.membership import Died, Fail, KillMember, MemberSilent, StartWorker

__all__ = ["MemberLog", "RunLauncher"]

_LOOK_S: Final = 0.1
_M = TypeVar("_M", bound=MemberProcesses)


class MemberLog:
    """The rows of members.jsonl: `on_event` receives each, with a sentence if users should know of it."""

    def __init__(
        self, on_event: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_event, self._clock = on_event, clock
        self._began_s: float | None = None
        self._lost: dict[str, float] = {}  # what is missing, and since when
        self.names: dict[int, str] = {}
        """The name of every member that was ever started."""
        self.recoveries: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    def tell(self, event: str, member: int, **details: Any) -> None:
        known = {"name": self.names[member]} if member in self.names else {}
        self._on_event({"event": event, "at_s": self.seconds, "member": member, **known, **details})

    def view(self, epoch: int, shards: Sequence[Any], slots: Sequence[Any], members: Iterable[int]) -> None:
        self._began_s = self._clock() if self._began_s is None else self._began_s
        names = {str(member): self.names[member] for member in members if member in self.names}
        self._on_event(
            {
                "event": "view",
                "at_s": self.seconds,
                "epoch": epoch,
                "shards": shards,
                "slots": slots,
                "names": names,
            }
        )

    def lost(self, event: str, member: int, what: str, sentence: str) -> None:
        self._lost.setdefault(what, self._clock())
        self.tell(event, member, sentence=sentence)

    def recovered(self, member: int, what: str, sentence: str) -> None:
        """Record that `what` is there again; `sentence` may name the `{seconds}` that it took."""
        now_s = self._clock()
        seconds = now_s - self._lost.pop(what, now_s)
        self.recoveries.append({"what": what, "seconds": seconds})
        self.tell(
            "recovered",
            member,
            what=what,
            seconds=seconds,
            sentence=sentence.format(seconds=f"{seconds:.2f}"),
        )


class _Core(Protocol):
    """A membership as its launcher drives it."""

    next_slot: int

    def begin(self) -> list[Any]: ...

    def handle(self, event: Any) -> list[Any]: ...


class RunLauncher(ABC, Generic[_M]):
    """Runs one job to its end; `_run` is called once.

    `assemble` creates the members; leaving its context ends all of them. `rings` are the event rings of all roles,
    those of the workers under the number of their slot. Commands, from any thread, change the slots during the run.
    """

    _membership: _Core
    _members: _M
    _log: MemberLog

    def __init__(
        self,
        assemble: Callable[[Watched], AbstractContextManager[_M]],
        rings: Sequence[EventRing],
        *,
        most_slots: int,
        reports: TypedNotes,
        orders: TypedNotes,
        commands: queue.SimpleQueue[Command] | None = None,
        watchdog_s: float = 0.0,
    ) -> None:
        self._assemble, self._rings, self._most_slots = assemble, rings, most_slots
        self._reports, self._orders, self._watchdog_s = reports, orders, watchdog_s
        self._commands: queue.SimpleQueue[Command] = commands or queue.SimpleQueue()
        self._numbers: dict[int, int] = {}  # by process: the member that it is now, where that has changed
        self._slots: dict[int, int] = {}  # by member: its slot, or the one that it was started for
        self._roles: dict[int, int] = {}  # by member that has no slot: its ring's role
        self._over = False  # every step is done
        self._closing = False  # all results are in place: a death is no longer a loss

    def _run(self) -> None:
        with self._assemble(self._watched()) as members:
            self._members = members
            with members.together():
                self._do(self._membership.begin())
            while not self._over:
                self._poll()
            self._finish()

    def _poll(self) -> None:
        for event in self._members.poll(_LOOK_S):
            match event:
                case Said(member=process, payload=payload):
                    self._hear(self._numbers.get(process, process), self._reports.read(payload))
                case Ended():
                    self._bury(event)
                case Started(member=process, pid=pid):
                    self._log.tell("started", process, pid=pid)
                case Silent(member=process) if self._closing:
                    self._members.kill(process)
                case Silent(member=process, seen=seen):
                    member = self._numbers.get(process, process)
                    self._lost("silent", member, seen)
                    self._do(self._membership.handle(MemberSilent(member=member)))
                case Hung(found=found) if not self._closing:
                    hang = Hang(
                        f"{found.sentence}\n\n{found.page}", self._slots.get(found.role, -1), found.details
                    )
                    hang.blamed = self._log.names.get(found.role, "")
                    raise hang
                case Interrupted(signal=number):
                    raise as_exception(number)
        while not self._closing and not self._commands.empty():
            self._obey(self._commands.get())

    def _watched(self) -> Watched:
        """The watchdog's view of the members: event rings are keyed by role, members by number."""
        boxes = BlackBoxes({ring.role: ring for ring in self._rings})

        def last(member: int, count: int) -> Sequence[str]:
            role = self._roles.get(member, self._slots.get(member))
            return boxes.last(role, count) if role is not None else ()

        return Watched(deadline_s=self._watchdog_s, count_events=boxes.counts, last_events=last)

    def _obey(self, command: Command) -> None:
        change = command.change
        if change is None:
            command.done.set_result(-1)
            self._stop()
            return
        slot = self._membership.next_slot if isinstance(change, AddWorker) else change.slot
        try:
            if isinstance(change, AddWorker) and slot >= self._most_slots:
                raise UserError(f"no more than {self._most_slots} slots can be in one run")
            actions = self._membership.handle(change)
        except UserError as error:
            command.done.set_exception(error)
            return
        command.done.set_result(slot)
        self._do(actions)

    def _bury(self, ended: Ended) -> None:
        member = self._numbers.get(ended.member, ended.member)
        if ended.payload is not None:
            self._ended_well(member, ended.payload)
            return
        failure = (
            replace(ended.failure, rank=self._slots.get(member, -1)) if ended.failure is not None else None
        )
        if self._closing:
            if failure is not None:
                self._failed_late(member, failure)
            return
        assert failure is not None, "who returned nothing has failed"
        if failure.reported is not None and member in self._slots:
            raise failure.error()  # a task that fails in one worker would fail in its replacement
        self._lost("died", member, failure.sentence)
        error = failure.reported.error if failure.reported is not None else ""
        actions = self._membership.handle(Died(member=member, error=error, sentence=failure.sentence))
        for action in actions:
            if error and isinstance(action, Fail):
                repeated = failure.error()
                repeated.add_note(action.sentence)
                raise repeated
        self._do(actions)

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case StartWorker(member=member, slot=slot):
                    self._slots[member] = slot
                    self._log.names[member] = self._members.start_worker(member, slot)
                case KillMember(member=member):
                    self._members.kill(self._process_of(member))
                case Fail(sentence=sentence):
                    raise self._failed(sentence)
                case _:
                    self._act(action)

    def _send(self, process: int, order: Any) -> None:
        """Send an order; a member with megabytes unread is killed, since it must not block the others."""
        try:
            self._members.tell(process, self._orders.write(order))
        except Unread:
            self._members.kill(process)

    def _process_of(self, member: int) -> int:
        return next((process for process, number in self._numbers.items() if number == member), member)

    # ── a strategy's part ─────────────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _hear(self, member: int, report: Any) -> None:
        """A member's report."""

    @abstractmethod
    def _act(self, action: Any) -> None:
        """An action that only this strategy has."""

    @abstractmethod
    def _stop(self) -> None:
        """A command asks for the end of the run."""

    @abstractmethod
    def _finish(self) -> None:
        """The run is over: collect the results, and wait with a deadline until all members have ended."""

    @abstractmethod
    def _lost(self, event: str, member: int, sentence: str) -> None:
        """Record that a member `died`, or is `silent`."""

    @abstractmethod
    def _ended_well(self, member: int, payload: Mapping[str, Any]) -> None:
        """A member has ended as requested, with this final report."""

    @abstractmethod
    def _failed_late(self, member: int, failure: Failure) -> None:
        """A member has failed when the results were in place."""

    @abstractmethod
    def _failed(self, sentence: str) -> Exception:
        """The error of a run that cannot continue."""
