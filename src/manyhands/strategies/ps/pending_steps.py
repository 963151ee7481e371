"""The updates that wait at a shard, and the optimizer steps that they become.

The policy decides which updates make a step, or (where arrival decides) the lead shard, whose decisions are taken
here in order. Where steps go by clock, closing one settles every slot that had to deliver an update for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from manyhands.errors import UserError, check_count
from manyhands.strategies.common.consistency import Group, Policy, blend
from manyhands.strategies.ps.actions import Action, Adopt, Apply, Drop, Log, Outcome
from manyhands.strategies.ps.log_rows import LateRow, LostRow, SkippedRow, StepRow, UpdateRow
from manyhands.strategies.ps.ps_messages import LEAD, Push, Update
from manyhands.strategies.ps.slots import SlotRecord, SlotTable

_NEVER = 2**62


class Decision(NamedTuple):
    """A group of updates, or updates released without a group (`freely`), or (None) a new slot table."""

    number: int
    step: int
    updates: tuple[Update, ...] | None
    freely: bool = False


class Decisions:
    """The lead's decisions for all shards, kept until every shard is known to have stored them.

    They are numbered from 1 and sent in order. They follow from the lead's log alone, so the lead's backup holds
    the same ones. When any shard, the lead included, gets a new primary, the unconfirmed decisions are sent again.
    """

    def __init__(self, followers: Iterable[int]) -> None:
        self.taken = 0
        self.kept = dict.fromkeys(followers, 0)
        """By follower shard: the last decision it is known to have stored."""
        self._tables: deque[tuple[int, int]] = deque()
        """The decisions about a new slot table that are not stored everywhere yet: (number, first clock)."""
        self.unkept: deque[Decision] = deque()  # the decisions that not every shard is known to have stored

    @property
    def unsure_from(self) -> int:
        """The first clock for which some shard may not know the slots."""
        return min(start for _, start in self._tables) if self._tables else _NEVER

    def take(self, step: int, updates: tuple[Update, ...] | None, freely: bool = False) -> Decision:
        self.taken += 1
        decision = Decision(number=self.taken, step=step, updates=updates, freely=freely)
        if self.kept:
            self.unkept.append(decision)
        return decision

    def take_table(self, step: int, start: int) -> Decision:
        """Make the next decision: a new slot table, which differs from the previous one from clock `start` on."""
        decision = self.take(step, None)
        if self.kept:
            self._tables.append((decision.number, start))
        return decision

    def hear(self, shard: int, number: int) -> None:
        """Record that `shard` has stored everything up to `number`, and drop what all shards have."""
        self.kept[shard] = max(self.kept[shard], min(number, self.taken))
        safe = min(self.kept.values())
        while self.unkept and self.unkept[0].number <= safe:
            self.unkept.popleft()
        while self._tables and self._tables[0][0] <= safe:
            self._tables.popleft()

    def state(self) -> dict[str, Any]:
        return {
            "taken": self.taken,
            "kept": list(self.kept.items()),
            "tables": [list(table) for table in self._tables],
            "unkept": [
                [
                    d.number,
                    d.step,
                    d.freely,
                    None if d.updates is None else [[u.slot, u.clock] for u in d.updates],
                ]
                for d in self.unkept
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Decisions:
        book = cls(())
        book.taken = state["taken"]
        book.kept = dict(state["kept"])
        book._tables.extend((number, start) for number, start in state["tables"])
        for number, step, freely, updates in state["unkept"]:
            group = None if updates is None else tuple(Update(slot=s, clock=c) for s, c in updates)
            book.unkept.append(Decision(number=number, step=step, updates=group, freely=freely))
        return book


_OF_PUSH = Push._fields[:-2]  # the Read that came with it is not state


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """The initial configuration, equal in every replica of a shard."""

    shard: int
    num_shards: int
    policy: Policy
    steps: int  # how many global batches the run has
    slots: tuple[int, ...]  # the slots that are active from clock 0 on
    leads: bool = field(init=False, repr=False, compare=False)  # whether this shard decides for all
    confirms: bool = field(init=False, repr=False, compare=False)
    """Whether an update counts at every shard or at none: no push counts before its worker has sent all of them."""
    chosen: bool = field(init=False, repr=False, compare=False)  # whether the lead chooses all groups
    chooses: bool = field(init=False, repr=False, compare=False)  # whether this shard is that lead
    follows: bool = field(init=False, repr=False, compare=False)  # whether another shard chooses its groups
    by_arrival: bool = field(init=False, repr=False, compare=False)  # and by arrival alone
    stepwise: bool = field(init=False, repr=False, compare=False)
    by_clock: bool = field(init=False, repr=False, compare=False)
    lag: int | None = field(init=False, repr=False, compare=False)
    copies: bool = field(init=False, repr=False, compare=False)
    """Those of the policy (`outlives_read` as `copies`), which are looked up for every message."""

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards:
            raise UserError(f"shard={self.shard} must be between 0 and num_shards={self.num_shards} - 1")
        check_count("steps", self.steps, 0)
        if not self.slots or len(set(self.slots)) < len(self.slots) or min(self.slots) < 0:
            raise UserError(f"slots={self.slots} must be one or more distinct numbers of at least 0")
        set_once = partial(object.__setattr__, self)  # asked several times for every message
        policy, leads = self.policy, self.shard == LEAD
        set_once("leads", leads)
        set_once("confirms", policy.lockstep and self.num_shards > 1)
        set_once("chosen", policy.chosen_by_lead)
        set_once("chooses", policy.chosen_by_lead and leads)
        set_once("follows", policy.chosen_by_lead and not leads)
        set_once("by_arrival", policy.chosen_by_lead and not policy.stepwise)
        set_once("stepwise", policy.stepwise)
        set_once("by_clock", policy.by_clock)
        set_once("lag", policy.lag)
        set_once("copies", policy.outlives_read)


@dataclass(slots=True)
class Change:
    """The effects of one entry of a shard's log."""

    entry: tuple[int, int, int]  # shard, term and sequence number, with which each of its rows begins
    actions: list[Action] = field(default_factory=list)
    outcome: Outcome = Outcome.ACCEPTED  # the outcome of a Push
    moved: list[int] = field(default_factory=list)  # slots whose reads may be answerable now
    decisions: list[Decision] = field(default_factory=list)  # what the lead has to send to the others

    def drop(self, push: Push) -> None:
        if not push.skip:
            self.actions.append(Drop(shard=push.shard, slot=push.slot, clock=push.clock))

    def log_lost(self, slot: int, first: int, until: int) -> None:
        self.actions.append(Log(LostRow(*self.entry, slot, first, until)))

    def log_late(self, slot: int, clock: int) -> None:
        """Log that a step did not wait for this update."""
        self.actions.append(Log(LateRow(*self.entry, slot, clock)))

    def log_skipped(self, push: Push) -> None:
        self.actions.append(Log(SkippedRow(*self.entry, push.slot, push.clock, push.batch, push.member)))
        if push.skip and push.settings:
            self.actions.append(Adopt(push.shard, push.settings))


