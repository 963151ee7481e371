"""What the lead shard decided for all shards, until each of them is known to keep it.

Decisions are numbered from 1 and told in order. They follow from the lead's log alone, so that the lead's backup holds
the same ones; whoever becomes primary, of the lead or of another shard, leads to their being told again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manyhands.strategies.ps.ps_messages import Chosen, Generation, Update

__all__ = ["Decision", "Decisions"]

_NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A group of updates, or what is free to be taken without a group, or (None) a new table of slots."""

    number: int
    step: int
    updates: tuple[Update, ...] | None
    freely: bool = False


class Decisions:
    """The lead's book of decisions."""

    def __init__(self, followers: Iterable[int]) -> None:
        self.taken = 0
        self.kept = dict.fromkeys(followers, 0)
        """The last decision that each other shard is known to keep."""
        self._tables: deque[tuple[int, int]] = deque()
        """Of the decisions that told of a new table of slots and are not known to be kept: number, first clock."""
        self._unkept: deque[Decision] = deque()

    @property
    def unsure_from(self) -> int:
        """The clock from which on some shard might not know the slots."""
        return min((start for _, start in self._tables), default=_NEVER)

    @property
    def all_kept(self) -> bool:
        """Whether every shard keeps everything."""
        return not self._unkept

    def take(self, step: int, updates: tuple[Update, ...], freely: bool = False) -> Decision:
        """The next decision, about updates."""
        return self._take(step, updates, freely)

    def take_table(self, step: int, start: int) -> Decision:
        """The next decision: a new table of slots, which differs from the one before it from clock `start` on."""
        decision = self._take(step, None, False)
        if self.kept:
            self._tables.append((decision.number, start))
        return decision

    def _take(self, step: int, updates: tuple[Update, ...] | None, freely: bool) -> Decision:
        self.taken += 1
        decision = Decision(number=self.taken, step=step, updates=updates, freely=freely)
        if self.kept:
            self._unkept.append(decision)
        return decision

    def hear(self, shard: int, number: int) -> None:
        """`shard` keeps everything up to `number`."""
        self.kept[shard] = max(self.kept[shard], min(number, self.taken))
        safe = min(self.kept.values())
        while self._unkept and self._unkept[0].number <= safe:
            self._unkept.popleft()
        while self._tables and self._tables[0][0] <= safe:
            self._tables.popleft()

    def missing_at(self, shard: int) -> list[Decision]:
        """The decisions that `shard` is not known to keep, in order."""
        return [decision for decision in self._unkept if decision.number > self.kept[shard]]

    def message(self, shard: int, decision: Decision, term: int, table: tuple[Generation, ...]) -> Chosen:
        """What tells `shard` of a decision."""
        return Chosen(
            shard=shard,
            term=term,
            number=decision.number,
            kept=self.kept[shard],
            generations=table,
            step=decision.step,
            updates=decision.updates,
            freely=decision.freely,
        )

    def greeting(
        self, shard: int, step: int, term: int, table: tuple[Generation, ...], free: tuple[Update, ...]
    ) -> Chosen:
        """What tells a new primary of `shard` where the lead, now at `step`, believes it stands.

        If it stands before that, what is `free` needs no choice any more.
        """
        steps = [decision.step for decision in self.missing_at(shard) if decision.updates is not None]
        first = steps[0] if steps else step
        known = Decision(number=self.kept[shard], step=first, updates=free, freely=True)
        return self.message(shard, known, term, table)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON can say it."""
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
                for d in self._unkept
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Decisions:
        """The book that `state` was taken of."""
        book = cls(())
        book.taken = state["taken"]
        book.kept = dict(state["kept"])
        book._tables.extend((number, start) for number, start in state["tables"])
        for number, step, freely, updates in state["unkept"]:
            group = None if updates is None else tuple(Update(slot=s, clock=c) for s, c in updates)
            book._unkept.append(Decision(number=number, step=step, updates=group, freely=freely))
        return book
