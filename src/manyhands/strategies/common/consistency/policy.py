"""What a consistency policy decides, and what it may look at to decide it.

A shard of a parameter server asks its policy four things: may this read be answered (`lag`), which of the updates that
have arrived make the next optimizer step (`next_group`), which batch is an update of (`place`), and how large a step a
stale update may take (`rate`). Everything else (order, safety, membership) is the shard's own business and the same
under every policy.

How the textbook's models map onto the policies: strong is `sync` (a read sees every update before it), bounded is
`bounded:s`, weak is `softsync:n` (updates show up in groups), eventual is `async`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from manyhands.facts import Waits

__all__ = ["BatchPlace", "Book", "Group", "Policy", "blend"]


class Book(Protocol):
    """What a policy sees of a shard."""

    @property
    def step(self) -> int:
        """The clock whose step comes next, where steps go by clock."""

    @property
    def num_active(self) -> int:
        """How many slots there are now."""

    @property
    def num_waiting(self) -> int:
        """How many updates are here and in no step yet."""

    @property
    def drained(self) -> bool:
        """Whether every batch of the run is done: no update comes after those that wait."""

    def slots_at(self, clock: int) -> tuple[int, ...]:
        """The slots that owe an update `clock`, ascending."""

    def num_arrived(self, clock: int) -> int:
        """How many of them have settled it, or will never send it."""

    def waits(self, slot: int, clock: int) -> bool:
        """Whether that update is among the waiting."""

    def first_waiting(self, count: int) -> tuple[tuple[int, int], ...]:
        """The first `count` waiting updates as (slot, clock), in the order of arrival."""


class Group(NamedTuple):
    """The updates (slot, clock) of one optimizer step, in the order of their sum."""

    step: int
    """The clock that all of them have, where steps go by clock."""
    updates: tuple[tuple[int, int], ...]


class BatchPlace(NamedTuple):
    """Part `part` of `parts` of a batch."""

    batch: int
    part: int = 0
    parts: int = 1


class Policy(ABC):
    """A consistency policy: a value without state, equal to another of the same text."""

    @property
    @abstractmethod
    def lag(self) -> int | None:
        """A read at clock c waits for every slot's updates below c - lag; None: it waits for no other slot."""

    @property
    def stepwise(self) -> bool:
        """Whether all updates of one clock make one step."""
        return False

    @property
    def each_alone(self) -> bool:
        """Whether every update is a step of its own, as it comes."""
        return False

    @property
    def lockstep(self) -> bool:
        """Whether no step is taken before every worker has pushed, so that no worker reads changing values."""
        return False

    @property
    def fewest_workers(self) -> int:
        """With fewer workers it would be another policy than its text says."""
        return 1

    @property
    def waits_for(self) -> Waits:
        """Whom a worker waits for under it."""
        if self.stepwise:
            return Waits.ALL
        return Waits.LAGGARDS if self.lag is not None else Waits.NOBODY

    @property
    def chosen_by_lead(self) -> bool:
        """Whether arrival decides who belongs to a group, so that the lead shard has to choose for all."""
        return False

    @property
    def by_clock(self) -> bool:
        """Whether slot and clock say the batch; otherwise the lead gives batches out in the order of asking."""
        return self.lag is not None

    @property
    def outlives_read(self) -> bool:
        """Whether an update may still wait for its group when its worker's next read is answered."""
        return False

    def includes_own(self, num_active: int) -> bool:
        """Whether a read waits until the steps with the reader's own updates are taken, among so many slots."""
        del num_active
        return True

    @abstractmethod
    def next_group(self, book: Book) -> Group | None:
        """The next optimizer step, if what has arrived suffices for one."""

    def place(self, rank: int, count: int, clock: int, first: tuple[int, int]) -> BatchPlace:
        """The batch of update `clock` of the slot that is number `rank` of the `count` active ones.

        `first` is the clock from which they are active, and the first batch they share out. Asked only if `by_clock`.
        """
        first_clock, first_batch = first
        return BatchPlace(first_batch + (clock - first_clock) * count + rank)

    def rate(self, staleness: int) -> float:
        """What the learning rate is multiplied by for an update of this staleness."""
        del staleness
        return 1.0

    @abstractmethod
    def __str__(self) -> str:
        """The text that `parse_consistency` reads back."""


def blend(
    policy: Policy, weights: Sequence[float], staleness: Sequence[int], parts: int
) -> tuple[list[float], float]:
    """How the gradients of one step add up: a factor for each, and one for the learning rate.

    A gradient comes scaled by its weight, the part of a batch that it is of. The step's gradient is the mean of what
    is there, weighted besides by the rates that the staleness allows; the mean of these rates is the learning rate's
    factor. So plain SGD moves by the mean of the rated gradients, and an optimizer that divides by the gradient's size
    (Adam) takes a smaller step too. A batch whose parts are all here is summed as it is: factors of exactly 1.
    """
    total = sum(weights)
    base = 1.0 if len(weights) == parts else 1.0 / total
    rates = [policy.rate(tau) for tau in staleness]
    if rates.count(rates[0]) == len(rates):
        return [base] * len(weights), rates[0]
    mean = sum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / total
    return [base * rate / mean for rate in rates], mean
