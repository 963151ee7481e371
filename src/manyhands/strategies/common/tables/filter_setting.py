"""The setting `filter=` of `ps`: which rows of a gradient stay with the worker. Without torch, as all settings.

filter = "none" | part ["+" part]            kkt+significant:0.001
part   = "kkt" [":" slack] | "significant" [":" fraction]
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from manyhands.errors import UserError
from manyhands.strategy import check_choice

NONE: Final = "none"
_USUAL: Final = {"kkt": 0.1, "significant": 0.001}


@dataclass(frozen=True, kw_only=True)
class RowFilters:
    """The filters of the rows of a gradient (Li et al., OSDI 2014 and NIPS 2014); None: without that one."""

    kkt: float | None = None
    """The share of l1 by which a weight of 0 has to be away from leaving 0, so that its gradients stay."""
    significant: float | None = None
    """The share of the largest item above which a row is sent."""

    def __bool__(self) -> bool:
        return bool(self.words)

    def __str__(self) -> str:
        given = {word: getattr(self, word) for word in self.words}
        parts = (word if value == _USUAL[word] else f"{word}:{value!r}" for word, value in given.items())
        return "+".join(parts) or NONE

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for word in _USUAL if getattr(self, word) is not None)


def parse_filters(text: str) -> RowFilters:
    """The filters of a text; a UserError says what is wrong and what would be right."""
    found: dict[str, float] = {}
    for part in () if text == NONE else text.split("+"):
        word, colon, tail = part.partition(":")
        check_choice("filter", word, (NONE, *_USUAL))
        if word == NONE:
            raise UserError(f"filter={text}: {NONE} cannot be combined with a filter")
        if word in found:
            raise UserError(f"filter={text}: {word} is given twice")
        value = math.nan if colon else _USUAL[word]
        with suppress(ValueError):
            value = float(tail) if colon else value
        if not 0 <= value < 1:
            raise UserError(
                f"filter={part}: {tail!r} must be a number of at least 0 and below 1, as in {word}:{_USUAL[word]}"
            )
        found[word] = value
    return RowFilters(**found)
