"""Who takes part in an elastic all-reduce: the launcher's decisions, as a pure state machine.

`handle(event)` returns the actions to take. The rules:

- The first epoch begins when every requested worker is ready; all begin with the state of rank 0.
- A member of the epoch **dies**: every wait in the epoch is ended, and every other member reports its progress. The
  highest count of exchanges among them decides. A step that one survivor has taken is taken by all, because its
  result is in the memory of all; a step that no survivor has taken is computed again by the survivors.
- A **silent** member is killed first, so that a paused process never writes into memory that others use.
- A **new** member gets its state from a donor, the lowest slot that has it, and joins at a step boundary: at once if
  a death has brought all members there, otherwise members are asked to gather before the next step, which loses no
  work.
- A lost worker is replaced in its slot, until the run is over or the slot's workers have died five times in a row
  without a step.
- If fewer than `min_workers` members have the state of the run, the run fails with a message that names the lost
  ones.
- When all steps are done, the lowest slot leaves the weights. If it dies first, the next one does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from manyhands.errors import UserError
from manyhands.places.run_commands import AddWorker, RemoveWorker
from manyhands.strategies.allreduce.elastic.elastic_messages import (
    Abort,
    ArrivedInEpoch,
    Ask,
    BeginEpoch,
    Dismiss,
    Done,
    ElasticAction,
    ElasticEvent,
    EpochSeat,
    EpochView,
    GiveUp,
    KillWorker,
    LeftEpoch,
    MemberReady,
    RunOver,
    StartMember,
    WorkerLost,
    WorkerSilent,
)

__all__ = ["MAX_DEATHS", "ElasticMembership", "ElasticPlan"]

MAX_DEATHS = 5
"""The run fails after this many deaths in a row in one slot without a step between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlan:
    """The settings of an elastic run that membership depends on."""

    workers: int
    min_workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"workers={self.workers} must be at least 1")
        if not 1 <= self.min_workers <= self.workers:
            raise UserError(
                f"min_workers={self.min_workers} must lie between 1 and the number of workers, {self.workers}"
            )


class _Phase(Enum):
    OPENING = auto()  # some requested worker is not ready yet
    AT_WORK = auto()  # the members of the view train
    GATHERING = auto()  # members were asked to leave before the next step
    CHANGING = auto()  # members were told to leave now
    ENDED = auto()  # the run has failed or is over


class _State(Enum):
    STARTING = auto()  # asked for
    READY = auto()  # waits for an epoch
    IN = auto()  # has a seat in the view
    LEFT = auto()  # had one, and has left
    GOING = auto()  # was dismissed


@dataclass(slots=True)
class _Member:
    number: int
    slot: int
    state: _State = _State.STARTING
    left: LeftEpoch | None = None
    host: str = ""
    address: str = ""


@dataclass(slots=True)
class _Slot:
    number: int
    member: int | None = None
    retiring: bool = False
    step: int = -1  # the highest step that any worker of the slot has reported
    deaths: int = 0  # deaths since that step
    lost: str = ""  # how its last worker was lost, until a replacement starts


