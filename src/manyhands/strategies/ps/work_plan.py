"""Which work a read is answered with, or why it has to wait.

The lead's answer says which batch a worker computes. Another shard predicts that answer from the slot table alone,
which may be outdated. A worker that does not train any more does not wait for others: the answer says so, and the
worker asks again if the lead, by a newer table, lets it train after all.
"""

from __future__ import annotations

from enum import IntEnum, auto

from manyhands.strategies.ps.pending_steps import Decisions, ShardConfig, Steps
from manyhands.strategies.ps.ps_messages import Assigned, Push, Update, Work, WorkKind
from manyhands.strategies.ps.slots import SlotRecord, SlotTable

_TRAIN = WorkKind.TRAIN
_UNKNOWN = Work(WorkKind.UNKNOWN)


class Hold(IntEnum):  # its members are keys: an int's hash is C's
    """Why a read cannot be answered yet."""

    OWN = auto()
    """The slot's earlier updates are not settled here, or wait for their step if the policy includes them."""
    OTHERS = auto()  # updates of other slots are missing that the consistency requires
    SHARDS = auto()  # some shard has not stored a decision: a slot change up to this clock, or the last steps
    BATCH = auto()  # no batch has been assigned to it


class WorkPlan:
    """The batches that were given out, as one shard knows them, and the answers to reads that follow."""

    def __init__(self, config: ShardConfig, table: SlotTable, steps: Steps, decisions: Decisions) -> None:
        self.next_batch = 0
        self.open: set[int] = set()  # the slots that were given a batch and have not settled it
        self._config, self._table, self._steps, self._decisions = config, table, steps, decisions
        self._placed: dict[int, Work] = {}  # by slot: the last answer of `place`
        self._generations = 0  # as many does the table have for which that counts

    @property
    def mark(self) -> int:
        """How far all slots have come; reads wait for it."""
        return self._steps.step if self._config.stepwise else self._table.floor

    @property
    def concluded(self) -> bool:
        """At the lead: whether every possible step is taken, and every other shard has stored the decisions."""
        return not self._config.chosen or not (self._steps.num_waiting or self._decisions.unkept)

    def answer(self, slot: int, clock: int) -> Work | Hold:
        """The work with which to answer a read of a known slot, or why it has to wait."""
        config, record = self._config, self._table.records.get(slot)
        own = 0 if record is None else record.next_clock
        if record is not None and record.waiting and config.policy.includes_own(len(self._table.active)):
            own = record.waiting[0]
        if own < clock:
            return Hold.OWN
        if config.leads and record is not None:
            if clock >= record.next_clock or clock in record.recent:
                return self._lead_answer(slot, record, clock)
            answer = self._lead_answer(slot, record, record.next_clock)
            if isinstance(answer, Hold):  # to be told now: other shards may wait for what is lost
                return Work(WorkKind.AHEAD, record.next_clock)
            return answer
        if not config.by_clock:
            return _UNKNOWN
        work = self.place(slot, clock)
        if work.kind is not _TRAIN:
            return work
        return Hold.OTHERS if config.lag is not None and self.mark < clock - config.lag else _UNKNOWN

    def _lead_answer(self, slot: int, record: SlotRecord, clock: int) -> Work | Hold:
        """The lead's answer to a read of a clock that is not settled."""
        config = self._config
        if config.by_clock:
            work = self.place(slot, clock)
            if work.kind is _TRAIN:
                if config.lag is not None and self.mark < clock - config.lag:
                    return Hold.OTHERS
                return Hold.SHARDS if clock >= self._decisions.unsure_from else work
            if work.kind is WorkKind.RETIRED:
                return work
        elif clock in record.recent:
            return Work(_TRAIN, clock, record.recent[clock])
        elif not self._table.is_active(slot):
            # Near the end the worker of a removed slot may be the last one, and then waits like any other.
            last = self.next_batch >= config.steps and not self.concluded
            return Hold.SHARDS if last else Work(WorkKind.RETIRED, clock)
        elif self.next_batch < config.steps:
            return Hold.BATCH
        # The run ends with its last worker: none is released while another shard might never learn of the last steps.
        return Work(WorkKind.FINISHED, clock) if self.concluded else Hold.SHARDS

    def place(self, slot: int, clock: int) -> Work:
        """Where slot and clock say the batch: what this update is of."""
        table = self._table
        if len(table.generations) != self._generations:
            self._generations = len(table.generations)
            self._placed.clear()
        placed = self._placed.get(slot)
        if placed is not None and placed.clock == clock:
            return placed  # a push is of the work that answered its read
        rank = table.rank_at(slot, clock)
        if rank is None:
            work = Work(WorkKind.RETIRED, clock)
        else:
            generation = table.generation_at(clock)
            first = (generation.start, generation.base)
            batch, part, parts = self._config.policy.place(rank, len(generation.slots), clock, first)
            is_over = batch >= self._config.steps
            work = Work(WorkKind.FINISHED, clock) if is_over else Work(_TRAIN, clock, batch, part, parts)
        self._placed[slot] = work
        return work

    def has_place(self, push: Push) -> bool:
        """Whether an update that is not settled has a place in this run.

        One that was begun before a restore may have none, if the slots changed earlier this time: its slot ends before
        it, or others have its batch. No read waited for it.
        """
        if push.clock >= self._table.record(push.slot).end:
            return False
        return not self._config.by_clock or self.place(push.slot, push.clock).kind is _TRAIN

    def outstanding_until(self, last: Update) -> int:
        """The clock below which a slot's updates will never be sent, as its worker left before update `last`.

        This extends as far as any slot has come: a restored shard may distribute the batches differently than
        before.
        """
        record = self._table.records.get(last.slot)
        clock = max(last.clock, 0 if record is None else record.next_clock)
        if self._config.by_clock:
            while clock < self._table.top and self.place(last.slot, clock).kind is _TRAIN:
                clock += 1
        return clock

    def assign(self, assigned: Assigned) -> None:
        """Give an update the next batch, unless it has one or its slot was removed on the way to the backup."""
        slot, clock = assigned
        record = self._table.record(slot)
        has_one = clock in record.recent or self.next_batch >= self._config.steps
        if not has_one and self._table.is_active(slot):
            record.remember(clock, self.next_batch)
            self.next_batch += 1
            self.open.add(slot)
