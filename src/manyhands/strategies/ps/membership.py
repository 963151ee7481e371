"""Which member serves each shard and works in each slot: the launcher's decisions, as a pure state machine.

`handle(event)` returns what to do. The rules:

- Every process is a **member**; numbers only grow, and a slot's holder always has a higher number than its
  predecessors. That number fences a process that was paused: a shard obeys the highest number it has seen.
- The first view is published when every server and every worker of the plan has joined.
- A dead server: its replicas take over at once, and a new process is started. When that has joined, it is given every
  shard that lacks a primary (no replica was left: it must restore a snapshot) or a backup. A **silent** server is
  killed first: two servers must never both believe that they serve a shard.
- A dead or silent worker: its slot is vacant until another worker takes it. A silent one is not killed: when it wakes
  it is fenced, reports it (`Rejoin`), and gets a vacant slot under a new number. If none is vacant it becomes a
  **standby**, the first to be used at the next death.
- A worker that leaves for good is named in every later view, with the clock after its last update. A shard that was
  restored from an older snapshot learns from this what is lost; without such a shard nobody needs to be told.
- A slot that is removed keeps its worker, and is given successors, until the lead shard has retired it.
- A slot whose workers die five times in a row without progress ends the run, and so do servers that die repeatedly
  while the shards are not whole: the cause would kill the next one too.
- A server that raises is a dead server. If one raises the same type of error again before every shard is whole, or if
  servers have raised five times in all, the cause is not in the process: the run ends.
- Servers that die when every slot has finished are still replaced, until everything has been handed over. One that
  had handed over all that it served is not, unless another dies that had not: its successor may need all shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from manyhands.errors import UserError
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.member_events import (
    AddSlot,
    Assign,
    Died,
    Fail,
    KillMember,
    Left,
    MemberJoined,
    MembershipAction,
    MembershipEvent,
    MemberSilent,
    Over,
    Progressed,
    Publish,
    Recovered,
    Rejoin,
    RemoveSlot,
    ShardLost,
    SlotFinished,
    StartServer,
    StartWorker,
)
from manyhands.strategies.ps.ps_messages import Concluded, Installed, ShardView, SlotView, Update, View

__all__ = ["MAX_DEATHS", "Membership", "MembershipPlan"]

MAX_DEATHS = 5
"""The number of deaths in a row without progress, of one slot's workers or per server, that ends the run.

The same number of errors raised by servers, in all, ends it too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPlan:
    """The composition of a run; `can_restore` says whether there is always a snapshot of every shard to go back
    to.
    """

    num_shards: int
    num_workers: int
    replicas: int = 0
    can_restore: bool = True

    def __post_init__(self) -> None:
        for name, value in (("num_shards", self.num_shards), ("num_workers", self.num_workers)):
            if value < 1:
                raise UserError(f"{name}={value}: must be at least 1")
        if self.replicas not in (0, 1):
            raise UserError(f"replicas={self.replicas}: allowed are 0 and 1")

    @property
    def num_servers(self) -> int:
        """The number of server processes: one per shard, and enough to keep replicas apart."""
        return max(self.num_shards, self.replicas + 1)


class _State(Enum):
    STARTING = auto()  # asked for; has not joined yet
    SERVING = auto()  # a server that has joined
    WORKING = auto()  # a worker that holds a slot
    STANDBY = auto()  # a worker without a slot, ready for one
    DEPOSED = auto()  # a silent worker whose slot was taken away; it may wake
    LEFT = auto()  # a worker that has finished; its process may end


@dataclass(slots=True)
class _Member:
    number: int
    state: _State
    slot: int | None  # None: a server


class _Phase(Enum):
    WANTED = auto()  # added; not in the view until a worker is there, so that nobody waits for it
    ACTIVE = auto()  # in the view
    RETIRING = auto()  # out of the view; what it owes is still awaited
    FINISHED = auto()  # in the view; its worker has nothing more to do


