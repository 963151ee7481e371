"""What a plan may have to promise, and what is said of a strategy that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from manyhands.errors import UserError, nearest
from manyhands.facts import Answer, Waits
from manyhands.strategy import Strategy


def _equal(strategy: Strategy, _workers: int, _count: int) -> str:
    is_equal = strategy.facts.promises.same_numbers.answer is Answer.YES
    return "" if is_equal else "its weights are not those of one process"


def _sync(strategy: Strategy, workers: int, _count: int) -> str:
    alone = workers == 1  # there is nobody to be out of step with
    is_sync = alone or (strategy.facts.stepwise and strategy.facts.waits_for is not Waits.NOBODY)
    return "" if is_sync else "its workers do not take every step together"


def _survives(strategy: Strategy, workers: int, count: int) -> str:
    promises = strategy.facts.promises
    if promises.worker_dies.answer is not Answer.YES:
        return "it ends when a worker is lost"
    if workers <= count:
        return f"it has {workers} workers, and {count} may be lost"
    if promises.server_dies.answer is Answer.NONE or strategy.facts.kept_copies > count:
        return ""
    return f"{count} of its servers may not be lost without their last updates; replicas={count} keeps them"


MUSTS: Final[dict[str, Callable[[Strategy, int, int], str]]] = {
    "equal": _equal,
    "sync": _sync,
    "survives": _survives,
}
"""Why a strategy on so many workers does not keep a promise for so many losses; empty where it does."""


@dataclass(frozen=True, slots=True)
class Must:
    """One promise that a plan has to keep; `survives=2`: the loss of any two processes."""

    name: str
    count: int = 1

    def __post_init__(self) -> None:
        if self.name not in MUSTS:
            raise UserError(f"must={self.name!r} is not a promise; {nearest(self.name, MUSTS)}")
        if self.count < 1:
            raise UserError(f"must={self}: the number of losses must be at least 1")

    @classmethod
    def parse(cls, text: str) -> tuple[Self, ...]:
        """`sync,survives=1`; `none` and an empty text are no promise."""
        words = [word.strip() for word in text.split(",") if word.strip() not in ("", "none")]
        return tuple(cls._one(word) for word in words)

    @classmethod
    def _one(cls, word: str) -> Self:
        name, equals, count = word.partition("=")
        if equals and name in MUSTS and name != "survives":
            raise UserError(f"must={word!r}: {name} takes no number; write {name}")
        if equals and not count.isdecimal():
            raise UserError(f"must={word!r}: {count!r} is not a number of losses; write {name}=1")
        return cls(name, int(count) if equals else 1)

    def lacking(self, strategy: Strategy, workers: int) -> str:
        """Why the strategy does not keep it on so many workers; empty where it does."""
        return MUSTS[self.name](strategy, workers, self.count)

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name}={self.count}"
