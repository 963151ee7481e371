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

from enum import IntEnum, auto
from typing import Any

from manyhands.strategies.common.consistency import Group
from manyhands.strategies.ps.actions import Action, Log, Outcome
from manyhands.strategies.ps.decisions import Decision, Decisions
from manyhands.strategies.ps.log_rows import RestoredRow, SlotsRow
from manyhands.strategies.ps.pending_steps import Change, ShardConfig, Steps
from manyhands.strategies.ps.ps_messages import (
    LEAD,
    Assigned,
    Chosen,
    ChosenKept,
    Closing,
    Entry,
    Generation,
    Push,
    SlotsChanged,
    Update,
    UpdatesLost,
    Work,
    WorkKind,
)
from manyhands.strategies.ps.slots import SlotRecord, SlotTable

__all__ = ["Hold", "ShardConfig", "ShardCore"]

_TRAIN = WorkKind.TRAIN
_UNKNOWN = Work(WorkKind.UNKNOWN)


class Hold(IntEnum):  # its members are keys: an int's hash is C's
    """Why a read cannot be answered yet."""

    OWN = auto()
    """The slot's earlier updates are not settled here, or wait for their step if the policy includes them."""
    OTHERS = auto()
    """Updates of other slots are missing that the consistency requires."""
    SHARDS = auto()
    """Not every other shard has stored a decision: a slot change at or before this clock, or the last steps."""
    BATCH = auto()
    """No batch has been assigned to it."""


