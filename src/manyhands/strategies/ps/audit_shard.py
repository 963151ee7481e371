"""The audit of one shard's log: nothing applied twice or omitted, and no read staler than the bound allows.

Everything is recomputed from the rows alone (`audit_story` merges the logs of all servers that kept the shard).
The code depends on the policy only, not on the code that wrote the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from manyhands.strategies.common.consistency import BatchPlace, Policy, blend
from manyhands.strategies.ps.audit_found import Fate, Settled, ShardSummary, Violation
from manyhands.strategies.ps.audit_story import Story, where
from manyhands.strategies.ps.log_rows import (
    LateRow,
    LostRow,
    RestoredRow,
    Row,
    SkippedRow,
    SlotsRow,
    StepRow,
    UpdateRow,
)
from manyhands.strategies.ps.ps_messages import LEAD

__all__ = ["ShardAuditor"]

_ALL = 2**62


class ShardAuditor:
    """The check of one shard; `restores` is how often the logs say that a shard of the run went back to a
    snapshot.

    `batches` are the batches that this run trained; versions continue from those that were trained before.
    """

    def __init__(self, shard: int, policy: Policy, batches: range, *, restores: int = 0) -> None:
        self.summary = ShardSummary(shard=shard, versions=batches.start)
        self.violations: list[Violation] = []
        self.missing: list[str] = []
        self.settled: dict[tuple[int, int], Settled] = {}
        """What happened to each update, by (slot, clock)."""

        self._shard, self._policy, self._batches = shard, policy, batches
        self._is_restored = restores > 0
        # Every clock of a slot is one batch, and only after a restore may a batch be assigned again.
        self._most_clocks = (batches.stop + 1) * (restores + 1)
        self._clocks: dict[int, int] = {}  # by slot: the highest clock that a step has applied
        self._slots: list[SlotsRow] = []
        self._lives: list[RestoredRow] = []
        self._step_rows: list[StepRow] = []
        self._settled_at: dict[int, list[tuple[int, int]]] = {}  # by slot: (version, clocks settled by then)

    def read(self, story: Story, share: Callable[[int, int, int], float] | None = None) -> None:
        """Check everything that the shard's rows say; `share` as in `Evidence`."""
        for problem in story.problems:
            self.say(problem)
        self._check_entries(story.rows)
        for row in story.rows:
            match row:
                case StepRow():
                    self._step(row, story)
                case LateRow():
                    self.summary.late += 1
                    self._settle(row.slot, row.clock, Fate.LATE)
                case SkippedRow():
                    self.summary.skipped += 1
                    self._settle(row.slot, row.clock, Fate.SKIPPED, batch=row.batch)
                case LostRow():
                    self._lose(row)
                case SlotsRow():
                    self._change_slots(row)
                case RestoredRow():
                    self._go_back(row)
        self._slots.sort(key=lambda row: row.start)
        self._check_updates(share)
        self._check_gaps()
        if not self.missing:  # else the log does not say all that a version included
            self._check_bound()

    def _check_entries(self, rows: Sequence[Row]) -> None:
        """Check that a push, a loss or a change of slots is one entry with a unique sequence number.

        The rows that an entry leads to have the same number: one step at most, unless the entry is the lead's
        choice for another shard, or a change of slots makes groups smaller, or (by clock, after a restore) the loss
        of several updates completes several steps. Where each update is a step by itself, an entry is a single row.
        """
        alone, chosen = self._policy.each_alone, self._policy.chosen_by_lead
        if chosen and self._shard != LEAD:
            return
        by_clock = self._policy.stepwise and self._is_restored
        several = {
            (row.term, row.sequence)
            for row in rows
            if (chosen and isinstance(row, SlotsRow)) or (by_clock and isinstance(row, LostRow))
        }
        counted = [
            row
            for row in rows
            if isinstance(row, StepRow) or (alone and not isinstance(row, SlotsRow | RestoredRow))
        ]
        for before, row in pairwise(counted):
            entry = (row.term, row.sequence)
            if entry == (before.term, before.sequence) and entry not in several:
                self.say(
                    f"{where(row)}: its sequence number {row.sequence} is that of {where(before)} already"
                )

    def say(self, sentence: str) -> None:
        self.violations.append(Violation(shard=self._shard, sentence=f"shard {self._shard}: {sentence}"))

    def lack(self, sentence: str) -> None:
        self.missing.append(f"shard {self._shard}: {sentence}")

    @property
    def applied(self) -> Iterator[tuple[StepRow, UpdateRow]]:
        return ((row, update) for row in self._step_rows for update in row.updates)

    def slots_at(self, clock: int) -> tuple[int, ...]:
        """The slots that must deliver an update at `clock`, for policies with a common clock."""
        generation = self._generation_at(clock)
        return generation.slots if generation is not None else ()

    def place(self, slot: int, clock: int) -> BatchPlace | None:
        """The batch that follows from slot and clock; None for policies where it does not."""
        generation = self._generation_at(clock)
        if not self._policy.by_clock or generation is None or slot not in generation.slots:
            return None
        rank, first = generation.slots.index(slot), (generation.start, generation.base)
        return self._policy.place(rank, len(generation.slots), clock, first)

    def _generation_at(self, clock: int) -> SlotsRow | None:
        return next((row for row in reversed(self._slots) if row.start <= clock), None)

    def _change_slots(self, row: SlotsRow) -> None:
        same = [known for known in self._slots if known.start == row.start]
        if all(row.slots != known.slots for known in same):
            if same and self._policy.by_clock and not self._is_restored:
                self.say(f"entry {row.sequence}: two rows say who is active from clock {row.start} on")
            self._slots.append(row)

    def _go_back(self, row: RestoredRow) -> None:
        if row.version > self.summary.versions:
            self.lack(f"no log tells of versions {self.summary.versions + 1} to {row.version}")
        elif row.version < self.summary.versions:
            self.say(
                f"it went back to version {row.version}, and its log has {self.summary.versions} by then"
            )
        self.summary.restores += 1
        self.summary.versions = row.version
        self._lives.append(row)

    def _lose(self, row: LostRow) -> None:
        if row.until - row.first > self._most_clocks:
            self.say(
                f"entry {row.sequence}: clocks {row.first} to {row.until - 1} of slot {row.slot} were lost, and the "
                f"run has {len(self._batches)} batches"
            )
            return
        for clock in range(row.first, row.until):
            self._settle(row.slot, clock, Fate.LOST)
        self.summary.lost += row.until - row.first

    # ── exactly once ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, row: StepRow, story: Story) -> None:
        before = self.summary.versions
        if row.version > before + 1 and (before, row.version) not in story.gaps:
            self.lack(f"no log tells of versions {before + 1} to {row.version - 1}")
        elif row.version <= before and (before, row.version) not in story.gaps:
            self.say(f"version {row.version} follows version {before}")
        self.summary.versions = row.version
        self._step_rows.append(row)
        for update in row.updates:
            self._settle(update.slot, update.clock, Fate.APPLIED, update=update, batch=update.batch)
            self._clocks[update.slot] = max(self._clocks.get(update.slot, -1), update.clock)
            self.summary.applied += 1
            self.summary.staleness[update.staleness] = self.summary.staleness.get(update.staleness, 0) + 1
        self._check_rate(row)

    def _check_updates(self, share: Callable[[int, int, int], float] | None) -> None:
        """Check every update by itself: the version it read, its batch and its weight."""
        terms = {0, *(life.term for life in self._lives)}
        for row, update in self.applied:
            name = f"version {row.version}, slot {update.slot}, clock {update.clock}"
            self._check_read(row, update, name)
            if not self._is_restored and update.read_term not in terms:
                self.say(f"{name}: it read in a life {update.read_term}, which the shard never had")
            self._check_batch(update, name)
            weight = share(update.batch, update.part, update.parts) if share is not None else update.weight
            if update.weight != weight:
                self.say(f"{name}: its weight is {update.weight!r}, and its part of the batch is {weight!r}")

    def _check_read(self, row: StepRow, update: UpdateRow, name: str) -> None:
        kept = self._kept(update)
        true = row.version - 1 - min(update.read_version, kept)
        if update.staleness != true or true < 0:
            lost = f" of a life of which {kept} were kept" if kept < update.read_version else ""
            self.say(
                f"{name}: staleness {update.staleness} is logged, but it read version {update.read_version}{lost}, "
                f"which makes {true}"
            )

    def _check_batch(self, update: UpdateRow, name: str) -> None:
        if update.batch not in self._batches:
            self.say(f"{name}: batch {update.batch} is none of the run's {len(self._batches)}")
        elif not 0 <= update.part < update.parts:
            self.say(f"{name}: it is part {update.part} of {update.parts}")
        elif not self._policy.stepwise and update.parts != 1:
            self.say(f"{name}: it is one part of {update.parts}, and {self._policy} gives batches out whole")
        place = None if self._is_restored else self.place(update.slot, update.clock)
        if place is not None and (place.batch, place.part, place.parts) != (
            update.batch,
            update.part,
            update.parts,
        ):
            self.say(
                f"{name}: it is part {update.part} of {update.parts} of batch {update.batch}, and its slot and clock "
                f"say part {place.part} of {place.parts} of batch {place.batch}"
            )

    def _kept(self, update: UpdateRow) -> int:
        """The last version, of the term in which `update` was read, that is part of this history."""
        return min((life.version for life in self._lives if life.term > update.read_term), default=_ALL)

    def _check_rate(self, row: StepRow) -> None:
        weights = [update.weight for update in row.updates]
        staleness = [update.staleness for update in row.updates]
        if not weights or sum(weights) <= 0:
            self.say(f"version {row.version} was made of nothing")
            return
        factors, rate = blend(self._policy, weights, staleness, row.updates[0].parts)
        if rate != row.rate or factors != [update.factor for update in row.updates]:
            first = row.updates[0]
            self.say(
                f"version {row.version}, slot {first.slot}, clock {first.clock}: the step was scaled by {row.rate!r} "
                f"where {self._policy} asks for {rate!r}, or its gradients by other factors"
            )

    def _settle(
        self, slot: int, clock: int, fate: Fate, *, update: UpdateRow | None = None, batch: int | None = None
    ) -> None:
        """Record what happened to an update; a second record of the same update is a violation."""
        before = self.settled.get((slot, clock))
        now = Settled(fate, self.summary.versions, update, batch)
        if before is not None:
            at = f"version {now.version}, " if fate is Fate.APPLIED else ""
            self.say(f"{at}slot {slot}, clock {clock}: {_said(now)}, although it was {_said(before)} already")
            return
        self.settled[slot, clock] = now
        self._settled_at.setdefault(slot, []).append((self.summary.versions, clock))

    def _check_gaps(self) -> None:
        """Check that a slot's updates are applied in order: none may be missing before an applied one."""
        for slot, top in sorted(self._clocks.items()):
            starts = [row.start for row in self._slots if slot in row.slots]
            settled = sorted({clock for _, clock in self._settled_at[slot]})
            for first, last in _holes(settled, min(starts, default=0), top):
                tell = self.lack if self.missing else self.say
                what = f"clock {first}: it was" if first == last else f"clocks {first} to {last}: they were"
                tell(
                    f"version {self.summary.versions}, slot {slot}, {what} neither applied nor reported, although "
                    f"clock {top} was applied"
                )

    # ── the bound ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_bound(self) -> None:
        """Check that every read at clock c includes every slot's updates below c - lag.

        A read of a lost term, at or beyond the snapshot, cannot be checked: what that version included is no
        longer in the log.
        """
        lag = self._policy.lag
        if lag is None:
            return
        judged = [  # the others are of a lost term, or were reported already
            (row, update)
            for row, update in self.applied
            if 0 <= update.read_version < min(row.version, self._kept(update))
        ]
        floors = self._floors(sorted({update.read_version for _, update in judged}))
        for row, update in judged:
            floor, slowest = floors[update.read_version]
            if floor < update.clock - lag:
                self.say(
                    f"version {row.version}, slot {update.slot}, clock {update.clock}: it read version "
                    f"{update.read_version}, which lacks clock {floor} of slot {slowest}; {self._policy} "
                    f"includes all below {update.clock - lag}"
                )

    def _floors(self, versions: Sequence[int]) -> dict[int, tuple[int, int]]:
        """For each of these ascending versions: the lowest clock that a slot had not delivered by then, and that
        slot.
        """
        settled: dict[int, set[int]] = {}
        reached: dict[int, int] = {}
        ends: dict[int, int] = {}
        for before, after in zip(self._slots, self._slots[1:], strict=False):
            for slot in after.slots:
                if slot not in before.slots:
                    reached.setdefault(slot, after.start)
            for slot in before.slots:
                if slot not in after.slots and self._policy.by_clock:
                    ends[slot] = after.start
        first: Sequence[int] = self._slots[0].slots if self._slots else tuple(self._settled_at)
        reached.update(dict.fromkeys(first, self._slots[0].start if self._slots else 0))
        events = sorted(
            (version, slot, clock)
            for slot, settled_at in self._settled_at.items()
            for version, clock in settled_at
        )
        floors: dict[int, tuple[int, int]] = {}
        at = 0
        owing = _Lowest({slot: clock for slot, clock in reached.items() if clock < ends.get(slot, clock + 1)})
        for version in versions:
            while at < len(events) and events[at][0] <= version:
                _, slot, clock = events[at]
                at += 1
                done = settled.setdefault(slot, set())
                done.add(clock)
                now = reached.get(slot, 0)
                while now in done:
                    done.remove(now)
                    now += 1
                reached[slot] = now
                owing.move(slot, now, ends.get(slot))
            floors[version] = owing.lowest()
        return floors


