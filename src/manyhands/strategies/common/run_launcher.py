"""The launcher of a run whose members come and go: starts, watches and replaces processes as a membership decides.

The membership is a pure core: every report of a member and every event of its process goes to `handle`, and what
that returns is done here. The launcher itself decides nothing. Its death ends the run.
"""

from __future__ import annotations

import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from manyhands.errors import Hang, PeerTimeout, UserError, printable
from manyhands.observe.record.event_ring import BlackBoxes, EventRing
from manyhands.places.external import control_server as control
from manyhands.places.local import supervisor
from manyhands.places.local.control import TypedNotes, Unread
from manyhands.places.local.failure import Failure
from manyhands.places.local.packed_job import pack
from manyhands.places.local.signals import as_exception
from manyhands.places.local.watchdog import Watched
from manyhands.places.place import AddWorker, Command
from manyhands.strategies.common import membership as core

_LOOK_S: Final = 0.1
_EXTERNAL_LOOK_S: Final = 0.02  # between children and control connections
_M = TypeVar("_M", bound="MemberProcesses")


class MemberProcesses(Protocol):
    """The processes of a run, wherever they are; their numbers come from the membership and are never reused."""

    @property
    def members(self) -> tuple[int, ...]:
        """The members that have started, or are children, and were not reported as ended."""

    def start_worker(self, member: int, slot: int) -> str:
        """Request a worker for this slot; returns its name without waiting: `poll` reports when it has started."""

    def poll(self, timeout_s: float) -> Sequence[supervisor.Event | supervisor.Hung]:
        """The events so far, waiting up to `timeout_s` for the first."""

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send JSON, in order and without blocking; Unread if too much is unread. A no-op if the member has ended."""

    def batch(self) -> AbstractContextManager[None]: ...  # those requested in it are started at its end
    def kill(self, member: int) -> None: ...  # or stop listening to it; `poll` reports its end
    def ask_to_stop(self, member: int) -> None: ...


class ChildMembers(supervisor.Supervisor):
    """Members that are children of this process. The job, with all its data, is packed once for all of them."""

    def __init__(self, job: Any, num_members: int, watched: Watched) -> None:
        super().__init__(num_members=num_members, watched=watched)
        self._job, self._packed = job, -1

    def __enter__(self) -> Self:
        self._packed = pack(self._job)
        try:
            return super().__enter__()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            packed, self._packed = self._packed, -1
            if packed >= 0:
                os.close(packed)

    def start_child(
        self,
        member: int,
        name: str,
        target: Callable[..., Mapping[str, Any]],
        files: Mapping[str, int],
        env: Mapping[str, str],
    ) -> str:
        role = supervisor.Role(name=name, target=target, descriptors={"job": self._packed, **files}, env=env)
        self.start(role, member)
        return name


class ExternalMembers(ABC):
    """Externally started processes on control connections, and the leader's child if it has one; a context manager.

    Starting a member means giving its part to the process of a rank: as soon as that has connected, and again when
    another of the same rank replaces one that died. A lost member is reported as dead in any case: its messages are
    ignored, and it is told so if it still lives.

        worker 1 on hostB    joins  ──►  rank 2 is there          start_worker(member=4, slot=1)  ──►  its part
        kill -9              lost   ──►  member 4 has ended       start_worker(member=6, slot=1)       … waits
        worker 1 on hostB    joins  ──►  rank 2 is there again                                    ──►  its part

    `come_within_s` limits how long a requested process may stay away; None if the run continues without it.
    """

    def __init__(
        self,
        control_server: control.ControlServer,
        child: ChildMembers | None,
        say: Callable[[str], None],
        come_within_s: float | None = None,
    ) -> None:
        self._control_server, self._child, self._say = control_server, child, say
        self._come_within_s = come_within_s
        self._wanted: dict[int, tuple[int, float]] = {}  # by rank: the member requested, and since when
        self._at: dict[int, int] = {}  # by member: its rank
        self._member_of: dict[int, int] = {}  # by rank
        self._unreported: list[supervisor.Event | supervisor.Hung] = []

    def __enter__(self) -> Self:
        if self._child is not None:
            self._child.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    @property
    def members(self) -> tuple[int, ...]:
        """The members that are connected, without those still awaited."""
        return (*self._at, *(self._child.members if self._child is not None else ()))

    def batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def poll(self, timeout_s: float) -> Sequence[supervisor.Event | supervisor.Hung]:
        """The events so far; PeerTimeout that names a process which was not started in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._child is not None:
                self._unreported += self._child.poll(0.0)
            left_s = max(0.0, deadline - time.monotonic())
            for event in self._control_server.poll(min(_EXTERNAL_LOOK_S, left_s)):
                self._unreported += self._hear(event)
            for rank, (_, since_s) in self._wanted.items():
                waited_s = time.monotonic() - since_s
                if self._come_within_s is not None and waited_s > self._come_within_s:
                    remote = "".join(f"; {one}" for one in self._control_server.register.rejected[-3:])
                    raise PeerTimeout(
                        f"{self._name(rank)} did not connect within {waited_s:.0f} s; start it, or check on its host "
                        f"why it ended{remote}",
                        peer=-1,
                    )
            if self._unreported or time.monotonic() >= deadline:
                events, self._unreported = self._unreported, []
                return events

    def tell(self, member: int, payload: Mapping[str, Any]) -> None:
        """Send over the control connection, or the child's channel; a no-op if the member is not connected."""
        if member in self._at:
            self._control_server.tell(self._at[member], payload)
        elif self._child is not None and member in self._child.members:
            self._child.tell(member, payload)

    def kill(self, member: int) -> None:
        """Stop listening to a member and notify it; one that is not connected is no longer awaited."""
        if member in self._at:
            self._control_server.dismiss(self._at[member], "the run continues without it, or is over")
        elif self._child is not None and member in self._child.members:
            self._child.kill(member)
        self._wanted = {rank: wanted for rank, wanted in self._wanted.items() if wanted[0] != member}

    def ask_to_stop(self, member: int) -> None:
        if member in self._at:
            self._control_server.ask_to_stop(self._at[member])
        elif self._child is not None and member in self._child.members:
            self._child.ask_to_stop(member)

    def _want(self, rank: int, member: int) -> None:
        self._wanted[rank] = member, time.monotonic()
        if rank in self._control_server.members:
            self._take_in(rank)

    def _take_in(self, rank: int) -> None:
        if rank not in self._wanted:
            return  # it stands by until its predecessor's end is reported
        member, _ = self._wanted.pop(rank)
        self._at[member], self._member_of[rank] = rank, member
        self._give_part(rank, member)
        self._unreported.append(supervisor.Started(member, self._control_server.known[rank].hello.pid))

    def _hear(self, event: control.ControlEvent) -> list[supervisor.Event | supervisor.Hung]:
        match event:
            case supervisor.Started(member=rank):
                self._take_in(rank)
            case supervisor.Said(member=rank, payload=payload) if rank in self._member_of:
                return self._said(rank, payload)
            case control.Delivered(member=rank, name=name, data=data):
                self._receive(rank, name, data)
            case supervisor.Ended(member=rank):
                ended = self._ended(rank, event)
                member = self._member_of.pop(rank, None)
                if member is None:
                    return []  # it had no part yet: another may come in its place
                del self._at[member]
                failure = replace(ended.failure, rank=member) if ended.failure is not None else None
                return [ended._replace(member=member, failure=failure)]
            case control.ProcessRejected(sentence=sentence) | control.Warned(sentence=sentence):
                self._say(sentence)
        return []

    def _refuse(self, rank: int, error: Exception) -> None:
        """Dismiss a member that violated the protocol; the run continues without it."""
        self._control_server.dismiss(rank, f"it sent an invalid message: {error}")
        self._say(f"{self._name(rank)} sent an invalid message: {printable(str(error))}")

    # What a strategy fills in.

    @abstractmethod
    def _name(self, rank: int) -> str: ...
    @abstractmethod
    def _give_part(self, rank: int, member: int) -> None: ...  # tell a process which member it is
    @abstractmethod
    def _receive(self, rank: int, name: str, data: bytearray) -> None: ...  # store what it sent, or refuse it

    def _said(self, rank: int, payload: Mapping[str, Any]) -> list[supervisor.Event | supervisor.Hung]:
        return [supervisor.Said(self._member_of[rank], payload)]

    def _ended(self, rank: int, ended: supervisor.Ended) -> supervisor.Ended:
        del rank
        return ended


