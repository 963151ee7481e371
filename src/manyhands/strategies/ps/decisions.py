"""The lead shard's decisions for all shards, kept until every shard is known to have stored them.

Decisions are numbered from 1 and sent in order. They follow from the lead's log alone, so the lead's backup holds
the same ones. When any shard, the lead included, gets a new primary, the unconfirmed decisions are sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from manyhands.strategies.ps.ps_messages import Update

__all__ = ["Decision", "Decisions"]

_NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A group of updates, or updates released without a group (`freely`), or (None) a new slot table."""

    number: int
    step: int
    updates: tuple[Update, ...] | None
    freely: bool = False


class Decisions:
    """The lead's list of decisions, and what each follower has confirmed."""

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
        """Restore from the value of `state`."""
        book = cls(())
        book.taken = state["taken"]
        book.kept = dict(state["kept"])
        book._tables.extend((number, start) for number, start in state["tables"])
        for number, step, freely, updates in state["unkept"]:
            group = None if updates is None else tuple(Update(slot=s, clock=c) for s, c in updates)
            book.unkept.append(Decision(number=number, step=step, updates=group, freely=freely))
        return book
