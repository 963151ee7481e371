"""The audit of one shard's log: nothing applied twice or omitted, and no read staler than the bound allows.

Everything is recomputed from the rows alone, and depends on the policy only, not on the code that wrote them.

The logs of all servers that kept the shard are merged first. A server writes from the point where it was given the
shard (a **stint**: it opens with the slots in force, or with a return to a snapshot) to the point where it stopped.
Within a stint no row may be missing. Two stints that overlap must have the same rows in the overlap, since a primary
and its backup commit the same entries. A stint may end anywhere, as its server may die; rows between two stints may be
missing if a disk was full. If a shard went back to a snapshot, the later rows of the older term are discarded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from manyhands.strategies.common.consistency import Policy, blend
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

_ALL = 2**62


class Violation(NamedTuple):
    """A broken rule, in one sentence that names the shard, the version, the slot and the clock."""

    shard: int
    sentence: str


@dataclass(slots=True, kw_only=True)
class ShardSummary:
    """Counts from one shard's log."""

    shard: int
    versions: int = 0  # the last version
    applied: int = 0
    late: int = 0
    skipped: int = 0
    lost: int = 0
    restores: int = 0
    staleness: dict[int, int] = field(default_factory=dict)  # the number of updates by staleness
    batches: int = 0  # those of the run that the shard has, with all their parts that count


class Fate(Enum):
    """What happened to an update at a shard."""

    APPLIED = "applied"
    LATE = "late"
    SKIPPED = "skipped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class _Settled:
    """An update that a shard's log accounts for."""

    fate: Fate
    version: int  # the shard's at that point
    update: UpdateRow | None = None  # if it was applied
    batch: int | None = None  # if the row names it

    def __str__(self) -> str:
        return f"applied as version {self.version}" if self.fate is Fate.APPLIED else self.fate.value


