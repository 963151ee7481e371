"""Who takes part in an elastic all-reduce: messages between workers and launcher, and the launcher's pure decisions.

A **member** is one process; its number is never reused. A **slot** is the place of a worker, such as `worker 2`,
independent of the process that fills it. An **epoch** is a set of members that exchange only with each other, in
memory or over links that belong to the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from manyhands.errors import UserError, check_count, num_of
from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.common.membership import (
    Died,
    Fail,
    KillMember,
    Membership,
    MemberSilent,
    MemberState,
    RunMember,
    SlotPhase,
    StartWorker,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeat:
    """One worker of an epoch; its rank is its index among the seats."""

    slot: int
    member: int
    fresh: bool = False  # whether the member has no state yet and takes that of the donor
    host: str = ""  # the identity of the member's host; empty if all are on one host
    address: str = ""  # the `host:port` at which it accepts members of higher rank; empty if all share memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """An epoch: its members in the order of slots, and how the epoch before it ended."""

    epoch: int
    seats: tuple[EpochSeat, ...]
    donor: int | None = None
    """The member whose state the fresh members take; None if no member has any and all begin with that of rank 0."""
    # How many exchanges of the previous epoch count: a member that has passed one fewer has the result of the last
    # one in its memory, and takes it as well.
    passed: int = 0

    def rank_of(self, member: int) -> int:
        return next(rank for rank, seat in enumerate(self.seats) if seat.member == member)

    @property
    def has_fresh(self) -> bool:
        return any(seat.fresh for seat in self.seats)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReady:
    """A new member has started and waits for an epoch with a seat for it."""

    member: int
    host: str = ""  # as in `EpochSeat`
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedInEpoch:
    """A member has all resources of the epoch and takes part in its exchanges from now on."""

    member: int
    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftEpoch:
    """A member exchanges nothing more in this epoch and waits for the next view."""

    member: int
    epoch: int
    passed: int  # how many exchanges of the epoch the member knows to be complete
    step: int  # the number of steps that the member has taken
    at_border: bool  # whether its next action is a step, not a collective action between two steps, or none
    began: bool = False  # whether it had begun to compute a step that it has not taken
    has_state: bool = True  # whether it has the state of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The run is over, and this member has left the weights for the launcher."""

    member: int
    epoch: int
    steps_done: int = 0
    samples: int = 0
    seconds: float = 0.0  # the duration of training
    stopped_early: bool = False


