"""One shard's state: a deterministic state machine over the entries of its log.

`commit(entry)` is all that changes it. A primary and its backup commit the same entries in the same order and so hold
the same state; a snapshot is `state()`, and the entries after it lead to the same place again. The machine knows
nothing of who is primary: messages, replication and held reads are `ShardReplica`'s.

    Push ──► waiting updates ──policy──► optimizer step (Apply, a row of the log), version + 1
                                 ▲
         groups chosen by the lead (where arrival decides), committed here as Chosen

Shards agree on slots in this way: the lead fixes the clock from which a new table counts, one that nobody has begun,
and answers no read from that clock on until all other shards have stored the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from manyhands.strategies.common.consistency import Group
from manyhands.strategies.ps.actions import Action, Log, Outcome
from manyhands.strategies.ps.log_rows import RestoredRow, SlotsRow
from manyhands.strategies.ps.pending_steps import Change, Decision, Decisions, ShardConfig, Steps
from manyhands.strategies.ps.ps_messages import (
    LEAD,
    Assigned,
    Chosen,
    ChosenKept,
    Closing,
    Entry,
    Generation,
    HostPush,
    Push,
    SlotsChanged,
    Update,
    UpdatesLost,
)
from manyhands.strategies.ps.slots import SlotRecord, SlotTable
from manyhands.strategies.ps.work_plan import WorkPlan


class ShardCore:
    """The replicated state of one shard.

    With `batches` it continues after so many batches were trained, for example by another strategy: versions continue
    from there; where steps go by clock, clocks do too.
    """

    def __init__(self, config: ShardConfig, batches: int = 0) -> None:
        self.config = config
        self.sequence = 0
        self.term = 0
        start = batches if config.stepwise else 0
        self.table = SlotTable(config.slots, start, batches)
        self.steps = Steps(config, self.table)
        self.steps.version, self.steps.step = batches, start
        self.decisions = Decisions(range(1, config.num_shards) if config.leads else ())
        """At the lead: its decisions for all shards."""
        self.work = WorkPlan(config, self.table, self.steps, self.decisions)
        self.work.next_batch = batches
        self.awaiting: set[int] = set()
        """Shards whose answer is required after a restore, before anything new may happen here."""
        self._decided = (0, 0)  # at another shard: the term and number of the last decision that it has
        self._heard_term = 0  # at another shard: the highest term in which it heard from the lead

    @property
    def version(self) -> int:
        return self.steps.version

    def next_clock(self, slot: int) -> int | None:
        """The lowest clock that the slot has not settled here; None for an unknown slot."""
        record = self.table.records.get(slot)
        if record is not None:
            return record.next_clock
        return None if self.config.by_clock or self.config.leads else 0

    def outcome_of(self, slot: int, clock: int) -> Outcome | None:
        """The outcome of a settled update; None if it is not settled."""
        record = self.table.records.get(slot)
        if record is None or clock >= record.next_clock:
            return None
        late = clock <= record.late and (clock not in record.recent or clock in record.lost)
        return Outcome.LATE if late else Outcome.DUPLICATE

    # ── the lead and the others ───────────────────────────────────────────────────────────────────────────────────────

    def messages_to(self, shard: int, decisions: Iterable[Decision], epoch: int) -> list[Chosen]:
        """The messages that tell another shard these decisions of the lead, whose epoch this is."""
        table = () if self.awaiting else tuple(self.table.generations)
        kept = self.decisions.kept[shard]
        return [
            Chosen(shard, self.term, number, kept, table, step, updates, freely, epoch)
            for number, step, updates, freely in decisions
        ]

    def greetings_to(self, shard: int, epoch: int) -> list[Chosen]:
        """The messages that tell a new primary of another shard everything it may lack.

        The first says which state the lead expects it to be in. If the shard is behind that, the updates in it need no
        choice any more: where arrival decides, by slot the last update that is decided here, given what `shard` is
        believed to have stored. Where steps go by clock, the clock of the next one implies it.
        """
        stored = self.decisions.kept[shard]
        missing = [decision for decision in self.decisions.unkept if decision.number > stored]
        until: dict[int, int] = {}
        if self.config.by_arrival:
            until = {slot: record.chosen for slot, record in sorted(self.table.records.items())}
            for decision in missing:
                for update in (decision.updates or ()) if not decision.freely else ():
                    until[update.slot] = min(until[update.slot], update.clock)
        free = tuple(Update(slot=slot, clock=clock - 1) for slot, clock in until.items() if clock)
        step = next((one.step for one in missing if one.updates is not None), self.steps.step)
        known = Decision(number=stored, step=step, updates=free, freely=True)
        return self.messages_to(shard, [known, *missing], epoch)

    def kept_answer(self, epoch: int, *, asks: bool = False) -> ChosenKept:
        """The message that tells the lead which decisions are durable here, and requests the others."""
        term, number = self._decided
        known = (tuple(self.table.generations), self.table.top, self.work.next_batch)
        return ChosenKept(self.config.shard, term, number, *known, asks, epoch)

    def is_old(self, chosen: Chosen) -> bool:
        """Whether a message of the lead is committed here already."""
        newer_table = len(chosen.generations) > len(self.table.generations)
        return (chosen.term, chosen.number) <= self._decided and not newer_table and LEAD not in self.awaiting

    # ── what changes it ───────────────────────────────────────────────────────────────────────────────────────────────

    def open_log(self, first: int = 0) -> list[Action]:
        """Rows of the log for the generations of slots from the `first` on."""
        entry = (self.config.shard, self.term, self.sequence)
        return [Log(SlotsRow(*entry, *generation)) for generation in self.table.generations[first:]]

    def restore(self, term: int) -> list[Action]:
        """Continue from a snapshot in a new term; other shards may know more, and must be heard first."""
        self.term = max(term, self.term + 1)
        self.awaiting = set(self.decisions.kept) if self.config.leads else {LEAD}
        self.steps.lives.append((self.term, self.version))
        row = RestoredRow(self.config.shard, self.term, self.sequence, self.version)
        return [Log(row), *self.open_log()]

    def commit(self, entry: Entry) -> Change:
        """Apply the next entry of the log; deterministic, so that primary and backup stay equal."""
        self.sequence += 1
        config, steps = self.config, self.steps
        change = Change((config.shard, self.term, self.sequence))
        match entry:
            case Push():
                self._push((entry,), change)
            case HostPush():
                self._push(entry.parts, change)
            case Assigned():
                self.work.assign(entry)
                change.moved.append(entry.slot)
            case Chosen():
                self._follow(entry, change)
            case ChosenKept():
                self._hear(entry, change)
            case SlotsChanged():
                self._change_slots(entry, change)
            case UpdatesLost():
                self._lose(entry, change)
            case Closing():
                pass
        is_drained = self.work.next_batch >= config.steps and not self.work.open
        steps.drained = is_drained or isinstance(entry, Closing)
        follows_clock = config.follows and config.stepwise
        if follows_clock:
            steps.skip_lost_steps(change)
        while (group := steps.next_group()) is not None:
            if config.chooses:
                updates = tuple(Update(slot=slot, clock=clock) for slot, clock in group.updates)
                change.decisions.append(self.decisions.take(group.step, updates))
            steps.take(group, change)
            if follows_clock:
                steps.skip_lost_steps(change)
        return change

    def _push(self, parts: Sequence[Push], change: Change) -> None:
        """Take a push, or those of one host, whose gradients are one sum: all of them, or none.

        None of several only if the slots changed while it was on its way to the backup; a step that wanted one of them
        says that it lost it.
        """
        settled = [self.outcome_of(push.slot, push.clock) for push in parts]
        placed = [
            one is not None or self.work.has_place(push) for one, push in zip(settled, parts, strict=True)
        ]
        is_taken = all(placed) and not any(one is not None for one in settled)
        for push, outcome, has_place in zip(parts, settled, placed, strict=True):
            slot, clock = push.slot, push.clock
            if outcome is not None:
                change.outcome = outcome  # its step was completed while it was on its way to the backup
                change.drop(push)
                continue
            record = self.table.record(slot)
            self.work.next_batch = max(self.work.next_batch, push.batch + 1)
            if is_taken:
                record.remember(clock, push.batch)
            elif not has_place:
                record.late = max(record.late, clock)
            self._settle(slot, record, clock + 1, change)
            if is_taken:
                self.steps.wait(push, record, change)
                continue
            change.outcome = Outcome.LATE
            change.drop(push)
            if not has_place:
                change.log_late(slot, clock)

    def _settle(self, slot: int, record: SlotRecord, until: int, change: Change) -> None:
        self.steps.settle(slot, record, until, change)
        if slot in self.work.open and not any(clock >= until for clock in record.recent):
            self.work.open.discard(slot)

    def _lose(self, lost: UpdatesLost, change: Change) -> None:
        record = self.table.record(lost.slot)
        first, until = record.next_clock, lost.until
        if until <= first:
            return
        record.late = until - 1
        record.lost.update(clock for clock in record.recent if first <= clock < until)
        self._settle(lost.slot, record, until, change)
        if self.config.stepwise:  # a step that wanted some of them says so when it closes
            first = max(first, record.end)
        if first < until:
            change.log_lost(lost.slot, first, until)
        if self.config.chooses and not self.config.stepwise:
            # Release them at the other shards without a group; here they were chosen already.
            update = Update(slot=lost.slot, clock=until - 1)
            change.decisions.append(self.decisions.take(self.steps.step, (update,), freely=True))

    def _change_slots(self, entry: SlotsChanged, change: Change) -> None:
        last = self.table.generations[-1]
        slots = tuple(sorted(entry.slots))
        if slots == last.slots:
            return
        start = 1 + self.table.top if self.config.by_clock else 0
        base = last.base + (start - last.start) * len(last.slots)
        self._adopt((*self.table.generations, Generation(start=start, base=base, slots=slots)), change)
        change.decisions.append(self.decisions.take_table(self.steps.step, start))

    def _adopt(self, generations: tuple[Generation, ...], change: Change) -> None:
        known, first = set(self.table.records), len(self.table.generations)
        for generation in generations[first:]:
            change.moved += self.table.active
            self.table.append(generation)
            change.moved += generation.slots
        change.actions += self.open_log(first)
        # A new slot begins at the next step: earlier ones were closed without it, and do not wait for it. This happens
        # when a restored shard learned from workers how far they were, before the lead, restored too, did.
        for slot in sorted(self.table.records.keys() - known) if self.config.stepwise else ():
            record = self.table.records[slot]
            missed = self.table.outstanding(record, self.steps.step)
            if missed:
                record.late = missed.stop - 1
                self.table.move(record, missed.stop)
                change.log_lost(slot, missed.start, missed.stop)

    def _hear(self, kept: ChosenKept, change: Change) -> None:
        """At the lead: record what another shard has stored."""
        was_awaiting = bool(self.awaiting)
        self.awaiting.discard(kept.shard)
        self.table.top = max(self.table.top, kept.top_clock)
        self.work.next_batch = max(self.work.next_batch, kept.top_batch)
        self._adopt(kept.generations, change)
        if kept.term == self.term:
            self.decisions.hear(kept.shard, kept.number)
        if was_awaiting and not self.awaiting:
            # What one of them knew, the others have to keep before it counts.
            change.decisions.append(self.decisions.take_table(self.steps.step, 0))

    def _follow(self, chosen: Chosen, change: Change) -> None:
        """At another shard: follow the lead's decision.

        A restored lead that has not heard from every shard has no reliable table: it is answered, and sends
        everything again when it has.
        """
        if chosen.term < self._heard_term:
            return
        self._heard_term = chosen.term
        if not chosen.generations:
            return
        behind = (chosen.term, chosen.kept) > self._decided  # a snapshot lies between, of the lead or of ours
        if behind and chosen.number > chosen.kept:
            return  # told to an earlier life of this shard; only a greeting says what became of the choices between
        self.awaiting.discard(LEAD)
        self._adopt(chosen.generations, change)
        names = tuple((update.slot, update.clock) for update in chosen.updates or ())
        if behind:
            self._decided = (chosen.term, chosen.kept)
            self.steps.resume = max(self.steps.resume, chosen.step)
            self.steps.let_free(names)
        elif chosen.number == self._decided[1] + 1:
            self._decided = (chosen.term, chosen.number)
            if chosen.freely:
                self.steps.let_free(names)
            elif chosen.updates is not None:
                self.steps.follow(Group(chosen.step, names))

    def state(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "term": self.term,
            "table": self.table.state(),
            "steps": self.steps.state(),
            "decisions": self.decisions.state(),
            "awaiting": sorted(self.awaiting),
            "decided": list(self._decided),
            "heard_term": self._heard_term,
            "next_batch": self.work.next_batch,
            "open": sorted(self.work.open),
        }

    @classmethod
    def from_state(cls, config: ShardConfig, state: dict[str, Any]) -> ShardCore:
        core = cls(config)
        core.sequence, core.term = state["sequence"], state["term"]
        core.table = SlotTable.from_state(state["table"])
        core.steps = Steps.from_state(config, core.table, state["steps"])
        core.decisions = Decisions.from_state(state["decisions"])
        core.work = WorkPlan(config, core.table, core.steps, core.decisions)
        core.work.next_batch, core.work.open = state["next_batch"], set(state["open"])
        core.awaiting = set(state["awaiting"])
        core._decided = tuple(state["decided"])
        core._heard_term = state["heard_term"]
        return core