class ShardAuditor:
    """The check of one shard; `restores` is how often, by the logs, a shard of the run went back to a snapshot.

    `batches` are the batches that this run trained; versions continue from those that were trained before.
    """

    def __init__(self, shard: int, policy: Policy, batches: range, *, restores: int = 0) -> None:
        self.summary = ShardSummary(shard=shard, versions=batches.start)
        self.violations: list[Violation] = []
        self.missing: list[str] = []
        self.settled: dict[tuple[int, int], _Settled] = {}  # what happened to each update, by (slot, clock)
        self._shard, self._policy, self._batches = shard, policy, batches
        self._is_restored = restores > 0
        # Every clock of a slot is one batch, and only after a restore may a batch be assigned again.
        self._most_clocks = (batches.stop + 1) * (restores + 1)
        self._slots: list[SlotsRow] = []
        self._lives: list[RestoredRow] = []
        self._step_rows: list[StepRow] = []
        self._settled_at: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """By slot: (version, clocks settled by then)."""

    def read(
        self, files: Sequence[Iterable[Row]], share: Callable[[int, int, int], float] | None = None
    ) -> None:
        """Check everything that the shard's files, in any order, say; `share` as in `Evidence`."""
        story = _merged(files)
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
                case LostRow(first=first, until=until) if until - first > self._most_clocks:
                    self.say(
                        f"entry {row.sequence}: clocks {first} to {until - 1} of slot {row.slot} were lost, but the "
                        f"run has only {len(self._batches)} batches"
                    )
                case LostRow(first=first, until=until):
                    for clock in range(first, until):
                        self._settle(row.slot, clock, Fate.LOST)
                    self.summary.lost += until - first
                case SlotsRow(start=start):
                    same = [known for known in self._slots if known.start == start]
                    if all(row.slots != known.slots for known in same):
                        if same and self._policy.by_clock and not self._is_restored:
                            self.say(
                                f"entry {row.sequence}: two rows disagree on the active slots from clock {start}"
                            )
                        self._slots.append(row)
                case RestoredRow(version=version):
                    before = self.summary.versions
                    if version > before:
                        self.lack(f"no log has versions {before + 1} to {version}")
                    elif version < before:
                        self.say(f"it went back to version {version}, but its log already has {before}")
                    self.summary.restores += 1
                    self.summary.versions = version
                    self._lives.append(row)
        self._slots.sort(key=lambda row: row.start)
        self._check_updates(share)
        self._check_gaps()
        if not self.missing:  # else the log does not say all that a version included
            self._check_bound()

    def _check_entries(self, rows: Sequence[Row]) -> None:
        """Check that a push, a loss or a change of slots is one entry with a unique sequence number.

        The rows that an entry leads to have the same number: one step at most, unless the entry is the lead's
        choice for another shard, or a change of slots makes groups smaller, or (by clock, after a restore) steps
        that were complete waited for one that the loss of an update, or another push, completes. Where each update
        is a step by itself, an entry is a single row.
        """
        alone, chosen = self._policy.each_alone, self._policy.chosen_by_lead
        went_back = self._policy.stepwise and self._is_restored
        if chosen and self._shard != LEAD:
            return
        changed = {(row.term, row.sequence) for row in rows if chosen and isinstance(row, SlotsRow)}
        lost: defaultdict[tuple[int, int], list[LostRow]] = defaultdict(list)
        for row in rows:
            if isinstance(row, LostRow) and went_back:
                lost[row.term, row.sequence].append(row)
        counted = [
            row
            for row in rows
            if isinstance(row, StepRow) or (alone and not isinstance(row, SlotsRow | RestoredRow))
        ]
        for before, row in pairwise(counted):
            entry = (row.term, row.sequence)
            if entry != (before.term, before.sequence) or entry in changed:
                continue
            # The updates of a step that were all computed from what was read before the shard went back may arrive
            # before the step that it went back to, and make a quorum while they wait for it: the push that completes
            # that step then completes theirs, in the same entry.
            updates = row.updates if isinstance(row, StepRow) and went_back else ()
            if updates and all(update.read_term < row.term for update in updates):
                continue
            clock = before.updates[0].clock if isinstance(before, StepRow) and before.updates else -1
            if not any(one.first <= clock < one.until for one in lost.get(entry, ())):
                self.say(
                    f"{_where(row)}: its sequence number {row.sequence} is already used by {_where(before)}"
                )

    def say(self, sentence: str) -> None:
        self.violations.append(Violation(shard=self._shard, sentence=f"shard {self._shard}: {sentence}"))

    def lack(self, sentence: str) -> None:
        self.missing.append(f"shard {self._shard}: {sentence}")

    @property
    def applied(self) -> Iterator[tuple[StepRow, UpdateRow]]:
        return ((row, update) for row in self._step_rows for update in row.updates)

    def generation_at(self, clock: int) -> SlotsRow | None:
        """The slots that are active at `clock`, for policies with a common clock."""
        return next((row for row in reversed(self._slots) if row.start <= clock), None)

    def _step(self, row: StepRow, story: _Story) -> None:
        before = self.summary.versions
        if (before, row.version) in story.gaps:
            pass  # reported already
        elif row.version > before + 1:
            self.lack(f"no log has versions {before + 1} to {row.version - 1}")
        elif row.version <= before:
            self.say(f"version {row.version} follows version {before}")
        self.summary.versions = row.version
        self._step_rows.append(row)
        for update in row.updates:
            self._settle(update.slot, update.clock, Fate.APPLIED, update=update, batch=update.batch)
            self.summary.applied += 1
            self.summary.staleness[update.staleness] = self.summary.staleness.get(update.staleness, 0) + 1
        own = {(update.slot, update.clock) for update in row.updates if update.carrier < 0}
        for update in row.updates:
            if update.carrier >= 0 and (update.carrier, update.clock) not in own:
                self.say(
                    f"version {row.version}, slot {update.slot}, clock {update.clock}: its gradient came in that of "
                    f"slot {update.carrier}, which is not in this step"
                )
        weights = [update.weight for update in row.updates]
        if not weights or sum(weights) <= 0:
            self.say(f"version {row.version} has no updates, or their weights add up to 0")
            return
        first = row.updates[0]
        factors, rate = blend(self._policy, weights, [one.staleness for one in row.updates], first.parts)
        if rate != row.rate or factors != [update.factor for update in row.updates]:
            self.say(
                f"version {row.version}, slot {first.slot}, clock {first.clock}: {self._policy} scales "
                f"this step by {rate!r}, but it was scaled by {row.rate!r}, or its gradients by wrong factors"
            )

    def _settle(
        self, slot: int, clock: int, fate: Fate, *, update: UpdateRow | None = None, batch: int | None = None
    ) -> None:
        """Record what happened to an update; a second record of the same update is a violation."""
        before = self.settled.get((slot, clock))
        now = _Settled(fate, self.summary.versions, update, batch)
        if before is not None:
            at = f"version {now.version}, " if fate is Fate.APPLIED else ""
            self.say(f"{at}slot {slot}, clock {clock}: {now}, but it was already {before}")
            return
        self.settled[slot, clock] = now
        self._settled_at[slot].append((self.summary.versions, clock))

    def _check_updates(self, share: Callable[[int, int, int], float] | None) -> None:
        """Check every update by itself: the version it read, its batch and its weight."""
        terms = {0, *(life.term for life in self._lives)}
        for row, update in self.applied:
            name = f"version {row.version}, slot {update.slot}, clock {update.clock}"
            kept = self._kept(update)
            true = row.version - 1 - min(update.read_version, kept)
            if update.staleness != true or true < 0:
                lost = f", and the restore kept only {kept}" if kept < update.read_version else ""
                self.say(
                    f"{name}: staleness {update.staleness} is logged, but it read version {update.read_version}{lost}: "
                    f"its staleness is {true}"
                )
            if not self._is_restored and update.read_term not in terms:
                self.say(f"{name}: it read in term {update.read_term}, which the shard never had")
            self._check_batch(update, name)
            weight = share(update.batch, update.part, update.parts) if share is not None else update.weight
            if update.weight != weight:
                self.say(f"{name}: its weight is {update.weight!r}, but its share of the batch is {weight!r}")

    def _check_batch(self, update: UpdateRow, name: str) -> None:
        if update.batch not in self._batches:
            self.say(f"{name}: batch {update.batch} is not one of the run's {len(self._batches)}")
        elif not 0 <= update.part < update.parts:
            self.say(f"{name}: it is part {update.part} of {update.parts}, which is invalid")
        elif not self._policy.stepwise and update.parts != 1:
            self.say(f"{name}: it is one of {update.parts} parts, but {self._policy} does not split batches")
        exact = self._policy.by_clock and not self._is_restored
        generation = self.generation_at(update.clock) if exact else None
        if generation is None:
            return
        slots, first = generation.slots, (generation.start, generation.base)
        if update.slot in slots:
            place = self._policy.place(slots.index(update.slot), len(slots), update.clock, first)
            if (place.batch, place.part, place.parts) != (update.batch, update.part, update.parts):
                self.say(
                    f"{name}: it is part {update.part} of {update.parts} of batch {update.batch}, but its slot and "
                    f"clock require part {place.part} of {place.parts} of batch {place.batch}"
                )

    def _kept(self, update: UpdateRow) -> int:
        """The last version, of the term in which `update` was read, that is part of this history."""
        return min((life.version for life in self._lives if life.term > update.read_term), default=_ALL)

    def _check_gaps(self) -> None:
        """Check that a slot's updates are applied in order: none may be missing before an applied one."""
        tops: dict[int, int] = {}
        for _, update in self.applied:
            tops[update.slot] = max(tops.get(update.slot, -1), update.clock)
        for slot, top in sorted(tops.items()):
            starts = [row.start for row in self._slots if slot in row.slots]
            settled = sorted({clock for _, clock in self._settled_at[slot]})
            for first, last in _holes(settled, min(starts, default=0), top):
                report = self.lack if self.missing else self.say
                what = f"clock {first}: it was" if first == last else f"clocks {first} to {last}: they were"
                report(
                    f"version {self.summary.versions}, slot {slot}, {what} neither applied nor reported, but "
                    f"clock {top} was applied"
                )

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
        versions = sorted({update.read_version for _, update in judged})
        floors = _floors(versions, self._slots, self._settled_at, self._policy.by_clock)
        for row, update in judged:
            floor, slowest = floors[update.read_version]
            if floor < update.clock - lag:
                self.say(
                    f"version {row.version}, slot {update.slot}, clock {update.clock}: it read version "
                    f"{update.read_version}, which lacks clock {floor} of slot {slowest}; {self._policy} "
                    f"requires all below {update.clock - lag}"
                )