@dataclass(slots=True)
class _Slot:
    number: int
    phase: _Phase
    member: int = 0  # 0: vacant
    last_member: int = 0  # the highest number that ever held it
    missed: bool = False  # its worker died or was deposed: report when it is taken again
    clock: int = -1  # the furthest that any of its workers has come
    deaths: int = 0  # since then


@dataclass(slots=True)
class _Shard:
    number: int
    epoch: int = 0
    primary: int = 0
    backup: int = 0
    whole: bool = False  # it has all the copies that were promised
    lost: bool = False  # no replica is left, and no snapshot has been restored yet


class Membership:
    """The launcher's record of all members, and its decisions about their roles."""

    def __init__(self, plan: MembershipPlan) -> None:
        self._plan = plan
        self._members: dict[int, _Member] = {}
        self._slots: dict[int, _Slot] = {}
        self._shards = [_Shard(number) for number in range(plan.num_shards)]
        self._highest_member = 0
        self._highest_slot = -1
        self._epoch = 0
        self._ended = False  # it has failed
        self._over = (
            False  # every slot has finished; servers are still needed until they have left what they hold
        )
        self._leaving = False  # they were told to, and since then nobody had to be followed
        self._left: set[int] = set()  # shards that are where they are wanted at the end
        self._unfollowed: list[_Member] = []  # servers that died when they had left all that they served
        self._gone: dict[int, int] = {}  # by slot that was left for good: the clock after its last update
        self._restored = False  # a shard went back to a snapshot: it may lack what slots did that were left
        self._concluded: set[int] = set()  # shards where nothing is open, by the newest view
        self._server_deaths = 0  # since every shard was whole
        self._server_errors: set[str] = set()  # that ended servers since then
        self._num_server_errors = 0
        self._shards_missed = False  # a server died: report when every shard is whole again

    @property
    def view(self) -> View:
        """The current membership."""
        return View(
            epoch=self._epoch,
            shards=tuple(
                ShardView(shard=shard.number, epoch=shard.epoch, primary=shard.primary, backup=shard.backup)
                for shard in self._shards
            ),
            slots=self._places(_Phase.ACTIVE, _Phase.FINISHED),
            retiring=self._places(_Phase.RETIRING),
            gone=tuple(Update(slot=slot, clock=clock) for slot, clock in sorted(self._gone.items())),
        )

    def begin(self) -> list[MembershipAction]:
        """Start all servers and workers of the plan."""
        servers = [self._start_server() for _ in range(self._plan.num_servers)]
        slots = [self._new_slot(_Phase.ACTIVE) for _ in range(self._plan.num_workers)]
        return [*servers, *(self._start_worker(slot) for slot in slots)]

    def handle(self, event: MembershipEvent) -> list[MembershipAction]:
        """The actions for `event`; none once the run has failed, and only server events count once it is over."""
        if self._ended or (self._over and not self._concerns_servers(event)):
            return []
        match event:
            case AddSlot():
                return self._settle_in(self._new_slot(_Phase.WANTED))
            case RemoveSlot(slot=number):
                return self._remove_slot(number)
            case Installed():
                return self._installed(event)
            case Concluded():
                return self._conclude(event)
        member = self._members.get(event.member)
        if member is None:
            return []  # it died, or has another number now
        match event:
            case MemberJoined():
                return self._join_server(member) if member.slot is None else self._join_worker(member)
            case Died(error=error):
                return self._bury(member, error)
            case MemberSilent():
                return self._silent(member)
            case Progressed(clock=clock):
                return self._progressed(member, clock)
            case Rejoin():
                return self._rejoin(member)
            case SlotFinished(reason=reason):
                return self._finished(member, reason)
            case Left(shards=shards):
                self._left |= self._served_by(member.number).intersection(shards)
                return []

    # ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_server(self) -> StartServer:
        return StartServer(member=self._new_member(_State.STARTING, None).number)

    def _join_server(self, member: _Member) -> list[MembershipAction]:
        member.state = _State.SERVING
        return self._open() if self._epoch == 0 else self._fill(member)

    def _open(self) -> list[MembershipAction]:
        """Publish the first view once all have joined: shard i on server i, its backup on the next one."""
        servers = self._serving()
        if len(servers) < self._plan.num_servers or any(slot.member == 0 for slot in self._slots.values()):
            return []
        for shard in self._shards:
            shard.primary, shard.epoch = servers[shard.number], 1
            shard.backup = servers[(shard.number + 1) % len(servers)] if self._plan.replicas else 0
            shard.whole = not self._plan.replicas
        return [self._publish()]

    def _fill(self, joined: _Member) -> list[MembershipAction]:
        """Give every shard the replica it lacks, now that one more server has joined."""
        actions: list[MembershipAction] = []
        for shard in self._shards:
            if not shard.primary:
                shard.primary, shard.epoch = joined.number, shard.epoch + 1
                self._restored = True
                actions.append(ShardLost(shard=shard.number, member=joined.number))
        for shard in self._shards:
            others = [member for member in self._serving() if member != shard.primary]
            if self._plan.replicas and not shard.backup and others:
                shard.backup, shard.epoch = min(others, key=self._load), shard.epoch + 1
        return [*actions, self._publish(), *self._whole_again(joined.number)]

    def _load(self, member: int) -> tuple[int, int]:
        """A server's load; of two with equal load the later member sorts first."""
        return sum(member in (shard.primary, shard.backup) for shard in self._shards), -member

    def _installed(self, message: Installed) -> list[MembershipAction]:
        """Handle a backup that has its copy, or a primary that has restored its snapshot."""
        shard = self._shards[message.shard]
        if message.epoch != shard.epoch or message.member not in (shard.primary, shard.backup):
            return []
        shard.lost = False
        shard.whole = shard.whole or message.member == shard.backup or not self._plan.replicas
        return [*self._whole_again(message.member), *self._end_if_done()]

    def _whole_again(self, member: int) -> list[MembershipAction]:
        starting = any(
            other.slot is None and other.state is _State.STARTING for other in self._members.values()
        )
        if not self._shards_missed or starting or not all(s.whole and not s.lost for s in self._shards):
            return []
        self._shards_missed, self._server_deaths = False, 0
        self._server_errors.clear()
        return [Recovered(what="every shard", member=member)]

    def _served_by(self, member: int) -> set[int]:
        return {shard.number for shard in self._shards if shard.primary == member}

    def _bury_servers(self, member: _Member, error: str) -> list[MembershipAction]:
        """Replace a dead server, and earlier ones that were not replaced; none, if the server is no longer
        needed.
        """
        if self._leaving and self._served_by(member.number) <= self._left:
            self._unfollowed.append(member)
            return []
        self._leaving = False
        earlier, self._unfollowed = self._unfollowed, []
        actions: list[MembershipAction] = []
        for dead, why in (*((one, "") for one in earlier), (member, error)):
            self._left -= self._served_by(dead.number)
            actions += [] if self._ended else self._bury_server(dead, why)
        return [*actions, *(self._end_if_done() if self._over and not self._ended else [])]

    def _bury_server(self, member: _Member, error: str) -> list[MembershipAction]:
        if error:
            again = " again" if error in self._server_errors else ""
            self._server_errors.add(error)
            self._num_server_errors += 1
            if again or self._num_server_errors >= MAX_DEATHS:
                return self._fail(
                    f"a server raised {error}{again}, which makes {self._num_server_errors} errors of servers: "
                    "the next one would fail in the same way"
                )
        self._server_deaths += 1
        if self._server_deaths >= MAX_DEATHS * self._plan.num_servers:
            return self._fail(
                f"servers died {self._server_deaths} times in a row, and not once between were all shards whole"
            )
        if self._epoch == 0:
            return [self._start_server()]
        self._shards_missed = True
        for shard in self._shards:
            if member.number not in (shard.primary, shard.backup):
                continue
            if self._hand_over(shard, member.number) and not self._plan.can_restore:
                return self._fail(
                    f"shard {shard.number} is gone: server {member.number} died, no other server had all of it, and "
                    "there is no snapshot; use replicas=1, or snapshots"
                )
        return [self._publish(), self._start_server()]

    def _hand_over(self, shard: _Shard, dead: int) -> bool:
        """Promote the backup of a dead primary, or drop a dead backup; returns whether the shard has no replica
        left.
        """
        shard.epoch += 1
        if shard.primary != dead:
            shard.backup, shard.whole = 0, False
            return False
        gone = not (shard.backup and shard.whole)
        shard.primary, shard.backup, shard.whole = (0 if gone else shard.backup), 0, False
        shard.lost = shard.lost or gone
        return gone

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_worker(self, slot: _Slot) -> StartWorker:
        return StartWorker(member=self._new_member(_State.STARTING, slot.number).number, slot=slot.number)

    def _join_worker(self, member: _Member) -> list[MembershipAction]:
        """Take the slot that the process was started for, or another vacant one, or stand by."""
        if member.state is _State.WORKING:
            return []  # it was fenced, has a new slot since, and reports ready again
        own = self._slots.get(member.slot) if member.slot is not None else None
        if own is not None and own.member == 0 and member.number > own.last_member:
            return self._take(own, member, member.number)
        return self._place(member)

    def _place(self, member: _Member) -> list[MembershipAction]:
        """Give a worker a vacant slot under a new number, or let it stand by."""
        slot = next((slot for slot in self._slots.values() if slot.member == 0), None)
        if slot is None:
            member.state = _State.STANDBY
            return []
        del self._members[member.number]
        return self._take(slot, self._new_member(_State.STANDBY, slot.number), member.number)

    def _take(self, slot: _Slot, member: _Member, known_as: int) -> list[MembershipAction]:
        member.state, member.slot = _State.WORKING, slot.number
        slot.member = slot.last_member = member.number
        if slot.phase is _Phase.WANTED:
            slot.phase = _Phase.ACTIVE
        assign = Assign(member=known_as, as_member=member.number, slot=slot.number)
        if self._epoch == 0:
            return [assign, *self._open()]
        actions: list[MembershipAction] = [assign, self._publish()]
        if slot.missed:
            slot.missed = False
            actions.append(Recovered(what=f"slot {slot.number}", member=member.number))
        return actions

    def _settle_in(self, slot: _Slot) -> list[MembershipAction]:
        """Find a worker for a vacant slot: a standby, else a new process."""
        standby = next((m for m in self._members.values() if m.state is _State.STANDBY), None)
        return self._place(standby) if standby is not None else [self._start_worker(slot)]

    def _vacate(self, slot: _Slot) -> list[MembershipAction]:
        slot.member, slot.deaths, slot.missed = 0, slot.deaths + 1, True
        if slot.deaths >= MAX_DEATHS:
            return self._fail(
                f"the worker in slot {slot.number} died or fell silent {slot.deaths} times in a row without getting "
                f"past clock {max(slot.clock, 0)}"
            )
        published: list[MembershipAction] = [self._publish()] if self._epoch else []
        return [*published, *self._settle_in(slot)]

    def _bury(self, member: _Member, error: str) -> list[MembershipAction]:
        del self._members[member.number]
        if member.slot is None:
            return self._bury_servers(member, error)
        slot = self._slots.get(member.slot)
        if slot is None or slot.phase is _Phase.FINISHED:
            return []
        awaited = member.state is _State.STARTING and slot.member == 0
        return self._vacate(slot) if awaited or slot.member == member.number else []

    def _silent(self, member: _Member) -> list[MembershipAction]:
        match member.state:
            case _State.STARTING | _State.SERVING | _State.STANDBY:
                return [KillMember(member=member.number)]
            case _State.WORKING:
                member.state = _State.DEPOSED
                slot = self._slots[member.slot] if member.slot is not None else None
                return self._vacate(slot) if slot is not None else []
            case _State.DEPOSED | _State.LEFT:
                return []

    def _progressed(self, member: _Member, clock: int) -> list[MembershipAction]:
        slot = self._slots.get(member.slot) if member.slot is not None else None
        if slot is not None and clock > slot.clock:
            slot.clock, slot.deaths = clock, 0
        return []

    def _rejoin(self, member: _Member) -> list[MembershipAction]:
        if member.state not in (_State.DEPOSED, _State.WORKING):
            return []
        slot = self._slots.get(member.slot) if member.slot is not None else None
        if slot is not None and slot.member == member.number:
            slot.member = 0
        return self._place(member)

    def _finished(self, member: _Member, reason: Reason) -> list[MembershipAction]:
        slot = self._slots.get(member.slot) if member.slot is not None else None
        member.state = _State.LEFT
        if slot is None or slot.member != member.number:
            return []
        if slot.phase is _Phase.RETIRING or reason is Reason.RETIRED:
            del self._slots[slot.number]
        else:
            slot.phase = _Phase.FINISHED
        self._gone[slot.number] = slot.clock + 1
        return self._end_if_done() or ([self._publish()] if self._restored else [])

    def _end_if_done(self) -> list[MembershipAction]:
        """The run is over when every slot has finished, which without a restore leaves nothing open at any shard.

        After a restore, every shard has to learn how far the slots had come and to log what is lost: the view
        says it, and `Concluded` from all of them confirms it.
        """
        if not self._is_done():
            return []
        if self._restored:
            return [self._publish()]
        return [self._let_leave()]

    def _let_leave(self) -> Over:
        self._over = self._leaving = True
        return Over(shards=tuple(shard.number for shard in self._shards if shard.number not in self._left))

    def _is_done(self) -> bool:
        busy = any(slot.phase is not _Phase.FINISHED for slot in self._slots.values())
        return not busy and not any(shard.lost for shard in self._shards)

    def _conclude(self, message: Concluded) -> list[MembershipAction]:
        if message.view != self._epoch or not self._is_done():
            return []
        self._concluded.add(message.shard)
        return [self._let_leave()] if len(self._concluded) == len(self._shards) else []

    def _concerns_servers(self, event: MembershipEvent) -> bool:
        match event:
            case Installed() | Concluded():
                return True
            case AddSlot() | RemoveSlot():
                return False
        member = self._members.get(event.member)
        return member is not None and member.slot is None

    def _remove_slot(self, number: int) -> list[MembershipAction]:
        slot = self._slots.get(number)
        active = [s.number for s in self._slots.values() if s.phase is _Phase.ACTIVE]
        if slot is None or slot.phase is _Phase.RETIRING:
            raise UserError(f"slot={number}: there is no such slot to remove; active are {active}")
        if slot.phase is _Phase.FINISHED:
            return []
        if slot.phase is _Phase.WANTED:
            del self._slots[number]
            return self._open() if self._epoch == 0 else []
        if self._epoch == 0:
            raise UserError(f"slot={number}: the run has not begun; remove it when every worker has come")
        if active == [number]:
            raise UserError(f"slot={number}: the last active slot cannot be removed")
        slot.phase = _Phase.RETIRING
        return [self._publish()]

    # ── both ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serving(self) -> list[int]:
        return sorted(member.number for member in self._members.values() if member.state is _State.SERVING)

    def _new_member(self, state: _State, slot: int | None) -> _Member:
        self._highest_member += 1
        member = self._members[self._highest_member] = _Member(self._highest_member, state, slot)
        return member

    def _new_slot(self, phase: _Phase) -> _Slot:
        self._highest_slot += 1
        slot = self._slots[self._highest_slot] = _Slot(self._highest_slot, phase)
        return slot

    def _places(self, *phases: _Phase) -> tuple[SlotView, ...]:
        slots = (slot for slot in self._slots.values() if slot.phase in phases)
        return tuple(SlotView(slot=slot.number, member=slot.member) for slot in slots)

    def _publish(self) -> Publish:
        self._epoch += 1
        self._concluded.clear()
        return Publish(view=self.view)

    def _fail(self, sentence: str) -> list[MembershipAction]:
        self._ended = True
        return [Fail(sentence=sentence)]
