"""The privacy that a run has spent for each client, and how many more rounds its budget allows.

A round is the Gaussian mechanism: noise of `noise` times the most that one client can change. Where a client is in a
round with a probability, and it stays secret in which, the cost is lower (Poisson sampling). Costs are Rényi
divergences, by Google's `dp-accounting`; they add up over rounds, and epsilon follows from their sum.

With a trusted server, only the server knows which clients were in which round: all clients are counted alike, by
rounds, at the price of a round that one may have been in. With secure aggregation the server is not trusted, and it
knows which clients it asked: each client is counted by the rounds that it was in, at the full price, and the client
with most of them is the worst off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from manyhands.errors import UserError

__all__ = ["PrivacyBudget", "RoundKind", "Spending", "need_accountant"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyBudget:
    """The privacy promise: the largest epsilon (0: unlimited) at this delta."""

    epsilon: float
    delta: float


class Spending:
    """Counts rounds of one kind, after those of others that a resumed run has behind it.

    `clients` of them are told apart, or none.
    """

    def __init__(self, kind: RoundKind, budget: PrivacyBudget, clients: int = 0) -> None:
        self._kind = kind
        self._budget = budget
        self._apart = clients > 0
        self._rounds = np.zeros(max(1, clients), dtype=np.int64)
        self._before: dict[RoundKind, int] = {}
        self._most = self._allowed()

    def _allowed(self) -> int | None:
        budget = self._budget
        if not budget.epsilon:
            return None
        return most_rounds(self._kind, budget.epsilon, budget.delta, self._before)

    @property
    def most_rounds(self) -> int | None:
        return self._most

    @property
    def rounds(self) -> int:
        """That the worst off has been in, or may have been in."""
        return int(self._rounds.max()) + sum(self._before.values())

    @property
    def epsilon(self) -> float:
        return self.epsilon_after(0)

    def take(self, chosen: Sequence[int]) -> None:
        if self._apart:
            self._rounds[list(chosen)] += 1
        else:
            self._rounds[0] += 1

    def affords(self, chosen: Sequence[int]) -> bool:
        if self._most is None:
            return True
        asked = self._rounds[list(chosen)] if self._apart else self._rounds
        return bool((asked < self._most).all())

    def why_over(self) -> str:
        """A sentence on a run that ends since it cannot afford its next round."""
        budget = self._budget
        next_one = "the next round would bring a client to" if self._apart else "another one would make it"
        return (
            f"the privacy budget of epsilon={budget.epsilon:g} at delta={budget.delta:g} is spent: {self.summary()}, "
            f"and {next_one} {self.epsilon_after(1):.4g}"
        )

    def summary(self) -> str:
        count = f"{self.rounds} round" + ("" if self.rounds == 1 else "s")
        whose = " of the client that was in most" if self._apart else ""
        return f"epsilon is {self.epsilon:.4g} after {count}{whose}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint: rounds of each kind, those of this run's own kind by client."""
        before = [
            {"noise": kind.noise, "probability": kind.probability, "rounds": [rounds]}
            for kind, rounds in self._before.items()
        ]
        mine = {
            "noise": self._kind.noise,
            "probability": self._kind.probability,
            "rounds": self._rounds.tolist(),
        }
        return {"played": [*before, mine]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was spent before; of rounds of another kind every client has been in the most."""
        self._before = {}
        self._rounds[:] = 0
        for one in state["played"]:
            kind = RoundKind(noise=float(one["noise"]), probability=float(one["probability"]))
            rounds = np.asarray(one["rounds"], dtype=np.int64)
            if kind == self._kind and rounds.shape == self._rounds.shape:
                self._rounds += rounds
            elif rounds.max(initial=0):
                self._before[kind] = self._before.get(kind, 0) + int(rounds.max())
        self._most = self._allowed()

    def epsilon_after(self, more: int) -> float:
        """What it would be after so many more rounds of the worst off."""
        played = dict(self._before)
        played[self._kind] = played.get(self._kind, 0) + int(self._rounds.max()) + more
        return epsilon_of(played, self._budget.delta)
