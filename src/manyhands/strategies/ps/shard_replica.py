"""One server's replica of one shard: primary or backup, with replication, fencing and held reads around
`ShardCore`.

    worker ──Push──► primary ──Forward──► backup        the entry gets the next sequence number
                        ◄────Forwarded─────┘            and is committed here only now: what any member has
    worker ◄──Parameters── primary                      read survives this server's death

Without a backup an entry is committed at once. A backup commits what it is forwarded and sends nothing to
workers; when a view makes it primary, everything is already there. Reads are never replicated: workers ask again.
A push-pull is a Push and the Read behind it, handled in this order; the live server, the simulator and every replica
go through the same code, which is written for that case: no entry is queued where nothing is in flight.
Where an update counts at every shard or at none, a push becomes an entry when the Read behind it has come (see
`unconfirmed`).

The driver delivers messages between two live members in the order in which they were sent, and none is lost while
both live. Repeating a view makes the lead resend what the others may lack.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from manyhands.strategies.ps.actions import Ack, Action, Discard, Drop, Keep, Load, SendMessage
from manyhands.strategies.ps.pending_steps import Change
from manyhands.strategies.ps.ps_messages import (
    LAUNCHER,
    LEAD,
    Assigned,
    Chosen,
    ChosenKept,
    Closing,
    Concluded,
    Entry,
    Fenced,
    Forward,
    Forwarded,
    Hello,
    Install,
    Installed,
    Message,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    RowValues,
    ShardView,
    SlotsChanged,
    UpdatesLost,
    View,
    Welcome,
    Yield,
)
from manyhands.strategies.ps.shard_core import Hold, ShardConfig, ShardCore
from manyhands.strategies.ps.unconfirmed import Unconfirmed

__all__ = ["ReplicaRole", "ShardReplica"]


class ReplicaRole(Enum):
    """A server's role for a shard."""

    PRIMARY = auto()
    """It serves the shard."""
    BACKUP = auto()
    """It holds a copy and commits what the primary forwards."""
    EMPTY = auto()
    """It has no state of the shard: not yet, or not any more."""