class Steps:
    """The waiting updates and the steps of one shard; the `Book` that a policy reads."""

    def __init__(self, config: ShardConfig, table: SlotTable) -> None:
        self.version = 0
        self.step = 0
        self.drained = False  # set by the owner: every batch is done, and no update follows those that wait
        self.resume = 0  # at a follower: steps below this clock are decided, even if updates are missing
        self.lives: list[tuple[int, int]] = []
        """Every return to a snapshot: the new term, and the version that was restored."""
        self._config = config
        self._table = table
        self._waiting: dict[tuple[int, int], Push] = {}
        self._arrived: dict[int, int] = {}
        self._free: dict[int, int] = {}  # by slot: what is below this clock needs no choice (any more)
        self._next_free: deque[tuple[int, int]] = deque()  # of those, the ones that wait
        self._groups: deque[Group] = deque()  # chosen by the lead, not yet taken here
        self._missing: set[tuple[int, int]] = set()  # what the first of them still waits for

    # ── what a policy sees ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_active(self) -> int:
        return len(self._table.active)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def slots_at(self, clock: int) -> tuple[int, ...]:
        return self._table.generation_at(clock).slots

    def num_arrived(self, clock: int) -> int:
        return self._arrived.get(clock, 0)

    def waits(self, slot: int, clock: int) -> bool:
        return (slot, clock) in self._waiting

    def first_waiting(self, count: int) -> tuple[tuple[int, int], ...]:
        return tuple(islice(self._waiting, count))

    @property
    def waiting(self) -> frozenset[tuple[int, int]]:
        """The names (slot, clock) of the waiting updates."""
        return frozenset(self._waiting)

    # ── arrivals ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, slot: int, record: SlotRecord, until: int, change: Change) -> None:
        """Count everything of a slot below clock `until` as arrived."""
        arrived, missing = self._arrived, self._missing
        if self._config.stepwise:
            for clock in self._table.outstanding(record, until):
                arrived[clock] = arrived.get(clock, 0) + 1
        if missing:
            clocks = self._table.outstanding(record, until)
            self._missing = {name for name in missing if name[0] != slot or name[1] not in clocks}
        self._table.move(record, max(until, record.next_clock))
        change.moved.append(slot)

    def wait(self, push: Push, record: SlotRecord, change: Change) -> None:
        """Queue a settled update; one without a gradient has its place in a group like any other."""
        if push.skip:
            change.outcome = Outcome.SKIPPED
        self._waiting[push.slot, push.clock] = push
        record.waiting.append(push.clock)
        if self._free and push.clock < self._free.get(push.slot, 0):
            self._next_free.append((push.slot, push.clock))

    def follow(self, group: Group) -> None:
        """Queue a group behind those that the lead chose before it."""
        self._groups.append(group)
        if len(self._groups) == 1:
            self._await_group()

    def let_free(self, names: tuple[tuple[int, int], ...]) -> None:
        """Let these updates, and all before them in their slots, become single steps whenever they are here."""
        for slot, clock in names:
            if clock >= self._free.get(slot, 0):
                self._free[slot] = clock + 1
                waiting = self._table.record(slot).waiting
                self._next_free += [(slot, c) for c in waiting if c <= clock]

    def _await_group(self) -> None:
        self._missing = {
            (slot, clock)
            for slot, clock in (self._groups[0].updates if self._groups else ())
            if clock >= self._table.record(slot).next_clock
        }

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_group(self) -> Group | None:
        config = self._config
        if not config.follows:
            if not (self.step in self._arrived if config.stepwise else self._waiting):
                return None  # no policy makes a step of nothing
            return config.policy.next_group(self)
        if self._next_free:
            return Group(0, (self._next_free.popleft(),))
        if not self._groups or self._missing:
            return None
        group = self._groups.popleft()
        self._await_group()
        return group

    def take(self, group: Group, change: Change) -> None:
        """Take the optimizer step of a group; a named update that is not here was settled in another way."""
        config, table = self._config, self._table
        if config.stepwise and group.step < self.step:
            return  # a restored lead repeats a decision that was executed here before
        pushes: list[Push] = []
        present: list[int] = []
        for slot, clock in group.updates:
            push = self._waiting.pop((slot, clock), None)
            if push is None:
                continue
            table.records[slot].waiting.remove(clock)
            present.append(slot)
            if push.skip:
                change.log_skipped(push)
            else:
                pushes.append(push)
        if pushes:
            self._apply(pushes, change)
        if not config.stepwise:
            change.moved += present
        elif config.follows:
            self._close(present, {slot for slot, _ in group.updates}, change)
        else:
            records = table.records
            wanted = {slot for slot in self.slots_at(group.step) if records[slot].next_clock > group.step}
            self._close(present, wanted, change)

    def skip_lost_steps(self, change: Change) -> None:
        """At a shard that follows by clock: close the steps whose decisions were lost in an earlier term."""
        first = self._groups[0].step if self._groups else self.resume
        while self.step < first:
            self._close([], set(self.slots_at(self.step)), change)

    def _apply(self, pushes: list[Push], change: Change) -> None:
        weights = [push.weight for push in pushes]
        if sum(weights) <= 0:  # parts of a batch that has fewer samples than there are workers
            for push in pushes:
                change.drop(push)
                change.log_skipped(push)
            return
        staleness = [self.version - push.read_version for push in pushes]
        if self.lives:
            # Of a version read in an earlier term only what the snapshot kept is part of this history.
            for number, push in enumerate(pushes):
                lost = (self.version - kept for term, kept in self.lives if term > push.read_term)
                staleness[number] = max(staleness[number], *lost, staleness[number])
        factors, rate = blend(self._config.policy, weights, staleness, pushes[0].parts)
        self.version += 1
        if change.outcome is Outcome.ACCEPTED:
            change.outcome = Outcome.APPLIED
        updates = []
        for push, stale, factor in zip(pushes, staleness, factors, strict=True):
            name = (push.slot, push.clock, push.batch, push.part, push.parts, push.member, push.read_version)
            reads = (push.read_term, push.rows_version, push.carrier)
            updates.append(UpdateRow(*name, stale, push.weight, factor, *reads))
        settings = next((push.settings for push in pushes if push.settings), "")
        change.actions.append(Apply(StepRow(*change.entry, self.version, rate, tuple(updates)), settings))

    def _close(self, present: list[int], wanted: set[int], change: Change) -> None:
        """Close the step of the next clock, and settle the slots that are not in it as lost or late.

        `wanted` are the slots whose update the step should contain.
        """
        clock = self.step
        self.step += 1
        self._arrived.pop(clock, None)
        for slot in self.slots_at(clock):
            change.moved.append(slot)
            if slot in present:
                continue
            record = self._table.records[slot]
            push = self._waiting.pop((slot, clock), None)
            if push is not None:
                record.waiting.remove(clock)
                change.drop(push)
            if slot in wanted:
                change.log_lost(slot, clock, clock + 1)
            else:
                record.late = max(record.late, clock)
                change.log_late(slot, clock)
            if record.next_clock <= clock:
                self._table.move(record, clock + 1)

    def state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "step": self.step,
            "resume": self.resume,
            "free": list(self._free.items()),
            "lives": [list(life) for life in self.lives],
            "waiting": [dict(zip(_OF_PUSH, push, strict=False)) for push in self._waiting.values()],
            "arrived": list(self._arrived.items()),
            "groups": [[group.step, [list(name) for name in group.updates]] for group in self._groups],
        }

    @classmethod
    def from_state(cls, config: ShardConfig, table: SlotTable, state: dict[str, Any]) -> Steps:
        steps = cls(config, table)
        steps.version, steps.step, steps.resume = state["version"], state["step"], state["resume"]
        steps._free = dict(state["free"])
        steps.lives = [(term, version) for term, version in state["lives"]]
        for waiting in state["waiting"]:
            push = Push(**waiting)
            steps._waiting[push.slot, push.clock] = push
            table.records[push.slot].waiting.append(push.clock)
        steps._arrived = dict(state["arrived"])
        for step, names in state["groups"]:
            steps._groups.append(Group(step, tuple((slot, clock) for slot, clock in names)))
        steps._await_group()
        return steps
