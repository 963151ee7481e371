"""Who is a member of a run, and in which slot it works: what `ps` and elastic all-reduce decide alike. Pure.

    STARTING ──joined──► READY ──a slot, or a seat in an epoch──► WORKING ──finished, dismissed──► LEAVING
                           ▲                                       │   ▲
                           └───── wakes ── DEPOSED ◄── silent ─────┘   └──► PAUSED, between two epochs

- A **member** is one process. Its number only grows and is never given again, so that a process which was paused
  is known to belong to the past: whoever holds a slot has a higher number than its predecessors.
- A **slot** is the place of a worker, such as `worker 2`, independent of the process that fills it.
- A member that has ended is in no state: it is forgotten, and what still comes from it is ignored.
- A slot whose workers are lost `MAX_DEATHS` times in a row without progress ends the run: the cause would end the
  next one too.

docs/internals/membership.md has the states of all three memberships on one page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

MAX_DEATHS = 5
"""The number of deaths in a row without progress, of one slot's workers or per server, that ends the run."""


class MemberState(Enum):
    """What a member does; `ps` and elastic all-reduce give each state its meaning in their own cores."""

    STARTING = auto()  # requested; has not joined yet
    READY = auto()  # joined; waits for a slot (`ps`: a standby), or for an epoch with a seat for it
    WORKING = auto()  # holds a slot, has a seat in the epoch, or serves
    PAUSED = auto()  # has left its epoch, and waits for the next
    DEPOSED = auto()  # fell silent, and its slot was taken away; it may wake
    LEAVING = auto()  # has finished, or was dismissed; its process may end


class SlotPhase(Enum):
    """Whether a slot's worker is awaited."""

    WANTED = auto()  # added; not in the view until a worker is there, so that nobody waits for it
    ACTIVE = auto()
    RETIRING = auto()  # removed; what it owes is still awaited
    FINISHED = auto()  # its worker has nothing more to do


@dataclass(slots=True)
class RunMember:
    """One process."""

    number: int
    slot: int | None  # None: a server
    state: MemberState = MemberState.STARTING


@dataclass(slots=True)
class Slot:
    """The place of a worker."""

    number: int
    phase: SlotPhase
    member: int = 0  # 0: vacant
    last_member: int = 0  # the highest number that ever held it
    clock: int = -1  # the furthest that any of its workers has come
    deaths: int = 0  # since then
    lost: str = ""  # how its last worker was lost, until a replacement works


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJoined:
    """A requested process has started and can receive messages."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A member's process has ended; `error` is the type of its exception, "" if it was killed."""

    member: int
    error: str = ""
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSilent:
    """A member's heartbeat has been missing for too long: paused, starved, or cut off."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a worker process under this number, for this slot."""

    member: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMember:
    """Kill this member's process, so that a paused one cannot resume; its Died follows."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot continue."""

    sentence: str


class Membership(ABC):
    """The members and slots of a run; a strategy's membership decides on them what its events lead to."""

    @abstractmethod
    def begin(self) -> list[Any]: ...  # the first actions
    @abstractmethod
    def handle(self, event: Any) -> list[Any]: ...  # the actions that an event leads to

    def __init__(self, first_member: int) -> None:
        self._members: dict[int, RunMember] = {}
        self._slots: dict[int, Slot] = {}
        self._next_member = first_member
        self._ended = False  # it has failed, or there is nothing more to decide
        self.next_slot = 0
        """The number of the next slot to be added; numbers of removed slots are never given again."""

    def _new_member(self, slot: int | None, state: MemberState = MemberState.STARTING) -> RunMember:
        member = self._members[self._next_member] = RunMember(self._next_member, slot, state)
        self._next_member += 1
        return member

    def _new_slot(self, phase: SlotPhase = SlotPhase.ACTIVE) -> Slot:
        slot = self._slots[self.next_slot] = Slot(self.next_slot, phase)
        self.next_slot += 1
        return slot

    def _start_worker(self, slot: Slot) -> StartWorker:
        return StartWorker(member=self._new_member(slot.number).number, slot=slot.number)

    def _slot_of(self, member: RunMember) -> Slot | None:
        return self._slots.get(member.slot) if member.slot is not None else None

    def _progressed(self, member: RunMember, clock: int) -> None:
        """Progress of any of a slot's workers forgives the deaths before it."""
        slot = self._slot_of(member)
        if slot is not None and clock > slot.clock:
            slot.clock, slot.deaths = clock, 0

    def _lose(self, slot: Slot, how: str) -> bool:
        """Vacate a slot; return whether its workers were lost too often for another one to be tried."""
        slot.member, slot.lost, slot.deaths = 0, how, slot.deaths + 1
        return slot.deaths >= MAX_DEATHS

    def _fail(self, sentence: str) -> list[Any]:
        self._ended = True
        return [Fail(sentence=sentence)]

    def _in_phase(self, *phases: SlotPhase) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.phase in phases]

    def _in_state(self, *states: MemberState) -> list[RunMember]:
        return [member for member in self._members.values() if member.state in states]
