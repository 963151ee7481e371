"""`auto`: in the place of a strategy; the run plans, tries the best plans for some of its own steps, and keeps one.

auto                              any strategy that keeps the numbers of one process
auto must=none tries=2            any; try the best two
allreduce algorithm=auto          this strategy; only the setting is chosen
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from manyhands.errors import UserError, check_count
from manyhands.facts import Facts, Machines, Truth
from manyhands.strategies.auto.promised import Must
from manyhands.strategies.common.usual_promises import IN_STEP
from manyhands.strategies.registry import entry_of
from manyhands.strategy import Strategy, integer, read_settings, setting, settings_of


def _seconds(text: str) -> float:
    try:
        return float(text.removesuffix("s"))
    except ValueError:
        raise UserError(f"{text!r} is not a number of seconds; write shortest=20") from None


@dataclass(frozen=True, kw_only=True)
class Auto(Strategy):
    """The fastest strategy, by prediction and by trying."""

    word: ClassVar[str] = "auto"
    about: ClassVar[str] = "the fastest of all that keep the numbers of one process, chosen while training"
    truth: ClassVar[Truth] = Truth.EVERYONE
    offers: ClassVar[tuple[str, ...] | None] = ("must", "tries", "shortest")

    must: str = setting("equal", str)
    """What the chosen strategy promises: equal, sync, survives=1, separated by commas; none."""
    tries: int = setting(3, integer)
    """How many of the best plans are tried, beside the one with which the run begins."""
    shortest: float = setting(20.0, _seconds)
    """A run that takes fewer seconds is not planned: it ends with the strategy with which it began."""
    text: str = ""
    """The strategy with settings that are `auto`; empty: any strategy."""

    def __post_init__(self) -> None:
        check_count("tries", self.tries)
        Must.parse(self.must)
        if not 0 <= self.shortest < math.inf:
            raise UserError(f"shortest={self.shortest} must be a number of seconds, 0 or more")

    @classmethod
    def of(cls, word: str, texts: Sequence[str]) -> Self:
        """A strategy whose settings are `auto`; UserError for one that cannot be."""
        made = cls(text=" ".join((word, *texts)))
        made.candidates(Machines(per_host=2))  # what makes no sense is said now
        return made

    def candidates(self, machines: Machines) -> list[Strategy] | None:
        """What is chosen among on these machines; None: every strategy's own choices."""
        if not self.text:
            return None
        word, *texts = self.text.split()
        kind = entry_of(word).load_value()
        names = [text.partition("=")[0] for text in texts if text.endswith("=auto")]
        for name in names:
            if name not in kind.searched:
                raise UserError(f"{word} {name}=auto: {name} cannot be chosen; name its value")
        fixed = [text for text in texts if not text.endswith("=auto")]
        given = kind(**read_settings(word, settings_of(kind), fixed, kind.refuses))
        found, refused = [], ""
        for values in itertools.product(*(kind.searched[name](machines) for name in names)):
            try:
                found.append(replace(given, **dict(zip(names, values, strict=True))))
            except UserError as error:  # settings that do not go together
                refused = str(error)
        if not found:
            raise UserError(f"{self.text}: nothing can be chosen: {refused}")
        return found

    @property
    def facts(self) -> Facts:
        """Those of `mirrored`, with which a run begins."""
        return Facts(
            promises=IN_STEP,
            leaves_steps_out=True,
            cannot_cross_hosts="",
            refused_buffers={},
            in_own_loop="" if self.text else "mirrored",
            instead_of_own_loop="name the value, as no step of it can be tried" if self.text else "",
        )

    def __str__(self) -> str:
        return self.text or super().__str__()
