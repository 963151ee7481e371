"""What a run's logs prove: nothing was applied twice or forgotten, and no read was staler than the bound allows.

`audit` recomputes both from the rows alone. It knows the policy and nothing of the machine that wrote them. The logs of
a primary and of its backup tell the same story twice, and must agree; where a shard went back to a snapshot, what came
after that in the older term did not happen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from manyhands.consistency.policy import Policy, blend
from manyhands.server.log import (
    LateRow,
    LostRow,
    RestoredRow,
    Row,
    SkippedRow,
    SlotsRow,
    StepRow,
    UpdateRow,
)

__all__ = ["Audit", "ShardSummary", "Violation", "audit"]

_ALL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not happen, in one sentence that names the shard, the version, the slot and the clock."""

    shard: int
    sentence: str


@dataclass(slots=True, kw_only=True)
class ShardSummary:
    """What one shard's log tells."""

    shard: int
    versions: int = 0
    applied: int = 0
    late: int = 0
    skipped: int = 0
    lost: int = 0
    restores: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """How many updates were so stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found; a run is clean if nothing is wrong."""

    violations: tuple[Violation, ...]
    """In the order of the log, shard by shard."""
    shards: tuple[ShardSummary, ...]

    @property
    def clean(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations


def audit(logs: Mapping[int, Sequence[Iterable[Row]]], policy: Policy, steps: int) -> Audit:
    """Check the logs of every shard (one or more files each, in any order) of a run of `steps` batches."""
    violations: list[Violation] = []
    summaries = []
    for shard in sorted(logs):
        auditor = _Auditor(shard, policy, steps)
        auditor.read(logs[shard])
        violations += auditor.violations
        summaries.append(auditor.summary)
    return Audit(violations=tuple(violations), shards=tuple(summaries))


class _Auditor:
    """The check of one shard."""

    def __init__(self, shard: int, policy: Policy, steps: int) -> None:
        self.summary = ShardSummary(shard=shard)
        self.violations: list[Violation] = []
        self._shard = shard
        self._policy = policy
        self._steps = steps
        self._fates: dict[tuple[int, int], str] = {}  # what became of each update (slot, clock)
        self._clocks: dict[int, int] = {}  # by slot: the highest clock that a step has dealt with
        self._slots: list[SlotsRow] = []
        self._lives: list[RestoredRow] = []
        self._step_rows: list[StepRow] = []
        self._settled_at: dict[int, list[tuple[int, int]]] = {}  # by slot: (version, clocks settled by then)

    def read(self, files: Sequence[Iterable[Row]]) -> None:
        """Check everything."""
        for row in self._merge(files):
            match row:
                case StepRow():
                    self._step(row)
                case LateRow() | SkippedRow():
                    self._single(row)
                case LostRow():
                    for clock in range(row.first, row.until):
                        self._settle(row.slot, clock, "lost")
                    self.summary.lost += row.until - row.first
                case SlotsRow():
                    if all(row.start != known.start or row.slots != known.slots for known in self._slots):
                        self._slots.append(row)
                case RestoredRow():
                    self.summary.restores += 1
                    self._lives.append(row)
        self._slots.sort(key=lambda row: row.start)
        self._check_gaps()
        self._check_bound()

    def _say(self, sentence: str) -> None:
        self.violations.append(Violation(shard=self._shard, sentence=f"shard {self._shard}: {sentence}"))

    # ── one story out of several files ────────────────────────────────────────────────────────────────────────────────

    def _merge(self, files: Sequence[Iterable[Row]]) -> list[Row]:
        """The rows that happened, in order, each once."""
        rows = [list(file) for file in files]
        ends = {row.term: row.sequence for file in rows for row in file if isinstance(row, RestoredRow)}
        terms = sorted(ends)
        story: dict[tuple[int, int, int], Row] = {}
        for file in rows:
            place, index = (-1, -1), 0
            for row in file:
                later = terms[bisect_right(terms, row.term) :]
                if any(row.sequence > ends[term] for term in later):
                    continue
                if isinstance(row, SlotsRow):  # every file begins with those in force
                    story.setdefault((row.term, row.sequence, -1 - row.start), row)
                    continue
                index = index + 1 if place == (row.term, row.sequence) else 0
                place = (row.term, row.sequence)
                key = (*place, index)
                if story.setdefault(key, row) != row:
                    self._disagree(story[key], row)
        return [story[key] for key in sorted(story)]

    def _disagree(self, one: Row, other: Row) -> None:
        if isinstance(one, StepRow) and isinstance(other, StepRow):
            update = next(
                (a for a, b in zip(one.updates, other.updates, strict=False) if a != b), one.updates[0]
            )
            where = f"version {one.version} (slot {update.slot}, clock {update.clock})"
        else:
            where = f"entry {one.sequence}"
        self._say(f"two replicas wrote different rows about {where}")

    # ── exactly once ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, row: StepRow) -> None:
        if row.version != self.summary.versions + 1:
            self._say(f"version {row.version} follows version {self.summary.versions}")
        self.summary.versions = row.version
        self._step_rows.append(row)
        for update in row.updates:
            self._settle(update.slot, update.clock, f"applied as version {row.version}", row.version)
            self._clocks[update.slot] = max(self._clocks.get(update.slot, -1), update.clock)
            self.summary.applied += 1
            self.summary.staleness[update.staleness] = self.summary.staleness.get(update.staleness, 0) + 1
            self._check_update(row, update)
        self._check_rate(row)

    def _check_update(self, row: StepRow, update: UpdateRow) -> None:
        name = f"version {row.version}, slot {update.slot}, clock {update.clock}"
        kept = self._kept(update)
        true = row.version - 1 - min(update.read_version, kept)
        if update.staleness != true or true < 0:
            lost = f" of a life of which {kept} were kept" if kept < update.read_version else ""
            self._say(
                f"{name}: staleness {update.staleness} is logged, but it read version {update.read_version}{lost}, "
                f"which makes {true}"
            )
        if not 0 <= update.batch < self._steps:
            self._say(f"{name}: batch {update.batch} is none of the run's {self._steps}")

    def _kept(self, update: UpdateRow) -> int:
        """The last version of the life in which `update` was read that is part of this history."""
        return min((life.version for life in self._lives if life.term > update.read_term), default=_ALL)

    def _check_rate(self, row: StepRow) -> None:
        weights = [update.weight for update in row.updates]
        staleness = [update.staleness for update in row.updates]
        if not weights or sum(weights) <= 0:
            self._say(f"version {row.version} was made of nothing")
            return
        factors, rate = blend(self._policy, weights, staleness, row.updates[0].parts)
        if rate != row.rate or factors != [update.factor for update in row.updates]:
            first = row.updates[0]
            self._say(
                f"version {row.version}, slot {first.slot}, clock {first.clock}: the step was scaled by {row.rate!r} "
                f"where {self._policy} asks for {rate!r}, or its gradients by other factors"
            )

    def _single(self, row: LateRow | SkippedRow) -> None:
        if isinstance(row, LateRow):
            self.summary.late += 1
            self._settle(row.slot, row.clock, "late")
        else:
            self.summary.skipped += 1
            self._settle(row.slot, row.clock, "skipped")

    def _settle(self, slot: int, clock: int, fate: str, version: int | None = None) -> None:
        """Note what became of an update, which must be the first time that anything did."""
        before = self._fates.get((slot, clock))
        if before is not None:
            at = f"version {version}, " if version is not None else ""
            self._say(f"{at}slot {slot}, clock {clock}: {fate}, although it was {before} already")
            return
        self._fates[slot, clock] = fate
        versions = self._settled_at.setdefault(slot, [])
        versions.append((self.summary.versions, clock))

    def _check_gaps(self) -> None:
        """A slot's updates are applied in order: before one that was, none may be missing."""
        for slot, top in sorted(self._clocks.items()):
            starts = [row.start for row in self._slots if slot in row.slots]
            for clock in range(min(starts, default=0), top):
                if (slot, clock) not in self._fates:
                    self._say(
                        f"version {self.summary.versions}, slot {slot}, clock {clock}: it was neither applied nor "
                        f"reported, although clock {top} was applied"
                    )

    # ── the bound ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_bound(self) -> None:
        """Every read at clock c includes every slot's updates below c - lag.

        What was read in a life that the shard lost since, at or beyond the snapshot, can not be judged: what that
        version included is not in the log any more.
        """
        lag = self._policy.lag
        if lag is None:
            return
        floors = self._floors()
        for row in self._step_rows:
            for update in row.updates:
                if not 0 <= update.read_version < min(row.version, self._kept(update)):
                    continue  # of a life that was lost; anywhere else that was said already
                floor, slowest = floors[update.read_version]
                if floor < update.clock - lag:
                    self._say(
                        f"version {row.version}, slot {update.slot}, clock {update.clock}: it read version "
                        f"{update.read_version}, which lacks clock {floor} of slot {slowest}; {self._policy} "
                        f"includes all below {update.clock - lag}"
                    )

    def _floors(self) -> list[tuple[int, int]]:
        """By version: the lowest clock that a slot owed when the next version came, and that slot."""
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
        first = self._slots[0].slots if self._slots else tuple(self._settled_at)
        reached.update(dict.fromkeys(first, 0))
        events = sorted(
            (version, slot, clock)
            for slot, versions in self._settled_at.items()
            for version, clock in versions
        )
        floors: list[tuple[int, int]] = []
        at = 0
        owing = _Lowest({slot: clock for slot, clock in reached.items() if clock < ends.get(slot, clock + 1)})
        for version in range(self.summary.versions + 1):
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
            floors.append(owing.lowest())
        return floors


class _Lowest:
    """The lowest clock of many that only rise."""

    def __init__(self, clocks: dict[int, int]) -> None:
        self._clocks = clocks
        self._at: dict[int, set[int]] = {}
        for slot, clock in clocks.items():
            self._at.setdefault(clock, set()).add(slot)
        self._low = min(clocks.values(), default=0)

    def move(self, slot: int, clock: int, end: int | None) -> None:
        """A slot has come to `clock`; at its `end` it does not count any more."""
        if slot in self._clocks:
            before = self._clocks.pop(slot)
            self._at[before].discard(slot)
            if not self._at[before]:
                del self._at[before]
        if end is None or clock < end:
            self._clocks[slot] = clock
            self._at.setdefault(clock, set()).add(slot)

    def lowest(self) -> tuple[int, int]:
        """The lowest clock, and one slot that stands there."""
        if not self._clocks:
            return 2**62, -1
        while self._low not in self._at:
            self._low += 1
        return self._low, min(self._at[self._low])
