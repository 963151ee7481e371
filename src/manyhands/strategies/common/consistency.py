"""How far workers may run apart: what a consistency policy decides, the policies, and their text.

A shard of a parameter server asks its policy four things: may this read be answered (`lag`), which of the updates that
have arrived make the next optimizer step (`next_group`), which batch is an update of (`place`), and how large a step a
stale update may take (`rate`). Everything else (order, safety, membership) is the same under every policy.

As text: `sync`, `sync:1` (one backup worker), `bounded:3`, `async`, `softsync:4`; before each of them may stand how
rates follow staleness: `aware:async`, `damped:softsync:4`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple, Protocol

from manyhands.errors import UserError, nearest
from manyhands.facts import Waits


class Book(Protocol):
    """What a policy sees of a shard."""

    @property
    def step(self) -> int: ...  # the clock whose step comes next, where steps go by clock
    @property
    def num_active(self) -> int: ...  # slots, now
    @property
    def num_waiting(self) -> int: ...  # updates that are here and in no step yet
    @property
    def drained(self) -> bool: ...  # whether every batch is done: no update comes after those that wait
    def slots_at(self, clock: int) -> tuple[int, ...]: ...  # that are to send an update `clock`, ascending
    def num_arrived(self, clock: int) -> int: ...  # of these, how many have sent it, or will never send it
    def waits(self, slot: int, clock: int) -> bool: ...  # whether that update is among the waiting
    def first_waiting(self, count: int) -> tuple[tuple[int, int], ...]: ...  # (slot, clock), as they arrived


class Group(NamedTuple):
    """The updates (slot, clock) of one optimizer step, in the order of their sum."""

    step: int  # the clock that all of them have, where steps go by clock
    updates: tuple[tuple[int, int], ...]


class BatchPlace(NamedTuple):
    """Part `part` of `parts` of a batch."""

    batch: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Policy(ABC):
    """A consistency policy: a value without state, equal to another of the same text."""

    rates: str = field(default="", kw_only=True)
    """How the learning rate of an update follows its staleness tau; empty: not at all.

    `aware`: Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950): a stale update
    takes 1 / tau of the rate, a fresh one all. `damped`: Xie et al., "Asynchronous Federated Optimization" (arXiv
    1903.03934), and FedBuff after it: the rate times (1 + tau) to the power of -1/2, which falls more slowly.
    """
    word: ClassVar[str]
    stepwise: ClassVar[bool] = False  # whether all updates of one clock make one step
    each_alone: ClassVar[bool] = False  # whether every update is a step of its own, as it comes
    outlives_read: ClassVar[bool] = False
    """Whether an update may still wait for its group when its worker's next read is answered."""

    @property
    @abstractmethod
    def lag(self) -> int | None:
        """A read at clock c waits for every slot's updates below c - lag; None: it waits for no other slot."""

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
        return BatchPlace(first[1] + (clock - first[0]) * count + rank)

    def rate(self, staleness: int) -> float:
        return _RATES[self.rates](staleness) if self.rates else 1.0

    def __str__(self) -> str:
        """As `parse_consistency` reads it: its rates, its word, and its number where it has one."""
        numbers = [getattr(self, one.name) for one in fields(self) if one.name != "rates"]
        return ":".join(str(part) for part in (self.rates, self.word, *numbers) if part)


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


@dataclass(frozen=True)
class Sync(Policy):
    """Synchronous steps: batch k is split over all workers, and step k is made of all its parts.

    With backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981) the first n - `backup`
    parts to arrive make the step, and the slowest `backup` count for nothing.
    """

    backup: int = 0
    word = "sync"
    lag = 0
    stepwise = True

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise UserError(f"consistency=sync:{self.backup}: the number of backups must be at least 0")

    @property
    def lockstep(self) -> bool:
        return not self.backup and not self.rates

    @property
    def fewest_workers(self) -> int:
        return self.backup + 1  # one part at least makes a step, besides those that may be late

    @property
    def chosen_by_lead(self) -> bool:
        return self.backup > 0  # with backup workers, only the lead knows which parts were in time

    def next_group(self, book: Book) -> Group | None:
        clock = book.step
        slots = book.slots_at(clock)
        if not slots or book.num_arrived(clock) < max(1, len(slots) - self.backup):
            return None
        return Group(clock, tuple((slot, clock) for slot in slots if book.waits(slot, clock)))

    def place(self, rank: int, count: int, clock: int, first: tuple[int, int]) -> BatchPlace:
        del first
        return BatchPlace(clock, rank, count)


class _EachAlone(Policy):
    """Every update is a separate step, in the order of arrival."""

    each_alone = True

    def next_group(self, book: Book) -> Group | None:
        return Group(0, book.first_waiting(1)) if book.num_waiting else None


