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

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UserError, check_count
from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.common.membership import (
    MAX_DEATHS,
    Died,
    KillMember,
    MemberJoined,
    Membership,
    MemberSilent,
    MemberState,
    RunMember,
    Slot,
    SlotPhase,
)
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.member_events import (
    Assign,
    Left,
    Over,
    Progressed,
    PsAction,
    PsEvent,
    Publish,
    Recovered,
    Rejoin,
    ShardLost,
    SlotFinished,
    StartServer,
)
from manyhands.strategies.ps.ps_messages import Concluded, Installed, ShardView, SlotView, Update, View


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipPlan:
    """The composition of a run; `can_restore` says whether there is always a snapshot of every shard to go back to."""

    num_shards: int
    num_workers: int
    replicas: int = 0
    can_restore: bool = True

    def __post_init__(self) -> None:
        for name, value in (("num_shards", self.num_shards), ("num_workers", self.num_workers)):
            check_count(name, value)
        if self.replicas not in (0, 1):
            raise UserError(f"replicas={self.replicas} must be 0 or 1")

    @property
    def num_servers(self) -> int:
        """The number of server processes: one per shard, and enough to keep replicas apart."""
        return max(self.num_shards, self.replicas + 1)


@dataclass(slots=True)
class _Shard:
    number: int
    epoch: int = 0
    primary: int = 0
    backup: int = 0
    whole: bool = False  # it has all the copies that were promised
    lost: bool = False  # no replica is left, and no snapshot has been restored yet


class _Shards:
    """Which servers hold each shard. A shard's epoch grows with every change, so that older messages are ignored."""

    def __init__(self, plan: MembershipPlan) -> None:
        self._replicas = plan.replicas
        self.all = [_Shard(number) for number in range(plan.num_shards)]

    def place(self, servers: Sequence[int]) -> None:
        """At the beginning: shard i on server i, its backup on the next one."""
        for shard in self.all:
            shard.primary, shard.epoch = servers[shard.number], 1
            shard.backup = servers[(shard.number + 1) % len(servers)] if self._replicas else 0
            shard.whole = not self._replicas

    def fill(self, joined: int, servers: Sequence[int]) -> list[int]:
        """Give every shard the replica it lacks; return those whose new primary must restore a snapshot."""
        lost = [shard for shard in self.all if not shard.primary]
        for shard in lost:
            shard.primary, shard.epoch = joined, shard.epoch + 1

        def load(member: int) -> tuple[int, int]:  # of two with equal load the later member sorts first
            return sum(member in (shard.primary, shard.backup) for shard in self.all), -member

        for shard in self.all:
            others = [member for member in servers if member != shard.primary]
            if self._replicas and not shard.backup and others:
                shard.backup, shard.epoch = min(others, key=load), shard.epoch + 1
        return [shard.number for shard in lost]

    def drop(self, dead: int) -> list[int]:
        """Promote the backups of a dead server's shards, drop its backups; return shards without a replica now."""
        gone = []
        for shard in self.all:
            if shard.primary == dead:
                # A backup without the whole state must not serve: what it lacks was confirmed to workers.
                can_follow = shard.backup and shard.whole
                shard.primary = shard.backup if can_follow else 0
                if not can_follow:
                    shard.lost = True
                    gone.append(shard.number)
            elif shard.backup != dead:
                continue
            shard.epoch, shard.backup, shard.whole = shard.epoch + 1, 0, False
        return gone

    def installed(self, message: Installed) -> bool:
        """A backup has its copy, or a primary has restored its snapshot; False for one that is of the past."""
        shard = self.all[message.shard]
        if message.epoch != shard.epoch or message.member not in (shard.primary, shard.backup):
            return False
        shard.lost = False
        shard.whole = shard.whole or message.member == shard.backup or not self._replicas
        return True

    def served_by(self, member: int) -> set[int]:
        return {shard.number for shard in self.all if shard.primary == member}