class MemberLog:
    """The rows of members.jsonl: `on_event` receives each, with a sentence if users should know of it."""

    def __init__(
        self, on_event: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_event, self._clock = on_event, clock
        self._began_s: float | None = None
        self._lost: dict[str, float] = {}  # what is missing, and since when
        self.names: dict[int, str] = {}  # the name of every member that was ever started
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
        row = {"epoch": epoch, "shards": shards, "slots": slots, "names": names}
        self._on_event({"event": "view", "at_s": self.seconds, **row})

    def lost(self, event: str, member: int, what: str, sentence: str) -> None:
        self._lost.setdefault(what, self._clock())
        self.tell(event, member, sentence=sentence)

    def recovered(self, member: int, what: str, sentence: str) -> None:
        """Record that `what` is there again; `sentence` may name the `{seconds}` that it took."""
        now_s = self._clock()
        seconds = now_s - self._lost.pop(what, now_s)
        recovery = {"what": what, "seconds": seconds}
        self.recoveries.append(recovery)
        self.tell("recovered", member, **recovery, sentence=sentence.format(seconds=f"{seconds:.2f}"))


class RunLauncher(ABC, Generic[_M]):
    """Runs one job to its end; `_run` is called once.

    `assemble` creates the members; leaving its context ends all of them. `rings` are the event rings of all roles,
    those of the workers under the number of their slot. Commands, from any thread, change the slots during the run.
    """

    _membership: core.Membership
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
        # The watchdog's view of the members: event rings are keyed by role, members by number.
        boxes = BlackBoxes({ring.role: ring for ring in self._rings})

        def last(member: int, count: int) -> Sequence[str]:
            role = self._roles.get(member, self._slots.get(member))
            return boxes.last(role, count) if role is not None else ()

        watched = Watched(deadline_s=self._watchdog_s, count_events=boxes.counts, last_events=last)
        with self._assemble(watched) as members:
            self._members = members
            with members.batch():
                self._do(self._membership.begin())
            while not self._over:
                self._poll()
            self._finish()

    def _poll(self) -> None:
        for event in self._members.poll(_LOOK_S):
            match event:
                case supervisor.Said(member=process, payload=payload):
                    self._hear(self._numbers.get(process, process), self._reports.read(payload))
                case supervisor.Ended():
                    self._bury(event)
                case supervisor.Started(member=process, pid=pid):
                    self._log.tell("started", process, pid=pid)
                case supervisor.Silent(member=process) if self._closing:
                    self._members.kill(process)
                case supervisor.Silent(member=process, seen=seen):
                    member = self._numbers.get(process, process)
                    self._lost("silent", member, seen)
                    self._do(self._membership.handle(core.MemberSilent(member=member)))
                case supervisor.Hung(found=found) if not self._closing:
                    hang = Hang(
                        f"{found.sentence}\n\n{found.page}", self._slots.get(found.role, -1), found.details
                    )
                    hang.blamed = self._log.names.get(found.role, "")
                    raise hang
                case supervisor.Interrupted(signal=number):
                    raise as_exception(number)
        while not self._closing and not self._commands.empty():
            self._obey(self._commands.get())

    def _obey(self, command: Command) -> None:
        change = command.change
        if change is None:
            command.done.set_result(-1)
            self._stop()
            return
        slot = self._membership.next_slot if isinstance(change, AddWorker) else change.slot
        try:
            if isinstance(change, AddWorker) and slot >= self._most_slots:
                raise UserError(f"a run has at most {self._most_slots} slots")
            actions = self._membership.handle(change)
        except UserError as error:
            command.done.set_exception(error)
            return
        command.done.set_result(slot)
        self._do(actions)

    def _bury(self, ended: supervisor.Ended) -> None:
        member = self._numbers.get(ended.member, ended.member)
        if ended.payload is not None:
            self._ended_well(member, ended.payload)
            return
        failure = ended.failure
        if failure is not None:
            failure = replace(failure, rank=self._slots.get(member, -1))
        if self._closing:
            if failure is not None:
                self._failed_late(member, failure)
            return
        assert failure is not None, "a member that returned nothing has failed"
        if failure.reported is not None and member in self._slots:
            raise failure.error()  # a task that fails in one worker would fail in its replacement
        self._lost("died", member, failure.sentence)
        error = failure.reported.error if failure.reported is not None else ""
        actions = self._membership.handle(core.Died(member=member, error=error, sentence=failure.sentence))
        for action in actions:
            if error and isinstance(action, core.Fail):
                repeated = failure.error()
                repeated.add_note(action.sentence)
                raise repeated
        self._do(actions)

    def _do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case core.StartWorker(member=member, slot=slot):
                    self._slots[member] = slot
                    self._log.names[member] = self._members.start_worker(member, slot)
                case core.KillMember(member=member):
                    self._members.kill(self._process_of(member))
                case core.Fail(sentence=sentence):
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

    # What a strategy fills in: actions that it alone has in `_act`, the end of the run by a command in `_stop`.

    @abstractmethod
    def _hear(self, member: int, report: Any) -> None: ...
    @abstractmethod
    def _act(self, action: Any) -> None: ...
    @abstractmethod
    def _stop(self) -> None: ...
    @abstractmethod
    def _finish(self) -> None:
        """The run is over: collect the results, and wait with a deadline until all members have ended."""

    @abstractmethod
    def _lost(
        self, event: str, member: int, sentence: str
    ) -> None: ...  # record that it `died`, or is `silent`
    @abstractmethod
    def _ended_well(self, member: int, payload: Mapping[str, Any]) -> None: ...
    @abstractmethod
    def _failed_late(self, member: int, failure: Failure) -> None: ...  # when the results were in place
    @abstractmethod
    def _failed(self, sentence: str) -> Exception: ...  # the error of a run that cannot continue