def _holes(settled: Iterable[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """First and last of every range in [begin, end) that is not among these ascending clocks."""
    for clock in settled:
        if clock >= end:
            break
        if clock > begin:
            yield begin, clock - 1
        begin = max(begin, clock + 1)
    if begin < end:
        yield begin, end - 1


def _floors(
    versions: Sequence[int],
    slots: Sequence[SlotsRow],
    settled_at: Mapping[int, Sequence[tuple[int, int]]],
    by_clock: bool,
) -> dict[int, tuple[int, int]]:
    """For each of these ascending versions: the lowest clock that a slot had not delivered by then, and that slot."""
    reached = dict.fromkeys(slots[0].slots if slots else settled_at, slots[0].start if slots else 0)
    ends: dict[int, int] = {}
    for before, after in pairwise(slots):
        reached |= {slot: after.start for slot in after.slots if slot not in (*before.slots, *reached)}
        if by_clock:
            ends |= dict.fromkeys(set(before.slots) - set(after.slots), after.start)
    settled: defaultdict[int, set[int]] = defaultdict(set)
    events = sorted((version, slot, clock) for slot, pairs in settled_at.items() for version, clock in pairs)
    at = 0
    # The clocks that slots owe, lowest first; one that its slot has passed since is removed when it is met.
    pending = [(clock, slot) for slot, clock in reached.items() if clock < ends.get(slot, _ALL)]
    heapify(pending)
    floors: dict[int, tuple[int, int]] = {}
    for version in versions:
        while at < len(events) and events[at][0] <= version:
            _, slot, clock = events[at]
            at += 1
            settled[slot].add(clock)
            now = reached.get(slot, 0)
            while now in settled[slot]:
                settled[slot].remove(now)
                now += 1
            reached[slot] = now
            if now < ends.get(slot, _ALL):
                heappush(pending, (now, slot))
        while pending and reached[pending[0][1]] != pending[0][0]:
            heappop(pending)
        floors[version] = pending[0] if pending else (_ALL, -1)
    return floors


# ── the logs of several servers as one history ────────────────────────────────────────────────────────────────────────

_Key = tuple[int, int, int]  # (term, sequence, which row of that entry)


@dataclass(slots=True)
class _Story:
    """The merged rows in order, each once."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # contradictions between the logs
    gaps: set[tuple[int, int]] = field(default_factory=set)
    """(version, next version) pairs within a stint that `problems` already reports."""


@dataclass(slots=True)
class _Stint:
    """The rows that one server wrote from one opening on."""

    begin: int
    slots: list[SlotsRow] = field(default_factory=list)
    rows: dict[_Key, Row] = field(default_factory=dict)  # except those of slots
    version: int | None = None  # of the last step, if known


def _merged(files: Sequence[Iterable[Row]]) -> _Story:
    logs = [list(file) for file in files]
    ends = {row.term: row.sequence for log in logs for row in log if isinstance(row, RestoredRow)}
    terms = sorted(ends)

    def happened(row: Row) -> bool:
        return all(row.sequence <= ends[term] for term in terms[bisect_right(terms, row.term) :])

    story = _Story()
    merged: dict[_Key, Row] = {}
    slots: dict[Row, _Key] = {}  # every stint opens with all of those in force, each of which counts once
    stints = [stint for log in logs for stint in _stints([row for row in log if happened(row)], story)]
    for stint in stints:
        for opening in stint.slots:
            slots.setdefault(opening, (opening.term, opening.sequence, -1))
        for key, row in stint.rows.items():
            other = merged.setdefault(key, row)
            if other != row:
                where = _where(other)
                if isinstance(other, StepRow) and isinstance(row, StepRow):
                    differ = [a for a, b in zip(other.updates, row.updates, strict=False) if a != b]
                    where = _where(other, *differ[:1])
                story.problems.append(f"two replicas wrote different rows for {where}")
    order = sorted(merged)
    for stint in stints:
        # It has every row that any server wrote between its opening and its last entry, which may be cut.
        term, end, _ = max(stint.rows, default=(-1, -1, -1))
        after, until = bisect_left(order, (term, stint.begin + 1, 0)), bisect_left(order, (term, end, 0))
        story.problems += [
            f"one replica's log lacks {_where(merged[key])}, which another replica has"
            for key in order[after:until]
            if key not in stint.rows
        ]
    happenings = [(key, row) for row, key in slots.items()] + list(merged.items())
    story.rows = [row for _, row in sorted(happenings, key=lambda one: one[0])]
    return story


def _where(row: Row, update: UpdateRow | None = None) -> str:
    """The row as messages name it: a step by this update, or its first."""
    if isinstance(row, StepRow) and row.updates:
        update = update or row.updates[0]
        return f"version {row.version} (slot {update.slot}, clock {update.clock})"
    return f"entry {row.sequence}"


def _stints(rows: list[Row], story: _Story) -> list[_Stint]:
    """The stints of one file; a step that does not follow its predecessor within a stint is reported."""
    stints: list[_Stint] = []
    first = next((row for row in rows if isinstance(row, SlotsRow)), None)
    before: Row | None = None
    place, index = (-1, -1), 0
    for row in rows:
        again = isinstance(row, SlotsRow) and not isinstance(before, SlotsRow | RestoredRow)
        # A row of slots that repeats the file's first one opens a stint: the server was given the shard again.
        if not stints or isinstance(row, RestoredRow) or (again and _table(row) == _table(first)):
            version: int | None = row.version if isinstance(row, RestoredRow) else 0
            if isinstance(row, SlotsRow) and (row.term, row.sequence) != (0, 0):
                version = None  # of a server that was given the shard during the run
            begin = row.sequence if isinstance(row, SlotsRow | RestoredRow) else -1
            stints.append(_Stint(begin=begin, version=version))
            place = (-1, -1)
        stint, before = stints[-1], row
        if isinstance(row, SlotsRow):
            stint.slots.append(row)
            continue
        if (row.term, row.sequence) < place:
            story.problems.append(f"entry {row.sequence} follows entry {place[1]}")
        index = index + 1 if place == (row.term, row.sequence) else 0
        place = (row.term, row.sequence)
        stint.rows[(*place, index)] = row
        if isinstance(row, StepRow):
            if stint.version is not None and row.version != stint.version + 1:
                story.problems.append(f"version {row.version} follows version {stint.version}")
                story.gaps.add((stint.version, row.version))
            stint.version = row.version
    return stints


def _table(row: Row | None) -> tuple[int, int, tuple[int, ...]] | None:
    return (row.start, row.base, row.slots) if isinstance(row, SlotsRow) else None