class PsMembership(Membership):
    """The launcher's record of all members, and its decisions about their roles."""

    def __init__(self, plan: MembershipPlan) -> None:
        super().__init__(first_member=1)  # 0 is nobody, in a view
        self._plan = plan
        self._shards = _Shards(plan)
        self._epoch = 0
        self._over = False  # every slot has finished; servers are needed until they have left what they hold
        self._leaving = False  # they were told to, and since then nobody had to be followed
        self._left: set[int] = set()  # shards that are where they are wanted at the end
        self._unfollowed: list[RunMember] = []  # servers that died when they had left all that they served
        self._gone: dict[int, int] = {}  # by slot that was left for good: the clock after its last update
        self._restored = False  # a shard went back to a snapshot: it may lack what slots did that were left
        self._concluded: set[int] = set()  # shards where nothing is open, by the newest view
        self._server_deaths = 0  # since every shard was whole
        self._server_errors: set[str] = set()  # that ended servers since then
        self._num_server_errors = 0
        self._shards_missed = False  # a server died: report when every shard is whole again

    @property
    def view(self) -> View:

        def slots(*phases: SlotPhase) -> tuple[SlotView, ...]:
            return tuple(SlotView(slot=slot.number, member=slot.member) for slot in self._in_phase(*phases))

        return View(
            epoch=self._epoch,
            shards=tuple(
                ShardView(one.number, one.epoch, one.primary, one.backup) for one in self._shards.all
            ),
            slots=slots(SlotPhase.ACTIVE, SlotPhase.FINISHED),
            retiring=slots(SlotPhase.RETIRING),
            gone=tuple(Update(slot=slot, clock=clock) for slot, clock in sorted(self._gone.items())),
        )

    def begin(self) -> list[PsAction]:
        servers = [StartServer(member=self._new_member(None).number) for _ in range(self._plan.num_servers)]
        slots = [self._new_slot() for _ in range(self._plan.num_workers)]
        return [*servers, *(self._start_worker(slot) for slot in slots)]

    def handle(self, event: PsEvent) -> list[PsAction]:
        """The actions for `event`; none once the run has failed, and only server events count once it is over."""
        if self._ended:
            return []
        match event:
            case AddWorker():
                return [] if self._over else self._fill_slot(self._new_slot(SlotPhase.WANTED))
            case RemoveWorker(slot=number):
                return [] if self._over else self._remove_slot(number)
            case Installed():
                if not self._shards.installed(event):
                    return []
                return [*self._whole_again(event.member), *self._end_if_done()]
            case Concluded():
                return self._end_if_done(event)
        member = self._members.get(event.member)
        if member is None or (self._over and member.slot is not None):
            return []  # it died, or has another number now; or it is a worker of a run that is over
        match event:
            case MemberJoined():
                if member.slot is not None:
                    return self._join_worker(member)
                member.state = MemberState.WORKING
                if self._epoch == 0:
                    return self._open()
                lost = self._shards.fill(member.number, self._serving())
                self._restored = self._restored or bool(lost)
                restoring = [ShardLost(shard=shard, member=member.number) for shard in lost]
                return [*restoring, self._publish(), *self._whole_again(member.number)]
            case Died(error=error):
                del self._members[member.number]
                if member.slot is None:
                    return self._bury_servers(member, error)
                slot = self._slot_of(member)
                if slot is None or slot.phase is SlotPhase.FINISHED:
                    return []
                awaited = member.state is MemberState.STARTING and slot.member == 0
                return self._vacate(slot) if awaited or slot.member == member.number else []
            case MemberSilent():
                slot = self._slot_of(member)
                if member.state is MemberState.WORKING and slot is not None:
                    member.state = (
                        MemberState.DEPOSED
                    )  # not killed: shards fence it by its number when it wakes
                    return self._vacate(slot)
                # A server is killed first: two must never both believe that they serve a shard.
                is_needed = member.state not in (MemberState.DEPOSED, MemberState.LEAVING)
                return [KillMember(member=member.number)] if is_needed else []
            case Progressed(clock=clock):
                self._progressed(member, clock)
            case Rejoin() if member.slot is not None:
                if member.state in (MemberState.DEPOSED, MemberState.WORKING):
                    if (slot := self._slot_of(member)) is not None and slot.member == member.number:
                        slot.member = 0
                    return self._place(member)
            case SlotFinished(reason=reason):
                return self._finished(member, reason)
            case Left(shards=shards):
                self._left |= self._shards.served_by(member.number).intersection(shards)
        return []

    # ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _serving(self) -> list[int]:
        return sorted(one.number for one in self._in_state(MemberState.WORKING) if one.slot is None)

    def _open(self) -> list[PsAction]:
        servers = self._serving()
        if len(servers) < self._plan.num_servers or any(slot.member == 0 for slot in self._slots.values()):
            return []
        self._shards.place(servers)
        return [self._publish()]

    def _whole_again(self, member: int) -> list[PsAction]:
        starting = any(one.slot is None for one in self._in_state(MemberState.STARTING))
        whole = all(shard.whole and not shard.lost for shard in self._shards.all)
        if not self._shards_missed or starting or not whole:
            return []
        self._shards_missed, self._server_deaths = False, 0
        self._server_errors.clear()
        return [Recovered(what="every shard", member=member)]

    def _bury_servers(self, member: RunMember, error: str) -> list[PsAction]:
        """Replace a dead server, and earlier ones that were not replaced; none, if the server is no longer needed."""
        if self._leaving and self._shards.served_by(member.number) <= self._left:
            self._unfollowed.append(member)
            return []
        self._leaving = False
        earlier, self._unfollowed = self._unfollowed, []
        actions: list[PsAction] = []
        for dead, why in (*((one, "") for one in earlier), (member, error)):
            self._left -= self._shards.served_by(dead.number)
            actions += [] if self._ended else self._bury_server(dead, why)
        return [*actions, *(self._end_if_done() if self._over and not self._ended else [])]

    def _bury_server(self, member: RunMember, error: str) -> list[PsAction]:
        if error:
            again = " again" if error in self._server_errors else ""
            self._server_errors.add(error)
            self._num_server_errors += 1
            if again or self._num_server_errors >= MAX_DEATHS:
                return self._fail(
                    f"a server raised {error}{again}, server error {self._num_server_errors} of this run: the next "
                    "server would fail in the same way"
                )
        self._server_deaths += 1
        if self._server_deaths >= MAX_DEATHS * self._plan.num_servers:
            return self._fail(
                f"servers died {self._server_deaths} times in a row without all shards being complete in between"
            )
        starts = StartServer(member=self._new_member(None).number)
        if self._epoch == 0:
            return [starts]
        self._shards_missed = True
        gone = self._shards.drop(member.number)
        if gone and not self._plan.can_restore:
            return self._fail(
                f"shard {gone[0]} is lost: server {member.number} died, no other server had a complete copy, and "
                "there is no snapshot; use replicas=1, or snapshots"
            )
        return [self._publish(), starts]

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _join_worker(self, member: RunMember) -> list[PsAction]:
        """Take the slot that the process was started for, or another vacant one, or stand by."""
        if member.state is MemberState.WORKING:
            return []  # it was fenced, has a new slot since, and reports ready again
        own = self._slot_of(member)
        # The slot may have had a standby meanwhile, whose number is higher: then this one would be fenced at once.
        if own is not None and own.member == 0 and member.number > own.last_member:
            return self._take(own, member, member.number)
        return self._place(member)

    def _place(self, member: RunMember) -> list[PsAction]:
        """Give a worker a vacant slot under a new number, or let it stand by."""
        slot = next((slot for slot in self._slots.values() if slot.member == 0), None)
        if slot is None:
            member.state = MemberState.READY
            return []
        del self._members[member.number]
        return self._take(slot, self._new_member(slot.number), member.number)

    def _take(self, slot: Slot, member: RunMember, known_as: int) -> list[PsAction]:
        member.state, member.slot = MemberState.WORKING, slot.number
        slot.member = slot.last_member = member.number
        if slot.phase is SlotPhase.WANTED:
            slot.phase = SlotPhase.ACTIVE
        assign = Assign(member=known_as, as_member=member.number, slot=slot.number)
        if self._epoch == 0:
            return [assign, *self._open()]
        lost, slot.lost = slot.lost, ""
        recovered = [Recovered(what=f"slot {slot.number}", member=member.number)] if lost else []
        return [assign, self._publish(), *recovered]

    def _fill_slot(self, slot: Slot) -> list[PsAction]:
        """Find a worker for a vacant slot: a standby, else a new process."""
        standby = next(iter(self._in_state(MemberState.READY)), None)
        return self._place(standby) if standby is not None else [self._start_worker(slot)]

    def _vacate(self, slot: Slot) -> list[PsAction]:
        if self._lose(slot, "its worker died or fell silent"):
            return self._fail(
                f"the worker in slot {slot.number} died or fell silent {slot.deaths} times in a row without getting "
                f"past clock {max(slot.clock, 0)}"
            )
        return [*([self._publish()] if self._epoch else []), *self._fill_slot(slot)]

    def _finished(self, member: RunMember, reason: Reason) -> list[PsAction]:
        slot = self._slot_of(member)
        member.state = MemberState.LEAVING
        if slot is None or slot.member != member.number:
            return []
        if slot.phase is SlotPhase.RETIRING or reason is Reason.RETIRED:
            del self._slots[slot.number]
        else:
            slot.phase = SlotPhase.FINISHED
        self._gone[slot.number] = slot.clock + 1
        return self._end_if_done() or ([self._publish()] if self._restored else [])

    def _remove_slot(self, number: int) -> list[PsAction]:
        slot = self._slots.get(number)
        active = [one.number for one in self._in_phase(SlotPhase.ACTIVE)]
        if slot is None or slot.phase is SlotPhase.RETIRING:
            raise UserError(f"slot={number} does not exist; the active slots are {active}")
        if slot.phase is SlotPhase.FINISHED:
            return []
        if slot.phase is SlotPhase.WANTED:
            del self._slots[number]
            return self._open() if self._epoch == 0 else []
        if self._epoch == 0:
            raise UserError(f"slot={number}: the run has not started; remove it after every worker joined")
        if active == [number]:
            raise UserError(f"slot={number}: the last active slot cannot be removed")
        slot.phase = SlotPhase.RETIRING  # its worker stays until the lead shard has retired it
        return [self._publish()]

    def _end_if_done(self, concluded: Concluded | None = None) -> list[PsAction]:
        """The run is over when every slot has finished, which without a restore leaves nothing open at any shard.

        After a restore, every shard has to learn how far the slots had come and to log what is lost: the view
        says it, and `Concluded` from all of them confirms it.
        """
        busy = any(slot.phase is not SlotPhase.FINISHED for slot in self._slots.values())
        if busy or any(shard.lost for shard in self._shards.all):
            return []
        if concluded is not None:
            if concluded.view != self._epoch:
                return []
            self._concluded.add(concluded.shard)
            if len(self._concluded) < len(self._shards.all):
                return []
        elif self._restored:
            return [self._publish()]
        self._over = self._leaving = True
        return [Over(shards=tuple(one.number for one in self._shards.all if one.number not in self._left))]

    def _publish(self) -> Publish:
        self._epoch += 1
        self._concluded.clear()
        return Publish(view=self.view)