def _said(settled: Settled) -> str:
    return f"applied as version {settled.version}" if settled.fate is Fate.APPLIED else settled.fate.value


def _holes(settled: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """First and last of every range in [begin, end) that is not among these ascending clocks."""
    for clock in settled:
        if clock >= end:
            break
        if clock > begin:
            yield begin, clock - 1
        begin = max(begin, clock + 1)
    if begin < end:
        yield begin, end - 1


class _Lowest:
    """The minimum of many clocks that only increase."""

    def __init__(self, clocks: dict[int, int]) -> None:
        self._clocks = clocks
        self._at: dict[int, set[int]] = {}
        for slot, clock in clocks.items():
            self._at.setdefault(clock, set()).add(slot)
        self._heap = list(self._at)  # every clock that a slot has, and some stale ones
        heapify(self._heap)

    def move(self, slot: int, clock: int, end: int | None) -> None:
        """Set a slot's clock; from its `end` on the slot no longer counts."""
        if slot in self._clocks:
            before = self._clocks.pop(slot)
            self._at[before].discard(slot)
            if not self._at[before]:
                del self._at[before]
        if end is None or clock < end:
            self._clocks[slot] = clock
            if clock not in self._at:
                self._at[clock] = set()
                heappush(self._heap, clock)
            self._at[clock].add(slot)

    def lowest(self) -> tuple[int, int]:
        if not self._clocks:
            return 2**62, -1
        while self._heap[0] not in self._at:
            heappop(self._heap)
        return self._heap[0], min(self._at[self._heap[0]])
