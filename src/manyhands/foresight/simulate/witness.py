"""Independent checker of simulated runs: what workers read and servers held, against the consistency's guarantees.

It looks at the stores of a symbolic model (`Ledger`) and at what servers acknowledge, and never asks a core or a
policy. So a bug in a core, or in the auditor that reads its log, is not repeated here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from manyhands.foresight.simulate.models import LedgerStore, SimulatedMark, SimulatedSeen, Store
from manyhands.foresight.simulate.simulated_run import Observer, SimulatedHappening, SimulatedRun, UpdateNames
from manyhands.strategies.ps.actions import Ack, Outcome
from manyhands.strategies.ps.log_rows import LateRow, LostRow, SlotsRow, StepRow, UpdateRow
from manyhands.strategies.ps.ps_messages import LEAD, Work

__all__ = ["Witness", "WitnessedPromise"]

_EVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessedPromise:
    """The guarantees of a consistency in plain numbers.

    `bound`: a read at clock c includes every update below c - bound (None: no such promise). `own`: it includes all of
    the reader's own. `late`: so many parts of a batch may be left out of its step (backup workers).
    """

    steps: int
    bound: int | None
    own: bool = True
    late: int = 0


@dataclass(frozen=True, slots=True)
class _Reading:
    slot: int
    work: Work
    seen: tuple[SimulatedSeen, ...]


class Witness(Observer):
    """Observes one run of a `Ledger`; `complaints` lists the violations."""

    def __init__(self, promise: WitnessedPromise) -> None:
        self._promise = promise
        self._readings: list[_Reading] = []
        self._acknowledged: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.at_risk: dict[int, set[tuple[int, int]]] = {}  # by shard that was restored from a snapshot
        self._reached: dict[int, int] = {}  # by slot: the clock after the last update that any shard answered
        self._life: dict[int, set[LedgerStore]] = defaultdict(set)
        """By shard: the stores that were read since it last went back to a snapshot."""
        self._at_end: dict[int, tuple[int, set[tuple[int, int]]]] = {}
        """By shard, when all was over: how many steps it had taken, and what was in none."""
        self._lost_at_takeover: list[str] = []
        self.happenings: list[SimulatedHappening] = []  # victims of faults, and when they were recovered

    def computes(self, slot: int, work: Work, read: list[Any], _now_s: float) -> None:
        self._readings.append(_Reading(slot, work, tuple(read)))

    def acknowledges(self, ack: Ack) -> None:
        self._reached[ack.slot] = max(self._reached.get(ack.slot, 0), ack.clock + 1)
        # An applied update counts; an accepted one may be late, except at the lead.
        is_sure = ack.shard == LEAD or not self._promise.late
        sure = (Outcome.ACCEPTED, Outcome.DUPLICATE) if is_sure else ()
        if ack.outcome in (Outcome.APPLIED, *sure):
            self._acknowledged[ack.shard].add((ack.slot, ack.clock))

    def serves(self, shard: int, server: int, store: Store, held: UpdateNames, now_s: float) -> None:
        assert isinstance(store, LedgerStore)
        self._life[shard].add(store)
        self._lost_at_takeover += [
            f"update {clock} of slot {slot} was acknowledged by shard {shard}, but server {server}, which "
            f"took over at {now_s:g} s, does not have it"
            for slot, clock in sorted(self._acknowledged[shard] - _names(store) - set(held))
        ]

    def restores(self, shard: int) -> None:
        """Record a restore: acknowledged updates may be lost, but the log must say so."""
        self._life.pop(shard, None)
        self._at_end.pop(shard, None)
        self.at_risk[shard] = self.at_risk.get(shard, set()) | self._acknowledged.pop(shard, set())

    def over(self, shard: int, store: Store, held: UpdateNames) -> None:
        assert isinstance(store, LedgerStore)
        self._at_end[shard] = len(store.groups), set(held)

    def happens(self, happening: SimulatedHappening) -> None:
        self.happenings.append(happening)

    def complaints(self, run: SimulatedRun) -> list[str]:
        found = list(self._lost_at_takeover)
        for shard, store in enumerate(run.stores):
            assert isinstance(store, LedgerStore)
            found += [
                f"shard {shard} applied update {clock} of slot {slot} twice"
                for (slot, clock), times in Counter((m.slot, m.clock) for m in _marks(store)).items()
                if times > 1
            ]
            found += [
                f"shard {shard} acknowledged update {clock} of slot {slot} and does not have it"
                for slot, clock in sorted(self._acknowledged[shard] - _names(store))
            ]
            found += self._unfinished(shard, store, run)
            found += self._unaccounted(shard, store, run)
            found += self._misreported(shard, store, run)
            found += self._diverged(shard, store)
            found += self._too_stale(shard, store)
            if shard not in self.at_risk:
                found += self._misread(shard, run)
            if not self.at_risk:
                found += self._incomplete(shard, store)
        return found + self._torn(run)

    def _torn(self, run: SimulatedRun) -> list[str]:
        """In lockstep, what an applied update is computed from is one version, the same at every shard.

        Unless a server died: with a worker, it may have taken down what this worker had sent it.
        """
        promise = self._promise
        if promise.bound != 0 or promise.late or any(h.what == "server killed" for h in self.happenings):
            return []
        applied = set.intersection(*map(_names, run.stores))
        return [
            f"slot {reading.slot} read {[seen.length for seen in reading.seen]} steps of the shards for update "
            f"{reading.work.clock}"
            for reading in self._readings
            if (reading.slot, reading.work.clock) in applied
            and len({seen.length for seen in reading.seen}) > 1
        ]

    def _unfinished(self, shard: int, store: LedgerStore, run: SimulatedRun) -> list[str]:
        """Check that at the end only late updates are pending, and that backups equal their primaries."""
        late = {(row.slot, row.clock) for row in run.logs[shard] if isinstance(row, LateRow)}
        steps, held = self._at_end.get(shard, (len(store.groups), set()))
        found = [
            f"the run was over with update {clock} of slot {slot} in no step of shard {shard}"
            for slot, clock in sorted(held - late - run.held[shard])
        ]
        if steps != len(store.groups):
            now = len(store.groups)
            found.append(f"shard {shard} had {steps} steps at the end of the run, and now has {now}")
        found += [
            f"shard {shard} ended with update {clock} of slot {slot} in no step"
            for slot, clock in sorted(run.held[shard] - late)
        ]
        backup = run.backups[shard]
        if isinstance(backup, LedgerStore) and backup.groups != store.groups:
            found.append(
                f"shard {shard} ended after {len(store.groups)} steps and its backup after {len(backup.groups)}, "
                "or the steps differ"
            )
        return found

    def _unaccounted(self, shard: int, store: LedgerStore, run: SimulatedRun) -> list[str]:
        """Every update of every slot is in a step, or the log says once that it is not.

        That goes for what was acknowledged before a restore, too, from the clock on at which its slot begins now; one
        that was added after the snapshot may begin at a later clock than before, or never.
        """
        logged: Counter[tuple[int, int]] = Counter()
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        slots: set[int] = set()
        for row in run.logs[shard]:
            if isinstance(row, SlotsRow):  # every incarnation of the shard begins with all of them
                starts.update({slot: row.start for slot in row.slots if slot not in starts})
                ends.update({slot: row.start for slot in slots - set(row.slots) if slot not in ends})
                slots = set(row.slots)
            elif isinstance(row, LostRow):
                logged.update((row.slot, clock) for clock in range(row.first, row.until))
            elif isinstance(row, LateRow):
                logged[row.slot, row.clock] += 1
        names = _names(store)
        wanted = {
            (slot, clock)
            for slot, start in starts.items()
            for clock in range(start, min(self._reached.get(slot, 0), ends.get(slot) or _EVER))
        }
        wanted |= {name for name in self.at_risk.get(shard, ()) if name[1] >= starts.get(name[0], _EVER)}
        found = [
            f"shard {shard} lost update {clock} of slot {slot} and does not say so"
            for slot, clock in sorted(wanted - names - logged.keys())
        ]
        found += [
            f"shard {shard} says {count} times that update {clock} of slot {slot} is in no step"
            for (slot, clock), count in sorted(logged.items())
            if count > 1
        ]
        return found + [
            f"shard {shard} says that update {clock} of slot {slot} is in no step, and has it"
            for slot, clock in sorted(names & logged.keys())
        ]

    def _incomplete(self, shard: int, store: LedgerStore) -> list[str]:
        promise = self._promise
        parts: dict[int, list[int]] = defaultdict(list)
        whole: dict[int, int] = {}
        for mark in _marks(store):
            parts[mark.batch].append(mark.part)
            whole[mark.batch] = mark.parts
        found = []
        for batch in range(promise.steps):
            seen, full = sorted(parts[batch]), whole.get(batch, 1)
            enough = len(seen) >= max(1, full - promise.late)
            if not enough or len(set(seen)) < len(seen) or not set(seen) <= set(range(full)):
                found.append(f"shard {shard} applied parts {seen} of batch {batch}, which has {full}")
        if extra := sorted(batch for batch in parts if batch >= promise.steps):
            found.append(f"shard {shard} applied batches {extra} of a run of {promise.steps}")
        return found

    def _diverged(self, shard: int, store: LedgerStore) -> list[str]:
        """Check that every read since the last restore is a prefix of the one history."""
        lengths: dict[LedgerStore, int] = defaultdict(int)
        for reading in self._readings:
            seen = reading.seen[shard]
            if seen.store in self._life[shard]:
                lengths[seen.store] = max(lengths[seen.store], seen.length)
        return [
            f"shard {shard} was read with a history that is not the final one"
            for other, length in lengths.items()
            if other.groups[:length] != store.groups[:length]
        ]

    def _too_stale(self, shard: int, store: LedgerStore) -> list[str]:
        """Check staleness: the position of every update in the history, against how much of it a reader had."""
        promise = self._promise
        position = {(m.slot, m.clock): index for index, group in enumerate(store.groups) for m in group}
        last: dict[int, tuple[int, int, int]] = {}
        for (slot, clock), index in position.items():
            last[clock] = max(last.get(clock, (-1, -1, -1)), (index, slot, clock))
        below: list[tuple[int, int, int]] = [(-1, -1, -1)]
        for clock in range(max(last, default=-1) + 1):
            below.append(max(below[-1], last.get(clock, (-1, -1, -1))))
        found = []
        for reading in self._readings:
            if reading.seen[shard].store not in self._life[shard]:
                continue  # what it had read is no longer in the history
            length, clock = reading.seen[shard].length, reading.work.clock
            if self.at_risk and (reading.slot, clock) not in position:
                continue  # begun before a restore, and in no step: its read had no effect
            who = f"slot {reading.slot} read {length} steps of shard {shard} for its update {clock}"
            own = position.get((reading.slot, clock - 1), -1)
            if promise.own and own >= length:
                found.append(f"{who}, without its own update {clock - 1}, which is in step {own + 1}")
            if promise.bound is None or clock <= promise.bound:
                continue
            index, slot, missed = below[min(clock - promise.bound, len(below) - 1)]
            if index >= length:
                found.append(f"{who}, without update {missed} of slot {slot}, which is in step {index + 1}")
        return found

    def _misreported(self, shard: int, store: LedgerStore, run: SimulatedRun) -> list[str]:
        rows = [row for row in run.logs[shard] if isinstance(row, StepRow)]
        logged = [tuple((u.slot, u.clock, u.batch) for u in _in_order(row)) for row in rows]
        true = [tuple((m.slot, m.clock, m.batch) for m in group) for group in store.groups]
        if logged != true:
            pairs = enumerate(zip(logged, true, strict=False))
            first = next((number for number, (one, other) in pairs if one != other), None)
            counts = f"{len(logged)} steps for {len(true)}"
            return [f"the log of shard {shard} has {counts}, first difference at {first}"]
        return []

    def _misread(self, shard: int, run: SimulatedRun) -> list[str]:
        rows = [row for row in run.logs[shard] if isinstance(row, StepRow)]
        read: dict[tuple[int, int], set[int]] = defaultdict(set)
        for reading in self._readings:
            read[reading.slot, reading.work.clock].add(reading.seen[shard].length)
        return [
            f"the log of shard {shard} says that slot {u.slot} read version {u.read_version} for update {u.clock} "
            f"and that this was {u.staleness} steps stale in step {row.version}; it read {read[u.slot, u.clock]}"
            for row in rows
            for u in row.updates
            if u.read_version not in read[u.slot, u.clock] or u.staleness != row.version - 1 - u.read_version
        ]


def _in_order(row: StepRow) -> list[UpdateRow]:
    """The updates of a step in the order of their sum: those that a carrier brought are behind its own."""
    own = [one for one in row.updates if one.carrier < 0]
    return [one for first in own for one in (first, *(u for u in row.updates if u.carrier == first.slot))]


def _marks(store: LedgerStore) -> list[SimulatedMark]:
    return [mark for group in store.groups for mark in group]


def _names(store: Any) -> set[tuple[int, int]]:
    assert isinstance(store, LedgerStore)
    return {(mark.slot, mark.clock) for mark in _marks(store)}
