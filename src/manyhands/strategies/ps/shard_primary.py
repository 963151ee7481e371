"""The primary of one shard: it serves workers, and commits an entry of the log once its backup has it.

    worker ──Push──► primary ──Forward──► backup        the entry gets the next sequence number
                        ◄────Forwarded─────┘            and is committed here only now: what any member has
    worker ◄──Parameters── primary                      read survives this server's death

Without a backup an entry is committed at once. Reads are never replicated: workers ask again. A push-pull is a Push and
the Read behind it, handled in this order; the live server, the simulator and every replica go through the same code,
which is written for that case: no entry is queued where nothing is in flight. Where an update counts at every shard or
at none, a push becomes an entry when the Read behind it has come (see `unconfirmed`).
"""

from __future__ import annotations

import json
from collections import deque

from manyhands.strategies.ps.actions import Ack, Action, Drop, Keep, SendMessage
from manyhands.strategies.ps.known_members import NOBODY, KnownMembers
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
    HostPush,
    Install,
    Installed,
    Parameters,
    Push,
    Read,
    ReadRows,
    RowValues,
    SendAlone,
    ShardView,
    SlotsChanged,
    UpdatesLost,
    Welcome,
)
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.unconfirmed import Unconfirmed
from manyhands.strategies.ps.work_plan import Hold

_NO_READ = (-1, 0, False)


