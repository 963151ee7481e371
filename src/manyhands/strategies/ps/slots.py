"""The slots of a run as one shard knows them: which are active from which clock on, and how far each has come.

A slot's `next_clock` is the lowest clock that is not settled here. The **floor** is the minimum over all slots
with outstanding updates; it only rises, so it is maintained by counting slots per clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.strategies.ps.ps_messages import Generation

_NEVER = 2**62
_RECENT = 3  # a worker is at most two updates ahead at one shard of what another lacks


@dataclass(slots=True)
class SlotRecord:
    """A shard's record of one slot."""

    next_clock: int
    end: int = _NEVER  # the first clock that is not expected, once the slot was removed
    late: int = -1
    """The last clock that is ignored: its step did not wait for it, it was lost, or the slot begins after it.

    (A slot may begin again, at a later clock, in a shard that went back to a snapshot from before it was added.)
    """
    recent: dict[int, int] = field(default_factory=dict)
    """The batches of its last few updates by clock: a successor repeats them where a shard lacks them."""
    lost: set[int] = field(default_factory=set)  # those of them that were assigned and lost here
    waiting: list[int] = field(default_factory=list)  # clocks that are here and not in a step, ascending

    @property
    def chosen(self) -> int:
        """The lowest clock that is not in a step."""
        return self.waiting[0] if self.waiting else self.next_clock

    def remember(self, clock: int, batch: int) -> None:
        self.recent[clock] = batch
        if len(self.recent) > _RECENT:
            oldest = next(iter(self.recent))
            del self.recent[oldest]
            self.lost.discard(oldest)


class SlotTable:
    """All slots of a run, past and present."""

    def __init__(self, slots: Sequence[int], start: int = 0, base: int = 0) -> None:
        """`slots` are active from clock `start` on, and distribute the batches from `base` on."""
        self.generations: list[Generation] = []
        self.records: dict[int, SlotRecord] = {}
        self.floor = 0
        self.top = 0  # the highest clock that anyone here or elsewhere was seen to lack
        self._ranks: list[dict[int, int]] = []
        self._num_outstanding: dict[int, int] = {}  # how many slots that owe something stand at each clock
        self.append(Generation(start=start, base=base, slots=tuple(sorted(slots))))
        self.floor = start  # which `append` lowers for slots that are new

    @property
    def active(self) -> tuple[int, ...]:
        return self.generations[-1].slots

    def is_active(self, slot: int) -> bool:
        return slot in self._ranks[-1]

    def generation_at(self, clock: int) -> Generation:
        for generation in reversed(self.generations):
            if generation.start <= clock:
                return generation
        raise AssertionError("nobody asks for a clock before the first generation")

    def rank_at(self, slot: int, clock: int) -> int | None:
        """The slot's rank among those active at `clock`; None if it is not active."""
        if self.generations[-1].start <= clock:
            return self._ranks[-1].get(slot)
        for generation, ranks in zip(reversed(self.generations), reversed(self._ranks), strict=True):
            if generation.start <= clock:
                return ranks.get(slot)
        return None

    def add(self, slot: int, next_clock: int) -> SlotRecord:
        record = SlotRecord(next_clock, late=next_clock - 1)
        self.records[slot] = record
        self._num_outstanding[next_clock] = self._num_outstanding.get(next_clock, 0) + 1
        self.floor = min(self.floor, next_clock)
        return record

    def record(self, slot: int) -> SlotRecord:
        """The record of a slot; an unknown one is added at clock 0."""
        return self.records.get(slot) or self.add(slot, 0)

    def append(self, generation: Generation) -> None:
        """Append a generation; slots that are new in it start with it, removed ones end before it."""
        again = [
            slot for slot in generation.slots if slot in self.records and self.records[slot].end < _NEVER
        ]
        if again:
            raise ValueError(f"slots {again} were removed from the run; their numbers cannot be reused")
        before = self.generations[-1] if self.generations else None
        self.generations.append(generation)
        self._ranks.append({slot: rank for rank, slot in enumerate(generation.slots)})
        self.top = max(self.top, generation.start)
        for slot in generation.slots:
            if slot not in self.records:
                self.add(slot, generation.start)
        if before is not None and generation.start > before.start:
            for slot in before.slots:
                if slot not in self._ranks[-1]:
                    self.move(self.records[slot], self.records[slot].next_clock, generation.start)

    def move(self, record: SlotRecord, next_clock: int, end: int | None = None) -> None:
        """Settle everything of a slot below `next_clock`; with an `end`, nothing is expected from there on."""
        at_clock = self._num_outstanding
        if record.next_clock < record.end:
            left = at_clock[record.next_clock] - 1
            if left:
                at_clock[record.next_clock] = left
            else:
                del at_clock[record.next_clock]
        record.next_clock = next_clock
        if end is not None:
            record.end = end
        if next_clock < record.end:
            at_clock[next_clock] = at_clock.get(next_clock, 0) + 1
        if next_clock > self.top:
            self.top = next_clock
        while at_clock and self.floor not in at_clock:
            self.floor += 1

    def outstanding(self, record: SlotRecord, until: int) -> range:
        return range(record.next_clock, min(until, record.end))

    def state(self) -> dict[str, Any]:
        return {
            "generations": [[g.start, g.base, list(g.slots)] for g in self.generations],
            "top": self.top,
            "floor": self.floor,
            "slots": [
                [slot, r.next_clock, r.late, list(r.recent.items()), sorted(r.lost)]
                for slot, r in self.records.items()
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SlotTable:
        """Restore from the value of `state`; the waiting updates are added by `Steps.from_state`."""
        table = cls(())
        table.generations.clear()
        table._ranks.clear()
        for start, base, slots in state["generations"]:
            table.append(Generation(start=start, base=base, slots=tuple(slots)))
        for slot, next_clock, late, recent, lost in state["slots"]:
            record = table.records.get(slot) or table.add(slot, next_clock)
            table.move(record, next_clock)
            record.late = late
            record.recent = dict(recent)
            record.lost = set(lost)
        table.top, table.floor = state["top"], state["floor"]
        return table
