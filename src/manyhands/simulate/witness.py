"""An independent judge of simulated runs: what workers really read and servers really held, against what was promised.

It looks at the stores of an abstract model (`Ledger`) and at the messages on the wire, and never asks a core or a
policy. So a mistake in a core, or in the auditor that reads its log, is not repeated here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from manyhands.server.log import LateRow, LostRow, SlotsRow, StepRow
from manyhands.server.messages import LEAD, Ack, Message, Outcome, Work
from manyhands.simulate.driver import Observer
from manyhands.simulate.models import LedgerStore, Mark, Seen
from manyhands.simulate.processes import Copy, ServerProcess
from manyhands.simulate.run import SimulatedRun

__all__ = ["Promise", "Witness"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a consistency promises, said once more in plain numbers.

    `bound`: a read at clock c includes every update below c - bound (None: no such promise). `own`: it includes all of
    the reader's own. `whole`: of every batch all parts are applied, and not only enough of them.
    """

    steps: int
    bound: int | None
    own: bool = True
    whole: bool = True


@dataclass(frozen=True, slots=True)
class _Reading:
    slot: int
    work: Work
    seen: tuple[Seen, ...]


class Witness(Observer):
    """Watches one run of a `Ledger`; `complaints` says what was wrong with it."""

    def __init__(self, promise: Promise) -> None:
        self._promise = promise
        self._readings: list[_Reading] = []
        self._acknowledged: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self._at_risk: dict[int, set[tuple[int, int]]] = {}  # by shard that went back to a snapshot
        self._lost_at_takeover: list[str] = []

    @property
    def lost_replicas(self) -> bool:
        """Whether any shard had to go back to a snapshot."""
        return bool(self._at_risk)

    def computes(self, slot: int, work: Work, read: list[Any], now_s: float) -> None:
        """Remember what the worker had read."""
        del now_s
        self._readings.append(_Reading(slot, work, tuple(read)))

    def sends(self, source: int, to: int, message: Message, now_s: float) -> None:
        """Remember what was promised to be safe."""
        del source, to, now_s
        if isinstance(message, Ack) and message.outcome in self._safe(message.shard):
            self._acknowledged[message.shard].add((message.slot, message.clock))

    def _safe(self, shard: int) -> tuple[Outcome, ...]:
        """Which answers promise that an update counts: an accepted one may come too late, except for the lead."""
        if shard == LEAD or self._promise.whole:
            return (Outcome.APPLIED, Outcome.ACCEPTED, Outcome.DUPLICATE)
        return (Outcome.APPLIED,)

    def serves(self, shard: int, server: ServerProcess, now_s: float) -> None:
        """Whoever takes over has to have all that was promised."""
        has = _names(server.stores[shard]) | set(server.held[shard])
        for slot, clock in sorted(self._acknowledged[shard] - has):
            self._lost_at_takeover.append(
                f"update {clock} of slot {slot} was acknowledged by shard {shard}, but server {server.member}, which "
                f"took over at {now_s:g} s, does not have it"
            )

    def restores(self, shard: int, copy: Copy, now_s: float) -> None:
        """More deaths than there are replicas: what was acknowledged may be lost, but not in silence."""
        del copy, now_s
        self._at_risk[shard] = self._at_risk.get(shard, set()) | self._acknowledged.pop(shard, set())

    def complaints(self, run: SimulatedRun) -> list[str]:
        """Everything that broke a promise; empty for a good run."""
        found = list(self._lost_at_takeover)
        for shard, store in enumerate(run.stores):
            assert isinstance(store, LedgerStore)
            found += self._repeated(shard, store)
            found += self._forgotten(shard, store)
            found += self._unreported(shard, store, run)
            if not self._at_risk:
                found += self._incomplete(shard, store)
                found += self._diverged(shard, store)
                found += self._too_stale(shard, store)
                found += self._misreported(shard, store, run)
        return found

    def _repeated(self, shard: int, store: LedgerStore) -> list[str]:
        names: set[tuple[int, int]] = set()
        found = []
        for mark in _marks(store):
            if (mark.slot, mark.clock) in names:
                found.append(f"shard {shard} applied update {mark.clock} of slot {mark.slot} twice")
            names.add((mark.slot, mark.clock))
        return found

    def _forgotten(self, shard: int, store: LedgerStore) -> list[str]:
        missing = sorted(self._acknowledged[shard] - _names(store))
        return [f"shard {shard} acknowledged update {c} of slot {s} and does not have it" for s, c in missing]

    def _unreported(self, shard: int, store: LedgerStore, run: SimulatedRun) -> list[str]:
        told: set[tuple[int, int]] = set()
        starts: dict[int, int] = {}
        for row in run.logs[shard]:
            if isinstance(
                row, SlotsRow
            ):  # a slot that is added a second time begins later, and the row says when
                starts = {**dict.fromkeys(row.slots, row.start), **starts}
            elif isinstance(row, LostRow):
                told.update((row.slot, clock) for clock in range(row.first, row.until))
            elif isinstance(row, LateRow):
                told.add((row.slot, row.clock))
        missing = sorted(self._at_risk.get(shard, set()) - _names(store) - told)
        return [
            f"shard {shard} lost update {clock} of slot {slot} and does not say so"
            for slot, clock in missing
            if slot in starts and clock >= starts[slot]  # that it was restored tells of a slot it never knew
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
            seen = sorted(parts[batch])
            full = list(range(whole.get(batch, 1)))
            if (seen != full) if promise.whole else (not seen or len(set(seen)) < len(seen)):
                found.append(f"shard {shard} applied parts {seen} of batch {batch}, which has {len(full)}")
        if extra := sorted(batch for batch in parts if batch >= promise.steps):
            found.append(f"shard {shard} applied batches {extra} of a run of {promise.steps}")
        return found

    def _diverged(self, shard: int, store: LedgerStore) -> list[str]:
        """Everybody who ever read must have read a beginning of the one history."""
        lengths: dict[LedgerStore, int] = defaultdict(int)
        for reading in self._readings:
            seen = reading.seen[shard]
            lengths[seen.store] = max(lengths[seen.store], seen.length)
        return [
            f"shard {shard} was read with a history that is not the final one"
            for other, length in lengths.items()
            if other.groups[:length] != store.groups[:length]
        ]

    def _too_stale(self, shard: int, store: LedgerStore) -> list[str]:
        """Where in the history every update lies, against how much of it a reader had."""
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
            length, clock = reading.seen[shard].length, reading.work.clock
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
        """The log has to tell what the store went through, and what the workers had read."""
        rows = [row for row in run.logs[shard] if isinstance(row, StepRow)]
        told = [tuple((u.slot, u.clock, u.batch) for u in row.updates) for row in rows]
        true = [tuple((m.slot, m.clock, m.batch) for m in group) for group in store.groups]
        if told != true:
            first = next(
                (i for i, pair in enumerate(zip(told, true, strict=False)) if pair[0] != pair[1]), None
            )
            return [f"the log of shard {shard} has {len(told)} steps for {len(true)}, first other at {first}"]
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


def _marks(store: LedgerStore) -> list[Mark]:
    return [mark for group in store.groups for mark in group]


def _names(store: Any) -> set[tuple[int, int]]:
    assert isinstance(store, LedgerStore)
    return {(mark.slot, mark.clock) for mark in _marks(store)}