class ShardReplica:
    """The replica of one shard on server `member`.

    A new one is empty. It becomes primary by a view, of a new shard or of what `restore` was given, and backup by
    an Install.
    """

    def __init__(self, config: ShardConfig, member: int) -> None:
        self.config = config
        self.member = member
        self.core = self._make_core(None)
        self.role = ReplicaRole.EMPTY
        self.epoch = -1
        self._restored = False
        self._owes_word = False  # to the launcher, that a restored shard has said all that was lost
        self._listening = False  # a lead that was restored: until every other shard has answered
        self._primary = 0  # of this epoch
        self._lead = (0, 0)  # epoch and member of the newest lead that we have heard of
        self._backup = 0
        self._view = View(epoch=-1, shards=(), slots=())
        self._primaries: dict[int, tuple[int, int]] = {}  # of that view: epoch and primary of every shard
        self._holders: dict[int, int] = {}  # the newest member known of each slot
        self._in_flight: deque[Entry] = deque()  # entries after core.sequence that the backup may lack
        self._forwarded = 0  # the backup has everything up to this
        self._taken: dict[int, int] = {}  # by slot with updates in flight: the clock after the last of them
        self._hellos: dict[int, Hello] = {}  # to be answered once the slot is known, or its loss is safe
        self._held: dict[int, tuple[int, int]] = {}  # reads by slot: their clock, and the member to answer
        self._unconfirmed = Unconfirmed(needed=config.confirms)
        self._waiting_for: dict[Hold, list[int]] = {Hold.OTHERS: [], Hold.SHARDS: []}  # slots of held reads
        self._mark = 0  # the mark at which those that wait for others were last looked at
        self._asked: set[Assigned] = set()  # batches that are being given out
        self._concluded = -1  # the epoch of the view in which the launcher was told that nothing is open

    @property
    def sequence(self) -> int:
        """The last entry of the log, committed or in flight."""
        return self.core.sequence + len(self._in_flight)

    # ── membership ────────────────────────────────────────────────────────────────────────────────────────────────────

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go back to a snapshot, an earlier `state()`, before the view that makes this replica primary.

        None: there is no snapshot yet, and the shard begins again; the log says so, and what that loses.
        """
        self.core = self._make_core(None if state is None else state["core"])
        self._restored = True

    def view(self, view: View) -> list[Action]:
        """Handle a membership change, or a repeated view."""
        mine = next((place for place in view.shards if place.shard == self.config.shard), None)
        if mine is None or mine.epoch < self.epoch or view.epoch < self._view.epoch:
            return []
        before, changed = self._primaries, mine.epoch > self.epoch
        self._view, self.epoch, self._primary = view, mine.epoch, mine.primary
        self._primaries = {place.shard: (place.epoch, place.primary) for place in view.shards}
        self._lead = max(self._lead, self._primaries[LEAD])
        for place in (*view.slots, *view.retiring):
            self._know(place.slot, place.member)
        if mine.primary == self.member:
            actions = self._serve(mine, changed)
            actions += self._tell_others(before) if self.config.leads else self._ask_lead(before)
            return actions + self._settle_membership()
        stays = mine.backup == self.member and self.role is ReplicaRole.BACKUP
        return self._step_down() if changed and not stays else []

    def _know(self, slot: int, member: int) -> None:
        """Record a member of a slot; a held read of an older member is dropped."""
        if member > self._holders.get(slot, 0):
            self._holders[slot] = member
            held = self._held.get(slot)
            if held is not None and held[1] < member:
                del self._held[slot]

    def _serve(self, mine: ShardView, changed: bool) -> list[Action]:
        actions: list[Action] = []
        if self.role is ReplicaRole.EMPTY and self._restored:
            actions += self.core.restore(mine.epoch)
            self._owes_word = True
        elif self.role is ReplicaRole.EMPTY:
            actions += self.core.open_log()
        if self.role is not ReplicaRole.PRIMARY:
            self.role = ReplicaRole.PRIMARY
            self._mark = self.core.mark
            self._listening = bool(self.core.awaiting)
        if not changed:
            return actions
        self._backup = 0
        # The old backup no longer counts, and the new one is installed from the committed state: commit all.
        actions += self._commit_safe()
        self._backup = mine.backup
        if self._backup:
            self._forwarded = self.core.sequence
            state = json.dumps(self.core.state())
            install = Install(
                shard=self.config.shard, epoch=self.epoch, sequence=self.core.sequence, state=state
            )
            actions.append(SendMessage(to=self._backup, message=install))
        return actions

    def _tell_others(self, before: dict[int, tuple[int, int]]) -> list[Action]:
        """At the lead: send every new primary of another shard (or, if this lead is new, every one) what it may
        lack.
        """
        mine = self._primaries[LEAD]
        everyone = before.get(LEAD) != mine or before == self._primaries
        actions: list[Action] = []
        for shard in self.core.decisions.kept:
            epoch, primary = self._primaries.get(shard, (0, 0))
            if primary and (everyone or before.get(shard) != (epoch, primary)):
                actions += [self._tell(primary, messages) for messages in self.core.greetings_to(shard)]
        return actions

    def _tell(self, to: int, message: Chosen | ChosenKept) -> SendMessage:
        """A message to another shard, stamped with the epoch: it counts only while its sender serves."""
        return SendMessage(to=to, message=replace(message, epoch=self.epoch))

    def _ask_lead(self, before: dict[int, tuple[int, int]]) -> list[Action]:
        """At another shard: announce the new primary to the lead, as earlier messages were not received."""
        mine, lead = self.config.shard, self._primaries.get(LEAD, (0, 0))
        if not lead[1] or (before.get(mine) == self._primaries[mine] and before.get(LEAD) == lead):
            return []
        return [self._tell(lead[1], self.core.kept_answer(asks=True))]

    def _settle_membership(self) -> list[Action]:
        """Log the view's slot changes, once it is certain that no other shard knows more."""
        if self.core.awaiting:
            return []
        actions = self._lose_owed()
        if self._owes_word:  # not before: the launcher ends a run that has nothing else to do
            self._owes_word = False
            installed = Installed(shard=self.config.shard, epoch=self.epoch, member=self.member)
            actions.append(SendMessage(to=LAUNCHER, message=installed))
        if self.config.leads:
            actions += self._change_slots()
        return actions + self._conclude()

    def _lose_owed(self) -> list[Action]:
        """Give up the updates of slots whose worker has left for good."""
        actions: list[Action] = []
        for last in self._view.gone:
            known, until = self._next_to_take(last.slot), self.core.owed_until(last)
            if known is not None and known < until:
                actions += self._append_lost(last.slot, until)
        return actions

    def _conclude(self) -> list[Action]:
        """Once all workers have left: make what waits the last step, and tell the launcher when nothing is open."""
        gone = {last.slot for last in self._view.gone}
        everyone_left = not self._view.retiring and all(place.slot in gone for place in self._view.slots)
        if not everyone_left or self._in_flight or self.core.awaiting:
            return []
        if self.core.steps.num_waiting:
            # Steps by clock are closed by what is lost, those of other shards by the lead's choice.
            return self._append(Closing()) if self.config.leads and not self.config.stepwise else []
        if not self.core.concluded or self._concluded == self._view.epoch:
            return []
        self._concluded = self._view.epoch
        return [SendMessage(to=LAUNCHER, message=Concluded(shard=self.config.shard, view=self._view.epoch))]

    def _change_slots(self) -> list[Action]:
        coming = [entry.slots for entry in self._in_flight if isinstance(entry, SlotsChanged)]
        latest = coming[-1] if coming else self.core.table.active
        known = set(self.core.table.records).union(*coming)
        missed = {place.slot for place in self._view.retiring} - known  # added and removed behind our back
        slots = {place.slot for place in self._view.slots}
        actions: list[Action] = []
        for wanted in (slots | missed, slots) if missed else (slots,):
            if slots and wanted != set(latest):
                latest = tuple(sorted(wanted))
                actions += self._append(SlotsChanged(slots=latest))
        return actions

    def _step_down(self) -> list[Action]:
        """Discard all state, as another server serves; entries in flight were never acknowledged."""
        had_something = self.role is not ReplicaRole.EMPTY
        self.role = ReplicaRole.EMPTY
        self.core = self._make_core(None)
        self._restored = self._owes_word = False
        self._backup = 0
        self._in_flight.clear()
        self._taken.clear()
        self._hellos.clear()
        self._held.clear()
        self._unconfirmed.clear()
        for slots in self._waiting_for.values():
            slots.clear()
        self._asked.clear()
        return [Discard(shard=self.config.shard)] if had_something else []

    def _make_core(self, state: dict[str, Any] | None) -> ShardCore:
        return ShardCore(self.config) if state is None else ShardCore.from_state(self.config, state)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: Message, sender: int) -> list[Action]:
        """The actions for a message of member `sender`."""
        match message:
            case Push() | Read() | ReadRows() | Hello():
                return self._serve_worker(message, sender)
            case Forward():
                return self._take_forward(message, sender)
            case Forwarded():
                if self.role is not ReplicaRole.PRIMARY or message.epoch != self.epoch:
                    return []
                # The backup has these entries, so they survive this server's death and may be acknowledged.
                self._forwarded = max(self._forwarded, message.sequence)
                return self._commit_safe()
            case Chosen():
                return self._take_chosen(message, sender)
            case ChosenKept():
                return self._take_kept(message, sender)
            case Install():
                return self._install(message, sender)
            case Yield():
                outlived = self.role is ReplicaRole.PRIMARY and message.epoch > self.epoch
                return self._step_down() if outlived else []
            case _:
                raise ValueError(f"shard {self.config.shard} was sent a {type(message).__name__}")

    def keeps(self, message: Push | Forward) -> bool:
        """Whether `handle` will keep the gradient of this message.

        The gradient of a fenced worker, of a known update, or of a primary of an older epoch may be gone.
        """
        if isinstance(message, Forward):
            is_next = message.sequence == self.core.sequence + 1
            return self.role is ReplicaRole.BACKUP and message.epoch >= self.epoch and is_next
        if self.role is not ReplicaRole.PRIMARY or self.core.awaiting:
            return False
        fenced = message.member < self._holders.get(message.slot, 0)
        return self._is_open(message) and (not fenced or self._unconfirmed.hears(message))

    def _is_open(self, push: Push) -> bool:
        """Whether an update is neither settled nor in flight."""
        known = self.core.outcome_of(push.slot, push.clock) is not None
        return not known and push.clock >= self._taken.get(push.slot, 0)

    @property
    def awaited_member(self) -> int | None:
        """The member that held reads wait for: that of the lowest slot whose read has not come yet."""
        others = [slot for slot in self._holders if slot not in self._held]
        return self._holders[min(others)] if self._held and others else None

    def _serve_worker(self, message: Hello | Read | ReadRows | Push, sender: int) -> list[Action]:
        if self.role is not ReplicaRole.PRIMARY or self.core.awaiting:
            return [SendMessage(to=sender, message=NotPrimary(shard=self.config.shard, epoch=self.epoch))]
        slot, member = message.slot, message.member
        if member != self._holders.get(slot):
            self._know(slot, member)
            holder = self._holders[slot]
            if member < holder:
                fenced = SendMessage(sender, Fenced(shard=self.config.shard, slot=slot, holder=holder))
                if isinstance(message, Push) and self._unconfirmed.hears(message) and self._is_open(message):
                    # Its Read may have reached another shard: its successor decides.
                    return [*self._hold(message), fenced]
                return [fenced]
        if self.config.confirms:
            self._unconfirmed.meet(slot, member)
        match message:
            case Push():
                actions = self._take_push(message)
                if message.pulls:
                    actions += self._take_read(slot, message.clock + 1, member)
                return actions
            case Read():
                return self._take_read(slot, message.clock, member)
            case Hello():
                self._held.pop(slot, None)  # asked again once the greeting is answered
                self._hellos[slot] = message
                return self._greet(message)
            case ReadRows(clock=clock):
                values = RowValues(shard=self.config.shard, slot=slot, clock=clock, version=self.core.version)
                return [SendMessage(sender, values)]

    def _greet(self, hello: Hello) -> list[Action]:
        """Log what was lost since the worker last heard of it, then welcome it."""
        known = self._next_to_take(hello.slot)
        if known is not None and hello.settled > known:
            return self._append_lost(hello.slot, hello.settled)
        return self._welcome(hello.slot)

    def _welcome(self, slot: int) -> list[Action]:
        """Answer a greeting, if the slot is known and nothing of what it reported lost is in flight."""
        hello = self._hellos.get(slot)
        next_clock = self.core.next_clock(slot)
        if hello is None or next_clock is None or next_clock < hello.settled:
            return []
        del self._hellos[slot]
        arrived = self._unconfirmed.arrived(slot)
        if self.config.confirms:
            arrived = max(arrived, self._taken.get(slot, 0))
        welcome = Welcome(
            shard=self.config.shard,
            slot=slot,
            next_clock=next_clock,
            version=self.core.version,
            arrived=arrived if arrived > next_clock else 0,
        )
        return [SendMessage(to=hello.member, message=welcome)]

    def _next_to_take(self, slot: int) -> int | None:
        """The lowest clock of a slot that is neither settled nor in flight."""
        settled = self.core.next_clock(slot)
        return None if settled is None else max(settled, self._taken.get(slot, 0))

    def _take_push(self, push: Push) -> list[Action]:
        outcome = self.core.outcome_of(push.slot, push.clock)
        if outcome is not None:
            return [Ack(push.shard, push.slot, push.clock, outcome)]
        if push.clock < self._taken.get(push.slot, 0):
            return []  # it is in flight, and acknowledged when it is safe
        if self.config.confirms and self._unconfirmed.awaits(push, self._held.get(push.slot, (-1, 0))[0]):
            return self._hold(push)
        # No update before it is missing: a worker reports how far it is (Hello) before it pushes to a new primary.
        actions: list[Action] = [] if push.skip else [self._keep(push)]
        actions += self._append(push)
        return actions

    def _hold(self, push: Push) -> list[Action]:
        """Keep a push that does not count yet."""
        before = self._unconfirmed.hold(push)
        return [*([] if before is None else self._drop(before)), *([] if push.skip else [self._keep(push)])]

    def _take_read(self, slot: int, clock: int, member: int) -> list[Action]:
        actions: list[Action] = []
        push = self._unconfirmed.resolve(slot) if self.config.confirms else None
        if push is not None:
            # The Read confirms the held push before it; any other is dropped, as its worker computes it again.
            counts = push.clock < clock and self._is_open(push)
            actions += self._append(push) if counts else self._drop(push)
        self._held[slot] = (clock, member)
        actions += self._look_at(slot)
        return actions

    def _drop(self, push: Push) -> list[Action]:
        return [] if push.skip else [Drop(shard=self.config.shard, slot=push.slot, clock=push.clock)]

    def _keep(self, push: Push) -> Keep:
        return Keep(push.shard, push.slot, push.clock, self.config.copies)

    def _take_chosen(self, chosen: Chosen, sender: int) -> list[Action]:
        if self.role is not ReplicaRole.PRIMARY or self.config.leads:
            return []  # the lead sends it again to the next primary
        if (chosen.epoch, sender) < self._lead:
            return []  # sent before that lead was replaced; its successor sends all of it again
        self._lead = (chosen.epoch, sender)
        if self.core.is_old(chosen):
            return [self._tell(sender, self.core.kept_answer())]
        return self._append(chosen)

    def _take_kept(self, kept: ChosenKept, sender: int) -> list[Action]:
        if self.role is not ReplicaRole.PRIMARY or not self.config.leads:
            return []  # the next primary of the lead greets all shards
        if kept.epoch < self._primaries.get(kept.shard, (0, 0))[0]:
            return []  # of a primary that was replaced; its successor asks
        if not kept.asks:
            return self._append(kept)
        return [self._tell(sender, messages) for messages in self.core.greetings_to(kept.shard)]

    # ── the log ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, entry: Entry) -> list[Action]:
        """Give an entry the next sequence number, forward it, and commit what is durable."""
        if not self._backup and not self._in_flight:
            return self._after(
                entry, self.core.commit(entry)
            )  # nobody else has to have it, and nothing is before it
        self._in_flight.append(entry)
        if isinstance(entry, Push | UpdatesLost):
            self._taken[entry.slot] = entry.clock + 1 if isinstance(entry, Push) else entry.until
        actions: list[Action] = []
        if self._backup:
            forward = Forward(shard=self.config.shard, epoch=self.epoch, sequence=self.sequence, entry=entry)
            actions.append(SendMessage(to=self._backup, message=forward))
        return actions + self._commit_safe()

    def _append_lost(self, slot: int, until: int) -> list[Action]:
        held = self._unconfirmed.resolve(slot) if self._unconfirmed.arrived(slot) <= until else None
        dropped = [] if held is None else self._drop(held)
        return [*dropped, *self._append(UpdatesLost(slot=slot, until=until))]

    def _safe_sequence(self) -> int:
        """The last entry that survives as many deaths as the run promises."""
        return self._forwarded if self._backup else self.sequence

    def _commit_safe(self) -> list[Action]:
        actions: list[Action] = []
        while self._in_flight and self.core.sequence < self._safe_sequence():
            entry = self._in_flight.popleft()
            change = self.core.commit(entry)
            if isinstance(entry, Push | UpdatesLost) and self._taken.get(entry.slot, 0) <= (
                self.core.next_clock(entry.slot) or 0
            ):
                self._taken.pop(entry.slot, None)  # nothing of this slot is in flight any more
            actions += self._after(entry, change)
        return actions

    def _after(self, entry: Entry, change: Change) -> list[Action]:
        """The primary's actions after a commit: notify the members concerned, and retry what was held back."""
        actions, core = change.actions, self.core
        waited_for = -1
        match entry:
            case Push(slot=slot):
                waited_for = slot
                actions.append(Ack(entry.shard, slot, entry.clock, change.outcome))
            case Assigned():
                self._asked.discard(entry)
            case Chosen():
                if self._lead[1]:  # else the next lead will greet this shard
                    actions.append(self._tell(self._lead[1], core.kept_answer()))
                actions += self._settle_membership()
            case ChosenKept():
                actions += self._look_again(Hold.SHARDS)  # the reads that waited for this shard
                if self._listening and not core.awaiting:  # a restored lead has heard from all of them
                    self._listening = False
                    actions += self._tell_others({})
                    actions += self._settle_membership()
            case UpdatesLost() | SlotsChanged() | Closing():
                pass
        for shard in core.decisions.kept if change.decisions else ():
            primary = self._primaries.get(shard, (0, 0))[1]
            if primary:
                messages = core.messages_to(shard, change.decisions)
                actions += [self._tell(primary, message) for message in messages]
        gone = self._view.gone
        if gone and change.moved and not core.awaiting:
            actions += self._lose_owed()
        for slot in change.moved:
            if self._hellos and (hello := self._hellos.get(slot)) is not None:
                actions += self._greet(hello)
            if slot in self._held:
                actions += self._look_at(slot, waited_for)
        if (mark := core.mark) != self._mark:
            self._mark = mark
            actions += self._look_again(Hold.OTHERS, waited_for)
        if self._waiting_for[Hold.SHARDS] and core.concluded:
            actions += self._look_again(Hold.SHARDS)
        if gone:
            actions += self._conclude()
        return actions

    # ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_again(self, reason: Hold, waited_for: int = -1) -> list[Action]:
        slots, self._waiting_for[reason] = self._waiting_for[reason], []
        return [action for slot in slots for action in self._look_at(slot, waited_for)]

    def _look_at(self, slot: int, waited_for: int = -1) -> list[Action]:
        """Answer the held read of a slot, if the consistency allows."""
        read, core = self._held.get(slot), self.core
        if read is None or core.next_clock(slot) is None:
            return []
        clock, member = read
        answer = core.answer(slot, clock)
        if isinstance(answer, Hold):
            if answer in self._waiting_for:
                self._waiting_for[answer].append(slot)
            assigned = Assigned(slot, clock)
            if answer is not Hold.BATCH or assigned in self._asked:
                return []
            self._asked.add(assigned)
            return self._append(assigned)
        del self._held[slot]
        waited_for = waited_for if waited_for != slot else -1
        parameters = Parameters(self.config.shard, slot, clock, core.version, answer, core.term, waited_for)
        return [SendMessage(member, parameters)]

    # ── replication ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_forward(self, message: Forward, sender: int) -> list[Action]:
        if message.epoch < self.epoch:
            return self._refuse(sender)
        if self.role is not ReplicaRole.BACKUP or message.sequence > self.core.sequence + 1:
            return []
        actions: list[Action] = []
        if message.sequence == self.core.sequence + 1:
            entry = message.entry
            if isinstance(entry, Push) and not entry.skip:
                actions.append(self._keep(entry))
            actions += self.core.commit(entry).actions
        return [*actions, self._forwarded_to(sender)]

    def _install(self, message: Install, sender: int) -> list[Action]:
        if message.epoch < self.epoch:
            return self._refuse(sender)
        self._step_down()
        self.core = self._make_core(json.loads(message.state))
        self.role, self.epoch, self._primary = ReplicaRole.BACKUP, message.epoch, sender
        installed = Installed(shard=self.config.shard, epoch=self.epoch, member=self.member)
        return [
            Load(shard=self.config.shard),
            *self.core.open_log(),
            self._forwarded_to(sender),
            SendMessage(to=LAUNCHER, message=installed),
        ]

    def _forwarded_to(self, sender: int) -> SendMessage:
        forwarded = Forwarded(shard=self.config.shard, epoch=self.epoch, sequence=self.core.sequence)
        return SendMessage(to=sender, message=forwarded)

    def _refuse(self, sender: int) -> list[Action]:
        """Send Yield to a server that claims the shard by an older epoch, unless it is also the current primary."""
        if sender == self._primary:
            return []
        return [SendMessage(to=sender, message=Yield(shard=self.config.shard, epoch=self.epoch))]

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Any]:
        """The committed state as JSON values; the store matches it once all actions are executed.

        A snapshot additionally holds the gradients of `core.steps.waiting` only: entries in flight are not in it.
        """
        return {"shard": self.config.shard, "core": self.core.state()}
