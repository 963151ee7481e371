"""The choice of the next token from a model's scores: the likeliest, or a draw among the likely ones.

Temperature divides the scores; then top-k leaves the k likeliest tokens, and of those top-p (nucleus sampling, Holtzman
et al. 2019) the fewest whose probabilities reach p. The draw for a text's token n is a function of (seed, n): a text is
the same beside any others, and when it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import UserError, printable

__all__ = ["Sampling", "chosen", "likely"]

MOST_TEMPERATURE = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen; the default is the likeliest."""

    temperature: float = 0.0
    """Divides scores: 0 takes the likeliest token, 1 draws as the model says."""
    top_k: int = 0
    """Draw among so many of the likeliest; 0 is all."""
    top_p: float = 1.0
    """Draw among the likeliest that together have this probability."""
    seed: int = 0
    """Fixes the draws."""

    def __post_init__(self) -> None:
        for name, most in (("top_k", 1 << 31), ("seed", 2**63 - 1)):
            require_integer(name, getattr(self, name), 0, most)
        for name, largest in (("temperature", MOST_TEMPERATURE), ("top_p", 1.0)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= largest:
                found = printable(repr(value), 60)
                raise UserError(f"{name} is {found}; it must be a number from 0 to {largest:g}")
        if self.top_p == 0:
            raise UserError("top_p is 0, which leaves no token; give temperature=0 for the likeliest")


def require_integer(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        found = printable(repr(value), 60)
        raise UserError(f"{name} is {found}; it must be an integer from {least} to {most}")


def chosen(scores: Tensor, how: Sequence[Sampling], places: Sequence[int]) -> list[int]:
    """A token for each row of (rows, vocabulary) scores; `places` says which token of its text that is."""
    found: list[int] = scores.argmax(-1).tolist()
    for row, (one, place) in enumerate(zip(how, places, strict=True)):
        if one.temperature:
            found[row] = _drawn(likely(scores[row], one), one.seed, place)
    return found


def likely(scores: Tensor, how: Sampling) -> Tensor:
    """The probabilities from which a token is drawn: 0 where it is excluded."""
    scores = scores.double() / max(how.temperature, math.ulp(1.0))
    if 0 < how.top_k < len(scores):
        least = scores.topk(how.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    chances = scores.softmax(0)
    if how.top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        chances[order[before >= how.top_p]] = 0.0
        chances /= chances.sum()
    return chances


def _drawn(chances: Tensor, seed: int, place: int) -> int:
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=place)).random()
    reached = chances.cumsum(0)
    # Up to the last token with a chance: the sum may be a rounding below 1, and those behind it are excluded.
    found = torch.searchsorted(reached, reached[-1:] * uniform, right=True)
    last = torch.searchsorted(reached, reached[-1:])
    return int(torch.minimum(found, last))
