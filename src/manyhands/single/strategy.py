"""`single` as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from manyhands.facts import ENDS, NO_SERVERS, NOBODY_JOINS, Answer, Promise, Promises, Truth, Waits
from manyhands.strategy import Strategy

__all__ = ["Single"]


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """The plain loop in one process: the reference for everything else."""

    word: ClassVar[str] = "single"
    about: ClassVar[str] = "the plain loop in one process; the reference"
    truth: ClassVar[Truth] = Truth.ONE_PROCESS
    refuses: ClassVar[Mapping[str, str]] = {"codec": "it is one process, and nothing travels"}
    most_workers: ClassVar[int | None] = 1

    @property
    def waits_for(self) -> Waits:
        """There is nobody else."""
        return Waits.NOBODY

    @property
    def record_order(self) -> str | None:
        """One after the other."""
        return "free"

    @property
    def in_threads(self) -> bool:
        """One of them."""
        return True

    @property
    def promises(self) -> Promises:
        """It is what the others are held against."""
        same = Promise(answer=Answer.YES, words="it is the one process")
        return Promises(
            worker_dies=ENDS, server_dies=NO_SERVERS, workers_join=NOBODY_JOINS, same_numbers=same
        )
