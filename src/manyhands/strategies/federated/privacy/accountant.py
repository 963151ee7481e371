"""The privacy cost of rounds, by Google's `dp-accounting`: given the kinds of rounds and how many there were.

A round is the Gaussian mechanism: noise of `noise` times the most that one client can change. Where a client is in a
round with a probability, and it stays secret in which, the cost is lower (Poisson sampling). Costs are Rényi
divergences, which add up over rounds; epsilon follows from their sum.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from manyhands.errors import UserError

__all__ = ["RoundKind", "epsilon_of", "most_rounds", "need_accountant"]

_ENDLESS: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundKind:
    """The properties of a round that determine its privacy cost."""

    noise: float
    """The deviation of the noise, by the most that one client can change."""
    probability: float
    """The probability with which a client is in the round, where that stays secret; 1 where it is known."""


def need_accountant() -> None:
    """UserError that names the extra, where the package is not installed."""
    try:
        import dp_accounting  # noqa: F401
    except ImportError as error:
        raise UserError(
            "noise needs the dp-accounting package, which counts what it protects; "
            "pip install 'manyhands[privacy]', or leave out noise="
        ) from error


@lru_cache(maxsize=64)
def _one_round(kind: RoundKind) -> tuple[Any, Any]:
    """Orders, and the divergence at each of them in one round."""
    import dp_accounting

    event = dp_accounting.GaussianDpEvent(kind.noise)
    if kind.probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(kind.probability, event)
    accountant = dp_accounting.rdp.RdpAccountant()
    with _quiet():
        accountant.compose(event)
    return accountant.orders, accountant.rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the package's warnings of orders that it leaves out: epsilon is the least of all the others."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def epsilon_of(played: Mapping[RoundKind, int], delta: float) -> float:
    """After so many rounds of each kind, at this delta."""
    import dp_accounting

    orders, divergences = None, 0.0
    for kind, rounds in played.items():
        if rounds:
            orders, one = _one_round(kind)
            divergences = divergences + rounds * one
    if orders is None:
        return 0.0
    found, _ = dp_accounting.rdp.compute_epsilon(orders, divergences, delta)
    return float(found)


def most_rounds(
    kind: RoundKind, epsilon: float, delta: float, before: Mapping[RoundKind, int] | None = None
) -> int:
    """How many rounds of a kind there may be, after those `before` them, until epsilon would be above this.

    With so much noise that they would never end it is a number that no run comes to.
    """

    def is_within(rounds: int) -> bool:
        played = dict(before or {})
        played[kind] = played.get(kind, 0) + rounds
        return epsilon_of(played, delta) <= epsilon

    if not is_within(1):
        return 0
    low, high = 1, 2
    while high < _ENDLESS and is_within(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low