class ElasticMembership:
    """The launcher's knowledge of the members, and its decisions about who takes part."""

    def __init__(self, plan: ElasticPlan) -> None:
        self._plan = plan
        self._phase = _Phase.OPENING
        self._members: dict[int, _Member] = {}
        self._slots: dict[int, _Slot] = {}
        self._next_member = 0
        self._has_state = False  # whether any member has ever had the state of the run
        self.view = EpochView(epoch=0, seats=())
        """The view of the newest epoch."""

        self.changes = 0
        """The number of members that were lost from an epoch, joined one or left it."""

        self.redone = 0
        """The number of steps that were begun and then computed again."""

    def begin(self) -> list[ElasticAction]:
        """Return the actions that start all members."""
        return [self._start(self._new_slot()) for _ in range(self._plan.workers)]

    def handle(self, event: ElasticEvent) -> list[ElasticAction]:
        """Return the actions for `event`; none once the run has failed or is over."""
        if self._phase is _Phase.ENDED:
            return []
        match event:
            case AddWorker():
                return [self._start(self._new_slot())]
            case RemoveWorker(slot=number):
                return self._remove(number)
        member = self._members.get(event.member)
        if member is None:
            return []  # it is already dead
        match event:
            case MemberReady(host=host, address=address):
                member.state, member.host, member.address = _State.READY, host, address
                return self._open() if self._phase is _Phase.OPENING else self._ask()
            case ArrivedInEpoch(epoch=epoch, step=step):
                if epoch == self.view.epoch:
                    self._seen(member, step)
                return []
            case LeftEpoch():
                return self._left(member, event)
            case Done():
                return self._end()
            case WorkerSilent():
                return [KillWorker(member=member.number)]
            case WorkerLost(sentence=sentence):
                return self._bury(member, sentence)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that have or will have a worker."""
        return tuple(slot.number for slot in self._slots.values() if not slot.retiring)

    @property
    def next_slot(self) -> int:
        """The number of the next slot to be added."""
        return max(self._slots, default=-1) + 1

    # ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _new_slot(self) -> _Slot:
        number = self.next_slot
        self._slots[number] = _Slot(number)
        return self._slots[number]

    def _start(self, slot: _Slot) -> StartMember:
        member = _Member(self._next_member, slot.number)
        self._next_member += 1
        self._members[member.number] = member
        slot.member = member.number
        return StartMember(member=member.number, slot=slot.number)

    def _open(self) -> list[ElasticAction]:
        """Begin the first epoch once every requested worker is ready."""
        wanted = [slot for slot in self._slots.values() if not slot.retiring]
        if any(slot.member is None or not self._is(slot.member, _State.READY) for slot in wanted):
            return []
        return self._publish([self._members[slot.member] for slot in wanted if slot.member is not None], 0)

    def _ask(self) -> list[ElasticAction]:
        """Ask all members to gather if one waits to join or leave; in other phases all leave anyway."""
        waiting = any(member.state is _State.READY for member in self._members.values())
        going = any(self._slots[member.slot].retiring for member in self._in_view())
        if self._phase is not _Phase.AT_WORK or not (waiting or going):
            return []
        self._phase = _Phase.GATHERING
        return [Ask(epoch=self.view.epoch, members=self._numbers())]

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _remove(self, number: int) -> list[ElasticAction]:
        slot = self._slots.get(number)
        if slot is None or slot.retiring:
            there = ", ".join(map(str, self.slots))
            raise UserError(f"slot={number}: there is no such worker; there are {there}")
        if len(self.slots) - 1 < self._plan.min_workers:
            raise UserError(
                f"slot={number}: {len(self.slots) - 1} workers would be left, and min_workers={self._plan.min_workers}"
            )
        slot.retiring = True
        member = self._members.get(slot.member) if slot.member is not None else None
        if member is None or member.state in (_State.IN, _State.LEFT):
            return self._ask()
        member.state = _State.GOING
        dismissed: list[ElasticAction] = [Dismiss(member=member.number)]
        return [*dismissed, *(self._open() if self._phase is _Phase.OPENING else [])]

    def _bury(self, member: _Member, sentence: str) -> list[ElasticAction]:
        """Replace a dead member in its slot, and move the survivors of its epoch to a new one."""
        del self._members[member.number]
        slot = self._slots[member.slot]
        followed = self._follow(slot, sentence)
        if self._phase is _Phase.ENDED or member.state not in (_State.IN, _State.LEFT):
            return followed
        self.changes += 1
        there = self._in_view()
        if len(there) < self._plan.min_workers:
            return self._fail(self._too_few(len(there)))
        actions: list[ElasticAction] = []
        if self._phase is not _Phase.CHANGING:
            self._phase = _Phase.CHANGING
            actions.append(Abort(epoch=self.view.epoch, members=self._numbers()))
        return [*actions, *followed, *self._change()]

    def _follow(self, slot: _Slot, sentence: str) -> list[ElasticAction]:
        slot.member, slot.lost = None, sentence
        if slot.retiring:
            return []
        slot.deaths += 1
        if slot.deaths >= MAX_DEATHS:
            return self._fail(
                f"worker {slot.number} was lost {slot.deaths} times in a row without taking a step between: "
                f"{sentence}; the next one would be lost in the same way"
            )
        return [self._start(slot)]

    def _too_few(self, left: int) -> str:
        there = "no worker is" if not left else "1 worker is" if left == 1 else f"{left} workers are"
        return f"{there} left, and min_workers={self._plan.min_workers}: {self._lost()}"

    def _lost(self) -> str:
        return "; ".join(slot.lost for slot in self._slots.values() if slot.lost)

    # ── from one epoch to the next ────────────────────────────────────────────────────────────────────────────────────

    def _left(self, member: _Member, left: LeftEpoch) -> list[ElasticAction]:
        if left.epoch != self.view.epoch or member.state is not _State.IN:
            return []
        member.state, member.left = _State.LEFT, left
        return self._change()

    def _change(self) -> list[ElasticAction]:
        """Begin the next epoch once every member of this one has left it."""
        there = self._in_view()
        if any(member.left is None for member in there):
            return []
        told = [member.left for member in there if member.left is not None]
        passed = max(left.passed for left in told)
        ahead = [left for left in told if left.passed == passed]
        self.redone += any(left.began for left in ahead)
        for member in there:
            self._seen(member, max(left.step for left in ahead))
        going = [member for member in there if self._slots[member.slot].retiring]
        staying = [member for member in there if member not in going]
        if all(left.at_border for left in ahead):
            staying += [member for member in self._members.values() if member.state is _State.READY]
        else:
            going, staying = [], there  # not at a step boundary: members that are to leave are asked again
        dismissed: list[ElasticAction] = [Dismiss(member=member.number) for member in going]
        for member in going:
            member.state = _State.GOING
            self.changes += 1
        return [*dismissed, *self._publish(staying, passed, self._settled(there, ahead))]

    def _settled(self, there: list[_Member], ahead: list[LeftEpoch]) -> set[int]:
        """The members with the state of the run; in a first epoch, all of them once one has passed its beginning."""
        if self.view.donor is None:
            return {member.number for member in there} if any(left.settled for left in ahead) else set()
        return {member.number for member in there if member.left is not None and member.left.settled}

    def _publish(
        self, members: list[_Member], passed: int, settled: set[int] | None = None
    ) -> list[ElasticAction]:
        have = settled or set()
        if self._has_state and not have.intersection(member.number for member in members):
            return self._fail(f"nobody who has the state of the run is left: {self._lost()}")
        self._has_state = self._has_state or bool(have)
        members = sorted(members, key=lambda member: member.slot)
        seats = tuple(
            EpochSeat(
                slot=member.slot,
                member=member.number,
                fresh=bool(have) and member.number not in have,
                host=member.host,
                address=member.address,
            )
            for member in members
        )
        self.changes += sum(member.state is _State.READY for member in members) if self.view.epoch else 0
        for member in members:
            member.state, member.left = _State.IN, None
            if member.number in have:
                self._slots[member.slot].lost = ""
        donor = next((member.number for member in members if member.number in have), None)
        self.view = EpochView(epoch=self.view.epoch + 1, seats=seats, donor=donor, passed=passed)
        self._phase = _Phase.AT_WORK
        return [BeginEpoch(view=self.view), *self._ask()]

    def _seen(self, member: _Member, step: int) -> None:
        slot = self._slots[member.slot]
        if step > slot.step:
            slot.step, slot.deaths = step, 0

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> list[ElasticAction]:
        """Dismiss members of the view and ready ones; kill those still starting, which would delay the end."""
        self._phase = _Phase.ENDED
        waiting = [member.number for member in self._members.values() if member.state is _State.READY]
        coming = [member.number for member in self._members.values() if member.state is _State.STARTING]
        return [
            RunOver(),
            *(Dismiss(member=number) for number in (*self._numbers(), *waiting)),
            *(KillWorker(member=number) for number in coming),
        ]

    def _fail(self, sentence: str) -> list[ElasticAction]:
        self._phase = _Phase.ENDED
        return [GiveUp(sentence=sentence)]

    # ── queries ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _in_view(self) -> list[_Member]:
        """The live members of the epoch, whether or not they have left it."""
        return [member for member in self._members.values() if member.state in (_State.IN, _State.LEFT)]

    def _numbers(self) -> tuple[int, ...]:
        return tuple(member.number for member in self._in_view())

    def _is(self, number: int, state: _State) -> bool:
        return number in self._members and self._members[number].state is state