@dataclass(frozen=True)
class Bounded(_EachAlone):
    """Bounded staleness: a read at clock c includes every slot's updates below c - `bound`.

    The stale synchronous parallel model of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server" (NIPS 2013).
    """

    bound: int
    word = "bounded"

    def __post_init__(self) -> None:
        if self.bound < 1:
            raise UserError(
                f"consistency=bounded:{self.bound}: the bound must be at least 1; bounded:0 is sync"
            )

    @property
    def lag(self) -> int:
        return self.bound


@dataclass(frozen=True)
class Async(_EachAlone):
    """No worker waits for another: a read includes the reader's updates, and those of others that have arrived.

    Downpour SGD of Dean et al., "Large Scale Distributed Deep Networks" (NIPS 2012), without its replicas of data:
    batches are given out in order to the next free worker.
    """

    word = "async"
    lag = None


class _ByArrival(Policy):
    """Each step is the mean of the next `group_size` updates to arrive at the lead; readers wait for no step."""

    lag = None
    chosen_by_lead = True
    outlives_read = True

    @abstractmethod
    def group_size(self, num_active: int) -> int: ...

    def includes_own(self, num_active: int) -> bool:
        return self.group_size(num_active) == 1

    def next_group(self, book: Book) -> Group | None:
        """The first waiting updates, as many as make a step; at the end of the run, the rest."""
        size = self.group_size(book.num_active)
        if book.num_waiting < size:
            size = book.num_waiting if book.drained else 0
        return Group(0, book.first_waiting(size)) if size else None


@dataclass(frozen=True)
class SoftSync(_ByArrival):
    """n-softsync of Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950).

    Of lambda learners, every c = lambda // n gradients make one update, so that staleness centres on n. Lecture slides
    sometimes call n the number of workers and lambda the accumulation factor: here n, `splits`, is the splitting
    parameter, as in the paper. A group is a part of the workers, so that one worker alone trains as if there were no
    server.
    """

    splits: int
    word = "softsync"

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise UserError(f"consistency=softsync:{self.splits}: the splitting parameter must be at least 1")

    @property
    def fewest_workers(self) -> int:
        return self.splits

    def group_size(self, num_active: int) -> int:
        return max(1, num_active // self.splits)


@dataclass(frozen=True)
class Buffered(_ByArrival):
    """FedBuff's rule: a step from every `size` updates, from any worker, independent of the number of workers.

    Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (AISTATS 2022), for clients of which a
    few are active at a time. It is not a `consistency=` of parameter servers: n-softsync makes its groups a part of the
    workers and keeps the promise that one worker alone trains as the plain loop does; a buffer would not.
    """

    size: int
    word = "buffered"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"buffered:{self.size}: the number of updates per step must be at least 1")

    def group_size(self, num_active: int) -> int:
        del num_active
        return self.size


def parse_consistency(text: str) -> Policy:
    word, colon, rest = text.partition(":")
    word = _OTHER_WORDS.get(word, word)
    if word not in _FORMS:
        raise UserError(f"consistency={text!r}: {word!r} is not a policy; {nearest(word, _FORMS)}")
    if word == "async" and colon:
        raise UserError(f"consistency={text!r}: async has no number; write async")
    if colon and not rest:
        raise UserError(f"consistency={text!r}: a value must follow the colon")
    return _FORMS[word](text, rest)


def _rated(text: str, rest: str) -> Policy:
    word = text.partition(":")[0]
    if not rest:
        raise UserError(f"consistency={text!r}: name the policy whose rates it changes, as in {word}:async")
    if rest.partition(":")[0] in _RATES:
        raise UserError(f"consistency={text!r}: at most one of {', '.join(_RATES)} is allowed")
    return replace(parse_consistency(rest), rates=word)


def _number(text: str, rest: str) -> int:
    if not (rest.isascii() and rest.isdigit()) or len(rest) > 9:
        example = f"{text.partition(':')[0]}:3"
        raise UserError(f"consistency={text!r}: {rest!r} is not an integer; write it as in {example}")
    return int(rest)


_OTHER_WORDS = {"strong": "sync", "weak": "bounded", "eventual": "async"}
_RATES: dict[str, Callable[[int], float]] = {
    "aware": lambda staleness: 1 / max(staleness, 1),
    "damped": lambda staleness: 1 / math.sqrt(1 + staleness),
}
_FORMS: dict[str, Callable[[str, str], Policy]] = {
    "sync": lambda text, rest: Sync(_number(text, rest)) if rest else Sync(),
    "bounded": lambda text, rest: Bounded(bound) if (bound := _number(text, rest)) else Sync(),
    "async": lambda _text, _rest: Async(),
    "softsync": lambda text, rest: SoftSync(_number(text, rest)),
    "aware": _rated,
    "damped": _rated,
}