class ShardPrimary:
    """A replica while it is the primary; every call returns the actions that follow.

    A `restored` shard reports to the launcher when it has said all that was lost.
    """

    def __init__(self, core: ShardCore, known: KnownMembers, member: int, *, restored: bool) -> None:
        self._config = core.config
        self._core, self._known, self._member = core, known, member
        self._reports_restore = restored
        self._listening = bool(core.awaiting)  # a restored lead: until every other shard has answered
        self._backup = 0
        self._in_flight: deque[Entry] = deque()  # entries after core.sequence that the backup may lack
        self._forwarded = 0  # the backup has everything up to this
        self._taken: dict[int, int] = {}  # by slot with updates in flight: the clock after the last of them
        self._hellos: dict[int, Hello] = {}  # to be answered once the slot is known, or its loss is safe
        self._held: dict[int, tuple[int, int, bool]] = {}  # reads by slot: clock, the member to answer, bare
        self._unconfirmed = Unconfirmed(needed=core.config.confirms)
        self._waiting_for: dict[Hold, list[int]] = {Hold.OTHERS: [], Hold.SHARDS: []}  # slots of held reads
        self._mark = core.work.mark  # the mark at which those that wait for others were last looked at
        self._asked: set[Assigned] = set()  # batches that are being given out
        self._concluded = -1  # the epoch of the view in which the launcher was told that nothing is open
        self._actions: list[Action] = []  # of the call in hand

    @property
    def sequence(self) -> int:
        return self._core.sequence + len(self._in_flight)

    @property
    def awaited_member(self) -> int | None:
        """The member that held reads wait for: that of the lowest slot whose read has not come yet."""
        others = [slot for slot in self._known.holders if slot not in self._held]
        return self._known.holders[min(others)] if self._held and others else None

    # ── membership ────────────────────────────────────────────────────────────────────────────────────────────────────

    def follow(self, mine: ShardView, before: dict[int, tuple[int, int]], *, changed: bool) -> list[Action]:
        """Handle a view; `before` are the primaries of the last one, and `changed` if this shard's replicas did."""
        config, core, known = self._config, self._core, self._known
        for slot, (_, member, _) in tuple(self._held.items()):
            if member < known.holders[slot]:
                del self._held[slot]
        if changed:
            self._backup = 0
            # The old backup no longer counts, and the new one is installed from the committed state: commit all.
            self._commit_safe()
            self._backup = mine.backup
            if self._backup:
                self._forwarded = core.sequence
                state = json.dumps(core.state())
                install = Install(shard=config.shard, epoch=known.epoch, sequence=core.sequence, state=state)
                self._actions.append(SendMessage(self._backup, install))
        lead = known.primaries.get(LEAD, NOBODY)
        if config.leads:
            self._greet_shards(before)
        elif lead[1] and (before.get(config.shard), before.get(LEAD)) != (
            known.primaries[config.shard],
            lead,
        ):
            # Announce the new primary to the lead, as earlier messages were not received.
            self._actions.append(SendMessage(lead[1], core.kept_answer(known.epoch, asks=True)))
        self._settle_membership()
        return self._done()

    def _greet_shards(self, before: dict[int, tuple[int, int]]) -> None:
        """At the lead: send every new primary of another shard (all of them, if this lead is new) what it may lack."""
        known = self._known
        everyone = before.get(LEAD) != known.primaries[LEAD] or before == known.primaries
        for shard in self._core.decisions.kept:
            epoch, primary = known.primaries.get(shard, NOBODY)
            if primary and (everyone or before.get(shard) != (epoch, primary)):
                for greeting in self._core.greetings_to(shard, known.epoch):
                    self._actions.append(SendMessage(primary, greeting))

    def _settle_membership(self) -> None:
        """Log the view's slot changes, once it is certain that no other shard knows more."""
        core, known = self._core, self._known
        if core.awaiting:
            return
        self._lose_outstanding()
        if self._reports_restore:  # not before: the launcher ends a run that has nothing else to do
            self._reports_restore = False
            installed = Installed(shard=self._config.shard, epoch=known.epoch, member=self._member)
            self._actions.append(SendMessage(LAUNCHER, installed))
        if self._config.leads:
            coming = [entry.slots for entry in self._in_flight if isinstance(entry, SlotsChanged)]
            latest = coming[-1] if coming else core.table.active
            slots = {place.slot for place in known.view.slots}
            # Added and removed behind our back:
            missed = {place.slot for place in known.view.retiring} - set(core.table.records).union(*coming)
            for wanted in (slots | missed, slots) if missed else (slots,):
                if slots and wanted != set(latest):
                    latest = tuple(sorted(wanted))
                    self._append(SlotsChanged(slots=latest))
        self._conclude()

    def _lose_outstanding(self) -> None:
        """Give up the updates of slots whose worker has left for good."""
        for last in self._known.view.gone:
            known, until = self._next_to_take(last.slot), self._core.work.outstanding_until(last)
            if known is not None and known < until:
                self._append_lost(last.slot, until)

    def _conclude(self) -> None:
        """Once all workers have left: make what waits the last step, and tell the launcher when nothing is open."""
        view, core = self._known.view, self._core
        gone = {last.slot for last in view.gone}
        everyone_left = not view.retiring and all(place.slot in gone for place in view.slots)
        if not everyone_left or self._in_flight or core.awaiting:
            return
        if core.steps.num_waiting:
            # Steps by clock are closed by what is lost, those of other shards by the lead's choice.
            if self._config.leads and not self._config.stepwise:
                self._append(Closing())
        elif core.work.concluded and self._concluded != view.epoch:
            self._concluded = view.epoch
            concluded = Concluded(shard=self._config.shard, view=view.epoch)
            self._actions.append(SendMessage(LAUNCHER, concluded))

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def keeps(self, push: Push | HostPush) -> bool:
        """Whether `serve` will keep the gradient of this push.

        The gradient of a fenced worker or of a known update may be gone.
        """
        if isinstance(push, HostPush):
            return self._unconfirmed.can_hold(push) and all(
                # Not behind updates that a worker has not reported as lost here yet (`Hello`).
                self.keeps(part)
                and self._core.work.has_place(part)
                and self._next_to_take(part.slot) == part.clock
                for part in push.parts
            )
        fenced = push.member < self._known.holders.get(push.slot, 0)
        return self._is_open(push) and (not fenced or self._unconfirmed.hears(push))

    def serve(self, message: Push | HostPush | Read | ReadRows | Hello, sender: int) -> list[Action]:
        if isinstance(message, HostPush):
            self._take_host_push(message)
            return self._done()
        slot, member, holders = message.slot, message.member, self._known.holders
        holder = holders.get(slot, 0)
        if member < holder:
            if isinstance(message, Push) and self._unconfirmed.hears(message) and self._is_open(message):
                self._hold(message)  # its Read may have reached another shard: its successor decides
            fenced = Fenced(shard=self._config.shard, slot=slot, holder=holder)
            self._actions.append(SendMessage(sender, fenced))
            return self._done()
        if member > holder:
            holders[slot] = member
            self._held.pop(slot, None)  # the read of an older member
        confirms = self._config.confirms
        if confirms:
            self._unconfirmed.meet(slot, member)
        match message:
            case Push():
                outcome = self._core.outcome_of(slot, message.clock)
                if outcome is not None:
                    self._actions.append(Ack(message.shard, slot, message.clock, outcome))
                elif message.clock < self._taken.get(slot, 0):
                    pass  # it is in flight, and acknowledged when it is safe
                elif confirms and self._unconfirmed.awaits(message, self._held.get(slot, _NO_READ)[0]):
                    self._hold(message)
                else:
                    # No update before it is missing: a worker reports how far it is (Hello) before it pushes to a
                    # new primary.
                    if not message.skip:
                        self._actions.append(Keep(message.shard, slot, message.clock, self._config.copies))
                    self._append(message)
                if message.pulls:
                    self._take_read(slot, message.clock + 1, member, message.bare)
            case Read():
                self._take_read(slot, message.clock, member, message.bare)
            case Hello():
                self._held.pop(slot, None)  # asked again once the greeting is answered
                self._hellos[slot] = message
                self._greet(message)
            case ReadRows(clock=clock):
                values = RowValues(message.shard, slot, clock, self._core.version)
                self._actions.append(SendMessage(sender, values))
        return self._done()

    def hear_shard(self, message: Chosen | ChosenKept | Forwarded, sender: int) -> list[Action]:
        """Handle a message of the backup, of the lead, or at the lead of another shard."""
        core, known, leads = self._core, self._known, self._config.leads
        match message:
            case Forwarded():
                if message.epoch == known.epoch:
                    # The backup has these entries, so they survive this server's death and may be acknowledged.
                    self._forwarded = max(self._forwarded, message.sequence)
                    self._commit_safe()
            case Chosen() if not leads and (message.epoch, sender) >= known.lead:
                # An older one was sent before that lead was replaced; its successor sends all of it again.
                known.lead = (message.epoch, sender)
                if core.is_old(message):
                    self._actions.append(SendMessage(sender, core.kept_answer(known.epoch)))
                else:
                    self._append(message)
            case ChosenKept() if leads and message.epoch >= known.primaries.get(message.shard, NOBODY)[0]:
                # An older one is of a primary that was replaced; its successor asks.
                if not message.asks:
                    self._append(message)
                else:
                    for greeting in core.greetings_to(message.shard, known.epoch):
                        self._actions.append(SendMessage(sender, greeting))
        return self._done()

    def _done(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _is_open(self, push: Push) -> bool:
        """Whether an update is neither settled nor in flight."""
        known = self._core.outcome_of(push.slot, push.clock) is not None
        return not known and push.clock >= self._taken.get(push.slot, 0)

    def _next_to_take(self, slot: int) -> int | None:
        """The lowest clock of a slot that is neither settled nor in flight."""
        settled = self._core.next_clock(slot)
        return None if settled is None else max(settled, self._taken.get(slot, 0))

    def _greet(self, hello: Hello) -> None:
        """Log what was lost since the worker last heard of it; then welcome it, once all of that is safe."""
        slot, config = hello.slot, self._config
        known = self._next_to_take(slot)
        if known is not None and hello.settled > known:
            self._append_lost(slot, hello.settled)
            return
        next_clock = self._core.next_clock(slot)
        if slot not in self._hellos or next_clock is None or next_clock < hello.settled:
            return
        if self._unconfirmed.leaves_open(slot, hello.member):
            return
        del self._hellos[slot]
        arrived = self._unconfirmed.arrived(slot)
        if config.confirms:
            arrived = max(arrived, self._taken.get(slot, 0))
        arrived = arrived if arrived > next_clock else 0
        welcome = Welcome(config.shard, slot, next_clock, self._core.version, arrived)
        self._actions.append(SendMessage(hello.member, welcome))

    def _hold(self, push: Push) -> None:
        """Keep a push that does not count yet."""
        group = self._unconfirmed.group_of(push.slot)
        if group is not None and group.parts[0].slot == push.slot:
            self._break_up(group)  # its carrier sends the update alone instead
        self._drop(self._unconfirmed.hold(push))
        if not push.skip:
            self._actions.append(Keep(push.shard, push.slot, push.clock, self._config.copies))

    def _drop(self, push: Push | None) -> None:
        if push is not None and not push.skip:
            self._actions.append(Drop(shard=push.shard, slot=push.slot, clock=push.clock))

    def _take_read(self, slot: int, clock: int, member: int, bare: bool) -> None:
        group = self._unconfirmed.group_of(slot)
        carrier = group.parts[0] if group is not None else None
        if group is not None and carrier is not None and carrier.slot == slot:
            if carrier.clock < clock:
                self._append_host_push(group)
            else:
                self._break_up(group)
        elif group is None and self._config.confirms:
            self._confirm(slot, clock)
        self._held[slot] = (clock, member, bare)
        self._look_at(slot)

    def _confirm(self, slot: int, clock: int) -> None:
        """A Read of this clock confirms the held push before it; any other is dropped: its worker computes it again."""
        push = self._unconfirmed.resolve(slot)
        if push is not None and push.clock < clock and self._is_open(push):
            self._append(push)
        else:
            self._drop(push)

    # ── several pushes with one sum ───────────────────────────────────────────────────────────────────────────────────

    def _take_host_push(self, group: HostPush) -> None:
        """Hold or append the pushes of one host; where any of them cannot count, all have to be sent alone."""
        carrier, confirms, holders = group.parts[0], self._config.confirms, self._known.holders
        takes = self.keeps(group)
        for part in group.parts:
            if part.member > holders.get(part.slot, 0):
                holders[part.slot] = part.member
                self._held.pop(part.slot, None)
            if confirms and part.member == holders[part.slot]:
                self._unconfirmed.meet(part.slot, part.member)
        if takes:
            known = self._unconfirmed.group_of(carrier.slot)
            if known is not None:  # sent again: the same updates
                self._unconfirmed.let_go(known)
            self._actions.append(Keep(group.shard, carrier.slot, carrier.clock, self._config.copies))
            if confirms and self._unconfirmed.awaits(carrier, self._held.get(carrier.slot, _NO_READ)[0]):
                self._unconfirmed.hold_group(group)
            else:
                self._append_host_push(group)
        for part in group.parts:
            if part.member < holders[part.slot]:
                fenced = Fenced(shard=part.shard, slot=part.slot, holder=holders[part.slot])
                self._actions.append(SendMessage(part.member, fenced))
            elif not takes and self._is_open(part):
                self._ask_alone(part)  # its Read comes with it
            elif part.pulls and self._held.get(part.slot, _NO_READ)[0] <= part.clock + 1:
                self._take_read(part.slot, part.clock + 1, part.member, part.bare)

    def _append_host_push(self, group: HostPush) -> None:
        self._unconfirmed.let_go(group)
        for part in group.parts[1:]:
            self._drop(self._unconfirmed.resolve(part.slot))  # the same update, sent alone besides
            self._actions.append(Keep(part.shard, part.slot, part.clock, copy=False, carried=True))
        self._append(group)
        self._greet_parts(group)

    def _break_up(self, group: HostPush) -> None:
        """Drop the sum; its parts count by themselves, if they were sent alone as well, or have to be."""
        carrier = group.parts[0]
        self._unconfirmed.let_go(group)
        self._drop(carrier)
        for part in group.parts[1:]:
            self._ask_alone(part)
            if part.slot in self._held:
                self._confirm(part.slot, self._held[part.slot][0])
        self._greet_parts(group)

    def _ask_alone(self, part: Push) -> None:
        if not self._unconfirmed.arrived(part.slot):
            self._actions.append(SendMessage(part.member, SendAlone(part.shard, part.slot, part.clock)))

    def _greet_parts(self, group: HostPush) -> None:
        """Welcome successors who had to wait for what becomes of this sum."""
        for part in group.parts[1:]:
            hello = self._hellos.get(part.slot)
            if hello is not None:
                self._greet(hello)

    # ── the log ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, entry: Entry) -> None:
        """Give an entry the next sequence number, forward it, and commit what is durable."""
        if not self._backup and not self._in_flight:
            self._commit(entry)  # nobody else has to have it, and nothing is before it
            return
        self._in_flight.append(entry)
        for part in _settled_by(entry):
            self._taken[part.slot] = part.until if isinstance(part, UpdatesLost) else part.clock + 1
        if self._backup:
            forward = Forward(self._config.shard, self._known.epoch, self.sequence, entry)
            self._actions.append(SendMessage(self._backup, forward))
        self._commit_safe()

    def _append_lost(self, slot: int, until: int) -> None:
        group = self._unconfirmed.group_of(slot)
        if group is not None and group.parts[0].clock < until:
            self._break_up(group)
        if self._unconfirmed.arrived(slot) <= until:
            self._drop(self._unconfirmed.resolve(slot))
        self._append(UpdatesLost(slot=slot, until=until))

    def _commit_safe(self) -> None:
        """Commit the entries that survive as many deaths as the run promises."""
        while self._in_flight and self._core.sequence < (self._forwarded if self._backup else self.sequence):
            self._commit(self._in_flight.popleft())

    def _commit(self, entry: Entry) -> None:
        """Commit; then notify the members concerned, and retry what was held back."""
        core, known = self._core, self._known
        change = core.commit(entry)
        self._actions += change.actions
        waited_for = -1
        for part in _settled_by(entry):
            if self._taken.get(part.slot, 0) <= (core.next_clock(part.slot) or 0):
                self._taken.pop(part.slot, None)  # nothing of this slot is in flight any more
            if isinstance(part, Push):
                waited_for = part.slot
                self._actions.append(Ack(part.shard, part.slot, part.clock, change.outcome))
        match entry:
            case Assigned():
                self._asked.discard(entry)
            case Chosen():
                if known.lead[1]:  # else the next lead will greet this shard
                    self._actions.append(SendMessage(known.lead[1], core.kept_answer(known.epoch)))
                self._settle_membership()
            case ChosenKept():
                self._look_again(Hold.SHARDS)  # the reads that waited for this shard
                if self._listening and not core.awaiting:  # a restored lead has heard from all of them
                    self._listening = False
                    self._greet_shards({})
                    self._settle_membership()
            case Push() | HostPush() | UpdatesLost() | SlotsChanged() | Closing():
                pass
        for shard in core.decisions.kept if change.decisions else ():
            primary = known.primaries.get(shard, NOBODY)[1]
            if primary:
                for message in core.messages_to(shard, change.decisions, known.epoch):
                    self._actions.append(SendMessage(primary, message))
        gone = known.view.gone
        if gone and change.moved and not core.awaiting:
            self._lose_outstanding()
        for slot in change.moved:
            if self._hellos and (hello := self._hellos.get(slot)) is not None:
                self._greet(hello)
            if slot in self._held:
                self._look_at(slot, waited_for)
        if (mark := core.work.mark) != self._mark:
            self._mark = mark
            self._look_again(Hold.OTHERS, waited_for)
        if self._waiting_for[Hold.SHARDS] and core.work.concluded:
            self._look_again(Hold.SHARDS)
        if gone:
            self._conclude()

    def _look_again(self, reason: Hold, waited_for: int = -1) -> None:
        slots, self._waiting_for[reason] = self._waiting_for[reason], []
        for slot in slots:
            self._look_at(slot, waited_for)

    def _look_at(self, slot: int, waited_for: int = -1) -> None:
        """Answer the held read of a slot, if the consistency allows."""
        read, core = self._held.get(slot), self._core
        if read is None or core.next_clock(slot) is None:
            return
        clock, member, bare = read
        answer = core.work.answer(slot, clock)
        if isinstance(answer, Hold):
            if answer in self._waiting_for:
                self._waiting_for[answer].append(slot)
            elif answer is Hold.BATCH and (assigned := Assigned(slot, clock)) not in self._asked:
                self._asked.add(assigned)
                self._append(assigned)
            return
        del self._held[slot]
        waited_for = waited_for if waited_for != slot else -1
        name = (self._config.shard, slot, clock)
        self._actions.append(
            SendMessage(member, Parameters(*name, core.version, answer, core.term, waited_for, bare))
        )


def _settled_by(entry: Entry) -> tuple[Push | UpdatesLost, ...]:
    """The updates that an entry settles: one, those of a host, or those that are lost."""
    if isinstance(entry, HostPush):
        return entry.parts
    return (entry,) if isinstance(entry, Push | UpdatesLost) else ()