ElasticEvent = (
    MemberReady | ArrivedInEpoch | LeftEpoch | Done | Died | MemberSilent | AddWorker | RemoveWorker
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherEpoch:
    """A member waits to join or leave: all leave the epoch together before the next step."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveEpoch:
    """A member of the epoch is lost: leave it now."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Depart:
    """The member is no longer needed: it ends."""


@dataclass(frozen=True, slots=True)
class EndSoon:
    """The run ends after the next step."""


@dataclass(frozen=True, slots=True)
class Notify:
    """Send these members this order; before `LeaveEpoch`, end every wait in the epoch."""

    members: tuple[int, ...]
    order: GatherEpoch | LeaveEpoch | Depart


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """Give the members of this view the resources of its epoch, then send them the view."""

    view: EpochView


@dataclass(frozen=True, slots=True)
class RunOver:
    """The weights are in place, and the run is over."""


ElasticAction = StartWorker | KillMember | Notify | BeginEpoch | Fail | RunOver


# `ElasticMembership.handle(event)` returns the actions to take. The rules:
#
# - The first epoch begins when every requested worker is ready; all begin with the state of rank 0.
# - A member of the epoch **dies**: every wait in the epoch is ended, and every other member reports its progress. The
#   highest count of exchanges among them decides. A step that one survivor has taken is taken by all, because its
#   result is in the memory of all; a step that no survivor has taken is computed again by the survivors.
# - A **silent** member is killed first, so that a paused process never writes into memory that others use.
# - A **new** member gets its state from a donor, the lowest slot that has it, and joins at a step boundary: at once if
#   a death has brought all members there, otherwise members are asked to gather before the next step, which loses no
#   work.
# - A lost worker is replaced in its slot, until the run is over or the slot's workers have died five times in a row
#   without a step.
# - If fewer than `min_workers` members have the state of the run, the run fails with a message that names the lost
#   ones.
# - When all steps are done, the lowest slot leaves the weights. If it dies first, the next one does.


class _Phase(Enum):
    OPENING = auto()  # some requested worker is not ready yet
    AT_WORK = auto()  # the members of the view train
    GATHERING = auto()  # members were asked to leave before the next step
    CHANGING = auto()  # members were told to leave now


class ElasticMembership(Membership):
    """The launcher's knowledge of the members, and its decisions about who takes part."""

    def __init__(self, workers: int, min_workers: int = 1) -> None:
        check_count("workers", workers)
        if not 1 <= min_workers <= workers:
            raise UserError(
                f"min_workers={min_workers} must be between 1 and the number of workers, {workers}"
            )
        super().__init__(first_member=0)
        self._workers, self._min_workers = workers, min_workers
        self._phase = _Phase.OPENING
        self._ready: dict[int, MemberReady] = {}  # by member
        self._left: dict[int, LeftEpoch] = {}  # by member: what it reported when it left the newest epoch
        self._has_state = False  # whether any member has ever had the state of the run
        self.view = EpochView(epoch=0, seats=())  # the view of the newest epoch
        self.changes = 0  # the number of members that were lost from an epoch, joined one or left it
        self.redone = 0  # the number of steps that were begun and then computed again

    def begin(self) -> list[ElasticAction]:
        return [self._start_worker(self._new_slot()) for _ in range(self._workers)]

    def handle(self, event: ElasticEvent) -> list[ElasticAction]:
        """Return the actions for `event`; none once the run has failed or is over."""
        if self._ended:
            return []
        match event:
            case AddWorker():
                return [self._start_worker(self._new_slot())]
            case RemoveWorker(slot=number):
                return self._remove(number)
        member = self._members.get(event.member)
        if member is None:
            return []  # it is already dead
        match event:
            case MemberReady():
                if member.state is not MemberState.STARTING:
                    return []  # it was dismissed while this was on its way: an epoch would wait for it in vain
                member.state, self._ready[member.number] = MemberState.READY, event
                return self._open() if self._phase is _Phase.OPENING else self._ask()
            case ArrivedInEpoch(epoch=epoch, step=step):
                if epoch == self.view.epoch:
                    self._progressed(member, step)
                return []
            case LeftEpoch():
                if event.epoch != self.view.epoch or member.state is not MemberState.WORKING:
                    return []
                member.state, self._left[member.number] = MemberState.PAUSED, event
                return self._change()
            case Done():
                # Members that are still starting are killed: they would delay the end.
                self._ended = True
                waiting = [member.number for member in self._in_state(MemberState.READY)]
                return [
                    RunOver(),
                    Notify((*self._numbers(), *waiting), Depart()),
                    *(KillMember(member=member.number) for member in self._in_state(MemberState.STARTING)),
                ]
            case MemberSilent():
                # Killed first, so that a paused process never writes into memory that others use.
                return [KillMember(member=member.number)]
            case Died(sentence=sentence):
                return self._bury(member, sentence)

    def _open(self) -> list[ElasticAction]:
        wanted = [one for one in self._members.values() if not self._is_retiring(one)]
        if any(member.state is not MemberState.READY for member in wanted):
            return []
        return self._publish(wanted, 0, set())

    def _ask(self) -> list[ElasticAction]:
        """Ask all members to gather if one waits to join or leave; in other phases all leave anyway.

        Members that are to leave stay as long as nobody is there who could continue.
        """
        waiting = self._in_state(MemberState.READY)
        leaves = {self._is_retiring(member) for member in self._in_view()} == {True, False}
        if self._phase is not _Phase.AT_WORK or not (waiting or leaves):
            return []
        self._phase = _Phase.GATHERING
        return [Notify(self._numbers(), GatherEpoch(epoch=self.view.epoch))]

    def _remove(self, number: int) -> list[ElasticAction]:
        slot, active = self._slots.get(number), self._in_phase(SlotPhase.ACTIVE)
        if slot is None or slot not in active:
            there = ", ".join(str(one.number) for one in active)
            raise UserError(f"slot={number}: there is no such worker; there are {there}")
        if len(active) - 1 < self._min_workers:
            left = num_of(len(active) - 1, "worker")
            raise UserError(f"slot={number}: {left} would be left, but min_workers={self._min_workers}")
        slot.phase = SlotPhase.RETIRING
        member = next((one for one in self._members.values() if one.slot == number), None)
        if member is None or member in self._in_view():
            return self._ask()
        member.state = MemberState.LEAVING  # it has no part in any epoch: nobody has to wait for it
        opened = self._open() if self._phase is _Phase.OPENING else []
        return [Notify((member.number,), Depart()), *opened]

    def _bury(self, member: RunMember, sentence: str) -> list[ElasticAction]:
        """Replace a dead member in its slot, and move the survivors of its epoch to a new one."""
        was_in_view = member in self._in_view()
        del self._members[member.number]
        slot = self._slots[member.slot or 0]  # every member has one
        replaced: list[ElasticAction] = []
        if slot.phase is SlotPhase.RETIRING:
            slot.lost = sentence
        elif self._lose(slot, sentence):
            return self._fail(
                f"worker {slot.number} was lost {slot.deaths} times in a row without completing a step: "
                f"{sentence}; a replacement would be lost in the same way"
            )
        else:
            replaced = [self._start_worker(slot)]
        if not was_in_view:
            return replaced
        self.changes += 1
        there = len(self._in_view())
        if there < self._min_workers:
            left = f"{num_of(there, 'worker')} {'is' if there == 1 else 'are'}" if there else "no worker is"
            return self._fail(f"{left} left, but min_workers={self._min_workers}: {self._lost()}")
        if self._phase is not _Phase.CHANGING:
            self._phase = _Phase.CHANGING
            replaced.insert(0, Notify(self._numbers(), LeaveEpoch(epoch=self.view.epoch)))
        return [*replaced, *self._change()]

    def _change(self) -> list[ElasticAction]:
        """Begin the next epoch once every member of this one has left it."""
        there = self._in_view()
        if any(member.state is MemberState.WORKING for member in there):
            return []
        reports = [self._left[member.number] for member in there]
        # A step that one survivor has taken is taken by all, because its result is in the memory of all.
        passed = max(left.passed for left in reports)
        ahead = [left for left in reports if left.passed == passed]
        self.redone += any(left.began for left in ahead)
        for member in there:
            self._progressed(member, max(left.step for left in ahead))
        if self.view.donor is not None:
            holders = {left.member for left in reports if left.has_state}
        else:  # in a first epoch, all have the state of the run once one has passed its beginning
            holders = {left.member for left in reports} if any(left.has_state for left in ahead) else set()
        going: list[RunMember] = []
        staying = there  # not at a step boundary: members that are to leave are asked again
        if all(left.at_border for left in ahead):
            going = [member for member in there if self._is_retiring(member)]
            staying = [member for member in there if member not in going]
            if not any(member.number in holders for member in staying) and going:
                # Nobody who stays could pass the state on: one stays until the new members have it.
                donor = next((one for one in going if one.number in holders), going[0])
                going, staying = [one for one in going if one is not donor], [*staying, donor]
            staying += self._in_state(MemberState.READY)
        for member in going:
            member.state = MemberState.LEAVING
            self.changes += 1
        departs: list[ElasticAction] = [Notify((one.number,), Depart()) for one in going]
        return [*departs, *self._publish(staying, passed, holders)]

    def _publish(self, members: list[RunMember], passed: int, holders: set[int]) -> list[ElasticAction]:
        """Begin an epoch; `holders` have the state of the run, the others get it from the lowest slot of these."""
        members = sorted(members, key=lambda member: member.slot or 0)
        donor = next((member.number for member in members if member.number in holders), None)
        if self._has_state and donor is None:
            return self._fail(f"no worker that has the state of the run is left: {self._lost()}")
        self._has_state = self._has_state or bool(holders)
        seats = tuple(
            EpochSeat(
                slot=member.slot or 0,
                member=member.number,
                fresh=bool(holders) and member.number not in holders,
                host=self._ready[member.number].host,
                address=self._ready[member.number].address,
            )
            for member in members
        )
        self.changes += sum(one.state is MemberState.READY for one in members) if self.view.epoch else 0
        for member in members:
            member.state = MemberState.WORKING
            if member.number in holders:
                self._slots[member.slot or 0].lost = ""
        self._left.clear()
        self.view = EpochView(epoch=self.view.epoch + 1, seats=seats, donor=donor, passed=passed)
        self._phase = _Phase.AT_WORK
        return [BeginEpoch(view=self.view), *self._ask()]

    def _is_retiring(self, member: RunMember) -> bool:
        return self._slots[member.slot or 0].phase is SlotPhase.RETIRING

    def _in_view(self) -> list[RunMember]:
        return self._in_state(MemberState.WORKING, MemberState.PAUSED)

    def _numbers(self) -> tuple[int, ...]:
        return tuple(member.number for member in self._in_view())

    def _lost(self) -> str:
        return "; ".join(slot.lost for slot in self._slots.values() if slot.lost)