class ShardCore:
    """The replicated state of one shard."""

    def __init__(self, config: ShardConfig) -> None:
        self.config = config
        self.sequence = 0
        self.term = 0
        self.table = SlotTable(config.slots)
        self.steps = Steps(config, self.table)
        self.decisions = Decisions(range(1, config.num_shards) if config.leads else ())
        """At the lead: its decisions for all shards."""
        self.awaiting: set[int] = set()
        """Shards whose answer is required after a restore, before anything new may happen here."""
        self._decided = (0, 0)  # at another shard: the term and number of the last decision that it has
        self._heard_term = 0  # at another shard: the highest term in which it heard from the lead
        self._next_batch = 0
        self._open: set[int] = set()  # slots that were given a batch and have not settled it

    @classmethod
    def after(cls, config: ShardConfig, batches: int) -> ShardCore:
        """A shard that continues after the first `batches` batches were trained, for example by another strategy.

        Versions continue from there; where steps go by clock, clocks do too.
        """
        core = cls(config)
        start = batches if config.stepwise else 0
        core.table = SlotTable(config.slots, start, batches)
        core.steps = Steps(config, core.table)
        core.steps.version, core.steps.step = batches, start
        core._next_batch = batches
        return core

    # ── what a replica asks ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        """The number of optimizer steps taken."""
        return self.steps.version

    @property
    def mark(self) -> int:
        """How far all slots have come; reads wait for it."""
        return self.steps.step if self.config.stepwise else self.table.floor

    @property
    def concluded(self) -> bool:
        """At the lead: whether every possible step is taken, and every other shard has stored the decisions."""
        if not self.config.policy.chosen_by_lead:
            return True
        return not self.steps.num_waiting and self.decisions.all_kept

    def next_clock(self, slot: int) -> int | None:
        """The lowest clock that the slot has not settled here; None for an unknown slot."""
        record = self.table.records.get(slot)
        if record is not None:
            return record.next_clock
        return None if self.config.by_clock or self.config.leads else 0

    def owed_until(self, last: Update) -> int:
        """The clock below which a slot's updates will never be sent, as its worker left before update `last`.

        This extends as far as any slot has come: a restored shard may distribute the batches differently than
        before.
        """
        clock = max(last.clock, self.next_clock(last.slot) or 0)
        if self.config.by_clock:
            while clock < self.table.top and self._place(last.slot, clock).kind is _TRAIN:
                clock += 1
        return clock

    def outcome_of(self, slot: int, clock: int) -> Outcome | None:
        """The outcome of a settled update; None if it is not settled."""
        record = self.table.records.get(slot)
        if record is None or clock >= record.next_clock:
            return None
        late = clock <= record.late and (clock not in record.recent or clock in record.lost)
        return Outcome.LATE if late else Outcome.DUPLICATE

    def answer(self, slot: int, clock: int) -> Work | Hold:
        """The work with which to answer a read of a known slot, or why it has to wait."""
        config, record = self.config, self.table.records.get(slot)
        own = 0 if record is None else record.next_clock
        if record is not None and config.policy.includes_own(len(self.table.active)):
            own = record.chosen
        if own < clock:
            return Hold.OWN
        if config.leads and record is not None:
            if clock >= record.next_clock or clock in record.recent:
                return self._lead_answer(slot, record, clock)
            answer = self._lead_answer(slot, record, record.next_clock)
            if isinstance(answer, Hold):  # to be told now: other shards may wait for what is lost
                return Work(WorkKind.AHEAD, record.next_clock)
            return answer
        # Another shard predicts the lead's answer from the slot table alone, which may be outdated. A worker that
        # does not train any more does not wait for others. The answer says so, and the worker asks again if the
        # lead, by a newer table, lets it train after all.
        if not config.by_clock:
            return _UNKNOWN
        work = self._place(slot, clock)
        if work.kind is not _TRAIN:
            return work
        return Hold.OTHERS if self._lacks_others(clock) else _UNKNOWN

    def _lead_answer(self, slot: int, record: SlotRecord, clock: int) -> Work | Hold:
        """The lead's answer to a read of a clock that is not settled."""
        config = self.config
        if config.by_clock:
            work = self._place(slot, clock)
            if work.kind is _TRAIN:
                if self._lacks_others(clock):
                    return Hold.OTHERS
                return Hold.SHARDS if clock >= self.decisions.unsure_from else work
            if work.kind is WorkKind.RETIRED:
                return work
        elif clock in record.recent:
            return Work(_TRAIN, clock, record.recent[clock])
        elif not self.table.is_active(slot):
            # Near the end the worker of a removed slot may be the last one, and then waits like any other.
            last = self._next_batch >= config.steps and not self.concluded
            return Hold.SHARDS if last else Work(WorkKind.RETIRED, clock)
        elif self._next_batch < config.steps:
            return Hold.BATCH
        # The run ends with its last worker: none is released while another shard might never learn of the last steps.
        return Work(WorkKind.FINISHED, clock) if self.concluded else Hold.SHARDS

    def _lacks_others(self, clock: int) -> bool:
        """Whether updates are missing that a read must include."""
        lag = self.config.policy.lag
        return lag is not None and self.mark < clock - lag

    def _place(self, slot: int, clock: int) -> Work:
        rank = self.table.rank_at(slot, clock)
        if rank is None:
            return Work(WorkKind.RETIRED, clock)
        generation = self.table.generation_at(clock)
        first = (generation.start, generation.base)
        place = self.config.policy.place(rank, len(generation.slots), clock, first)
        if place.batch >= self.config.steps:
            return Work(WorkKind.FINISHED, clock)
        return Work(_TRAIN, clock, place.batch, place.part, place.parts)

    # ── the lead and the others ───────────────────────────────────────────────────────────────────────────────────────

    def messages_to(self, shard: int, decisions: list[Decision]) -> list[Chosen]:
        """The messages that tell another shard these decisions of the lead."""
        table = () if self.awaiting else tuple(self.table.generations)
        return [self.decisions.message(shard, decision, self.term, table) for decision in decisions]

    def greetings_to(self, shard: int) -> list[Chosen]:
        """The messages that tell a new primary of another shard everything it may lack.

        Where arrival decides, that is by slot the last update that is decided here, given what `shard` is believed
        to have stored: it will not be chosen again. Where steps go by clock, the clock of the next one implies it.
        """
        missing = self.decisions.missing_at(shard)
        until: dict[int, int] = {}
        if self.config.policy.chosen_by_lead and not self.config.stepwise:
            until = {slot: record.chosen for slot, record in sorted(self.table.records.items())}
            for decision in missing:
                for update in (decision.updates or ()) if not decision.freely else ():
                    until[update.slot] = min(until[update.slot], update.clock)
        free = tuple(Update(slot=slot, clock=clock - 1) for slot, clock in until.items() if clock)
        table = () if self.awaiting else tuple(self.table.generations)
        greeting = self.decisions.greeting(shard, self.steps.step, self.term, table, free)
        return [greeting, *self.messages_to(shard, missing)]

    def kept_answer(self, asks: bool = False) -> ChosenKept:
        """The message that tells the lead which decisions are durable here, and requests the others."""
        term, number = self._decided
        return ChosenKept(
            shard=self.config.shard,
            term=term,
            number=number,
            generations=tuple(self.table.generations),
            top_clock=self.table.top,
            top_batch=self._next_batch,
            asks=asks,
        )

    def is_old(self, chosen: Chosen) -> bool:
        """Whether a message of the lead is committed here already."""
        newer_table = len(chosen.generations) > len(self.table.generations)
        return (chosen.term, chosen.number) <= self._decided and not newer_table and LEAD not in self.awaiting

    # ── what changes it ───────────────────────────────────────────────────────────────────────────────────────────────

    def open_log(self) -> list[Action]:
        return [self._slots_row(generation) for generation in self.table.generations]

    def restore(self, term: int) -> list[Action]:
        """Continue from a snapshot in a new term; other shards may know more, and must be heard first."""
        self.term = max(term, self.term + 1)
        self.awaiting = set(self.decisions.kept) if self.config.leads else {LEAD}
        shard, sequence = self.config.shard, self.sequence
        self.steps.lives.append((self.term, self.version))
        row = RestoredRow(shard=shard, term=self.term, sequence=sequence, version=self.version)
        return [Log(row=row), *self.open_log()]

    def commit(self, entry: Entry) -> Change:
        """Apply the next entry of the log; deterministic, so that primary and backup stay equal."""
        self.sequence += 1
        config, steps = self.config, self.steps
        change = Change(config.shard, self.term, self.sequence)
        match entry:
            case Push():
                self._push(entry, change)
            case Assigned():
                self._assign(entry, change)
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
        drained = self._next_batch >= config.steps and not self._open
        steps.drained = drained or isinstance(entry, Closing)
        follows_clock = config.follows and config.stepwise
        if follows_clock:
            steps.skip_lost_steps(change)
        while (group := steps.next_group()) is not None:
            if config.leads and config.policy.chosen_by_lead:
                updates = tuple(Update(slot=slot, clock=clock) for slot, clock in group.updates)
                change.decisions.append(self.decisions.take(group.step, updates))
            steps.take(group, change)
            if follows_clock:
                steps.skip_lost_steps(change)
        return change

    def _push(self, push: Push, change: Change) -> None:
        slot, clock = push.slot, push.clock
        settled = self.outcome_of(slot, clock)
        if settled is not None:
            change.outcome = settled  # its step was completed while it was on its way to the backup
            change.drop(push)
            return
        record = self.table.record(slot)
        self._next_batch = max(self._next_batch, push.batch + 1)
        # One that was begun before a restore may have no place in this run, if the slots changed earlier this time:
        # its slot ends before it, or others have its batch. No read waited for it.
        if clock >= record.end or (self.config.by_clock and self._place(slot, clock).kind is not _TRAIN):
            self._settle(slot, record, clock + 1, change)
            change.outcome = Outcome.LATE
            change.drop(push)
            change.log_late(slot, clock)
            return
        record.remember(clock, push.batch)
        self._settle(slot, record, clock + 1, change)
        self.steps.wait(push, record, change)

    def _settle(self, slot: int, record: SlotRecord, until: int, change: Change) -> None:
        self.steps.settle(slot, record, until, change)
        if slot in self._open and not any(clock >= until for clock in record.recent):
            self._open.discard(slot)

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
        if self.config.policy.chosen_by_lead and not self.config.stepwise and self.config.leads:
            # Release them at the other shards without a group; here they were chosen already.
            update = Update(slot=lost.slot, clock=until - 1)
            change.decisions.append(self.decisions.take(self.steps.step, (update,), freely=True))

    def _assign(self, assigned: Assigned, change: Change) -> None:
        slot, clock = assigned
        record = self.table.record(slot)
        change.moved.append(slot)
        if clock in record.recent or self._next_batch >= self.config.steps:
            return
        if not self.table.is_active(slot):
            return  # removed while this was on its way to the backup
        record.remember(clock, self._next_batch)
        self._next_batch += 1
        self._open.add(slot)

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
        """Adopt the generations that a longer slot table adds."""
        known = set(self.table.records)
        for generation in generations[len(self.table.generations) :]:
            change.moved.extend(self.table.active)
            self.table.append(generation)
            change.moved.extend(generation.slots)
            change.actions.append(self._slots_row(generation))
        # A new slot begins at the next step: earlier ones were closed without it, and do not wait for it. This happens
        # when a restored shard learned from workers how far they were, before the lead, restored too, did.
        for slot in sorted(self.table.records.keys() - known) if self.config.stepwise else ():
            record = self.table.records[slot]
            missed = self.table.owed(record, self.steps.step)
            if missed:
                record.late = missed.stop - 1
                self.table.move(record, missed.stop)
                change.log_lost(slot, missed.start, missed.stop)

    def _slots_row(self, generation: Generation) -> Log:
        return Log(
            row=SlotsRow(
                shard=self.config.shard,
                term=self.term,
                sequence=self.sequence,
                start=generation.start,
                base=generation.base,
                slots=generation.slots,
            )
        )

    def _hear(self, kept: ChosenKept, change: Change) -> None:
        """At the lead: record what another shard has stored."""
        was_awaiting = bool(self.awaiting)
        self.awaiting.discard(kept.shard)
        self.table.top = max(self.table.top, kept.top_clock)
        self._next_batch = max(self._next_batch, kept.top_batch)
        self._adopt(kept.generations, change)
        if kept.term == self.term:
            self.decisions.hear(kept.shard, kept.number)
        if (
            was_awaiting and not self.awaiting
        ):  # what one of them knew, the others have to keep before it counts
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

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
            "next_batch": self._next_batch,
            "open": sorted(self._open),
        }

    @classmethod
    def from_state(cls, config: ShardConfig, state: dict[str, Any]) -> ShardCore:
        """Restore from the value of `state`."""
        core = cls(config)
        core.sequence, core.term = state["sequence"], state["term"]
        core.table = SlotTable.from_state(state["table"])
        core.steps = Steps.from_state(config, core.table, state["steps"])
        core.decisions = Decisions.from_state(state["decisions"])
        core.awaiting = set(state["awaiting"])
        term, number = state["decided"]
        core._decided = (term, number)
        core._heard_term = state["heard_term"]
        core._next_batch = state["next_batch"]
        core._open = set(state["open"])
        return core
