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

from manyhands.engine.device import moved
from manyhands.errors import UserError, printable

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


def chosen(scores: Tensor, how: Sequence[Sampling], places: Sequence[int]) -> Tensor:
    """A token for each row of (rows, vocabulary) scores; `places` says which token of its text that is.

    The rows are computed together, and nothing waits for the scores' device.
    """
    found = scores.argmax(-1)
    drawn = [row for row, one in enumerate(how) if one.temperature]
    if drawn:
        rows = moved(torch.tensor(drawn), scores.device)
        uniform = _column([_uniform(how[row].seed, places[row]) for row in drawn], scores.device)
        found[rows] = _drawn(likely(scores[rows], [how[row] for row in drawn]), uniform)
    return found


def likely(scores: Tensor, how: Sequence[Sampling]) -> Tensor:
    """The probabilities from which the token of each row is drawn: 0 where it is excluded."""
    device, vocabulary = scores.device, scores.shape[1]
    scores = scores.double() / _column([max(one.temperature, math.ulp(1.0)) for one in how], device)
    counts = [min(one.top_k or vocabulary, vocabulary) for one in how]
    if min(counts) < vocabulary:
        best = scores.topk(max(count for count in counts if count < vocabulary)).values
        least = [count - 1 if count < vocabulary else 0 for count in counts]
        bounds = best.gather(1, _column(least, device))
        whole = _column([count == vocabulary for count in counts], device)
        scores = scores.masked_fill((scores < bounds) & ~whole, -math.inf)
    chances = scores.softmax(1)
    some = [row for row, one in enumerate(how) if one.top_p < 1]
    if some:
        rows, most = moved(torch.tensor(some), device), _column([how[row].top_p for row in some], device)
        ordered, order = chances[rows].sort(descending=True, stable=True)
        ordered = ordered.masked_fill(ordered.cumsum(1) - ordered >= most, 0.0)
        kept = torch.zeros_like(ordered).scatter(1, order, ordered)
        chances[rows] = kept / kept.sum(1, keepdim=True)
    return chances


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    kind = torch.float64 if isinstance(values[0], float) else None
    column: Tensor = moved(torch.tensor(values, dtype=kind)[:, None], device)
    return column


def _uniform(seed: int, place: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed, counter=place)).random())


def _drawn(chances: Tensor, uniform: Tensor) -> Tensor:
    reached = chances.cumsum(1)
    # Up to the last token with a chance: the sum may be a rounding below 1, and those behind it are excluded.
    found = torch.searchsorted(reached, reached[:, -1:] * uniform, right=True)
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0]
