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
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.privacy_noise import (
    LEAST_STEPS,
    ClipRule,
    NoiseShare,
    RoundNoise,
    SeededDraws,
    SystemDraws,
    UniformDraws,
    next_bound,
)
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.secure.secure_messages import fewest_clients
from manyhands.strategy import check_choice

__all__ = [
    "FIXED",
    "SERVER",
    "SYSTEM",
    "PrivacyBudget",
    "PrivacyTerms",
    "PrivateRounds",
    "RoundKind",
    "Spending",
    "need_accountant",
]

_ENDLESS: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundKind:
    """The properties of a round that determine its privacy cost."""

    noise: float  # the deviation of the noise, by the most that one client can change
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


# A private run: what its settings promise, who takes part, how updates are bounded and noised, and the cost so far.
#
# A setting that promises less than a reader thinks is refused.


_LEAST_NOISE: Final = 1e-3
_MOST_NOISE: Final = 1e6
SERVER: Final = "server"
CLIENTS: Final = "clients"
FIXED: Final = "fixed"
POISSON: Final = "poisson"
SYSTEM: Final = "system"
SEED: Final = "seed"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyTerms:
    """The settings of a federated run that are about privacy; UserError where they do not fit together."""

    clip: str
    noise: float
    noise_by: str
    epsilon: float
    delta: float
    sampling: str
    randomness: str
    secure: bool
    fraction: float

    def __post_init__(self) -> None:
        check_choice("noise_by", self.noise_by, (SERVER, CLIENTS))
        check_choice("sampling", self.sampling, (FIXED, POISSON))
        check_choice("randomness", self.randomness, (SYSTEM, SEED))
        if self.noise != 0 and not _LEAST_NOISE <= self.noise <= _MOST_NOISE:
            raise UserError(
                f"noise={self.noise:g}: must be 0, or a number from {_LEAST_NOISE:g} to {_MOST_NOISE:g}: the noise by "
                "what one client can change"
            )
        rule = ClipRule.parse(self.clip)
        if self.noise == 0:
            self._check_quiet()
            return
        if rule is None:
            raise UserError(
                f"noise={self.noise:g}: without clip= an update may be of any length, and no noise hides it; add "
                "clip=1.0 or clip=adaptive:0.5"
            )
        self._check_promise()
        self._check_sampling()

    def _check_quiet(self) -> None:
        for name, value, default in (
            ("epsilon", self.epsilon, 0.0),
            ("delta", self.delta, 0.0),
            ("noise_by", self.noise_by, SERVER),
            ("sampling", self.sampling, FIXED),
            ("randomness", self.randomness, SYSTEM),
        ):
            if value != default:
                shown = f"{value:g}" if isinstance(value, float) else value
                raise UserError(f"{name}={shown}: is for noise, and there is none; add noise=1.0")

    def _check_promise(self) -> None:
        if self.delta == 0 and self.epsilon:
            raise UserError(
                f"epsilon={self.epsilon:g}: says nothing without delta; add delta=1e-5, well below one by the clients"
            )
        if not 0 < self.delta < 1:
            raise UserError(
                f"delta={self.delta:g}: with noise it must be above 0 and below 1, as in delta=1e-5; epsilon is "
                "counted for it"
            )
        if not 0 <= self.epsilon < math.inf:
            raise UserError(f"epsilon={self.epsilon:g}: must be a number above 0, or 0 for no budget")
        if self.noise_by == CLIENTS and not self.secure:
            raise UserError(
                "noise_by=clients: the server would see each update with a small share of the noise; add secure=yes, "
                "so that it sees the sum alone, or use noise_by=server"
            )

    def _check_sampling(self) -> None:
        if self.secure and self.sampling == POISSON:
            raise UserError(
                "sampling=poisson: with secure=yes the server knows who takes part, and what it may learn is counted "
                "by each client's rounds, however they were drawn; use sampling=fixed"
            )
        if not self.secure and self.fraction < 1 and self.sampling == FIXED:
            raise UserError(
                f"fraction={self.fraction:g}: with noise, epsilon is counted for clients that take part each by a draw "
                "of its own, and not for a fixed number of them; add sampling=poisson"
            )

    @property
    def rule(self) -> ClipRule | None:
        """How updates are clipped; None: not at all, and nothing here applies."""
        return ClipRule.parse(self.clip)

    @property
    def budget(self) -> PrivacyBudget:
        return PrivacyBudget(epsilon=self.epsilon, delta=self.delta)

    def cohort(self, clients: int, per_round: int) -> float:
        """How many of so many clients take part in a round, on average; sums are divided by it."""
        return self.fraction * clients if self.sampling == POISSON else float(per_round)

    def round_noise(self, cohort: float, bound: float) -> RoundNoise:
        adapts = self.rule is not None and self.rule.quantile is not None
        return RoundNoise(share=NoiseShare.of(self.noise, cohort, adapts=adapts), bound=bound, adapts=adapts)

    def limits(self, per_round: int, fixed: FixedPoint | None) -> tuple[float, float]:
        """Between which the clip's bound must stay: with a secure sum it has a smallest step and a largest number."""
        if fixed is None:
            return 0.0, math.inf
        if self.noise == 0 or self.noise_by == SERVER:
            return fixed.step, fixed.clip
        noise = self.round_noise(float(per_round), 1.0)
        return noise.bounds_for(fixed.step, fixed.clip, fewest_clients(per_round))

    def check_clients(self, clients: int, per_round: int, fixed: FixedPoint | None) -> None:
        """UserError where the promise is void for so many clients, or the fixed point cannot hold the noise."""
        if self.noise and self.delta * clients >= 1:
            raise UserError(
                f"delta={self.delta:g}: at one by the clients ({clients}) or more, giving one client's data away whole "
                "would be allowed; use a smaller one"
            )
        if self.rule is None:
            return
        least, most = self.limits(per_round, fixed)
        bound = self.rule.bound
        if least > most or (self.rule.quantile is None and not least <= bound):
            raise UserError(
                f"clip={self.clip}: a client's share of the noise must be {LEAST_STEPS:g} steps of the fixed point at "
                f"least, so that the clip must be {least:.2g} or more; use more bits, or a smaller range"
            )
        if self.rule.quantile is None and bound > most:
            raise UserError(
                f"clip={self.clip}: with range={fixed.clip if fixed else 0:g} there is room for updates and their "
                f"noise up to clip={most:.3g}; use a larger range"
            )


_SELECTING, _SERVER, _CLIENT = 11, 12, 13


class PrivateRounds:
    """What a server of a private run keeps from round to round, the same on every worker."""

    def __init__(
        self, terms: PrivacyTerms, clients: int, per_round: int, fixed: FixedPoint | None, seed: int
    ) -> None:
        """For so many clients; `fixed` is that of the secure sum, where there is one."""
        rule = terms.rule
        assert rule is not None, "without a clip nothing is private"
        terms.check_clients(clients, per_round, fixed)
        self._terms, self._clients, self._fixed, self._seed = terms, clients, fixed, seed
        self._quantile = rule.quantile
        self._least, self._most = terms.limits(per_round, fixed)
        self.bound = self._allowed(rule.bound)
        self.ended = ""  # why no round may follow, once that is known
        self.cohort: Final = terms.cohort(clients, per_round)
        self.fewest: Final = fewest_clients(per_round)
        kind = RoundKind(noise=terms.noise, probability=terms.fraction if terms.sampling == POISSON else 1.0)
        spending = Spending(kind, terms.budget, clients if terms.secure else 0) if terms.noise else None
        self.spending: Final = spending

    @property
    def noise(self) -> RoundNoise:
        return self._terms.round_noise(self.cohort, self.bound)

    @property
    def step(self) -> float:
        """Step of the fixed-point encoding; 0 where there is none."""
        return self._fixed.step if self._fixed is not None else 0.0

    @property
    def draws_itself(self) -> bool:
        """Whether `drawn` says who takes part."""
        return self._terms.sampling == POISSON

    def drawn(self, number: int, total: Callable[[Tensor], Tensor], rank: int) -> list[int]:
        """Collective: who takes part in round `number`, each client by a draw of its own that worker 0 makes."""
        taken = torch.zeros(self._clients, dtype=torch.float64)
        if rank == 0:
            drawn = self._draws(number, _SELECTING).uniform(self._clients)
            taken += torch.from_numpy((drawn <= self._terms.fraction).astype(float))
        return [int(one) for one in total(taken).nonzero().flatten()]

    def server_draws(self, number: int) -> UniformDraws | None:
        """Where the server's noise comes from; None where it adds none."""
        is_server = self._terms.noise > 0 and self._terms.noise_by != CLIENTS
        return self._draws(number, _SERVER) if is_server else None

    def client_draws(self, number: int, client: int) -> UniformDraws | None:
        """Where a client's noise comes from; None where it adds none."""
        is_client = self._terms.noise > 0 and self._terms.noise_by == CLIENTS
        return self._draws(number, _CLIENT, client) if is_client else None

    def _draws(self, *numbers: int) -> UniformDraws:
        return SeededDraws(self._seed, *numbers) if self._terms.randomness == SEED else SystemDraws()

    def take(self, clients: Sequence[int]) -> None:
        if self.spending is not None:
            self.spending.take(clients)

    def follow(self, within: float) -> None:
        """Set the next round's bound, by the share of updates that were within this one's."""
        if self._quantile is not None:
            self.bound = self._allowed(next_bound(self.bound, self._quantile, within))

    def _allowed(self, bound: float) -> float:
        return min(max(bound, self._least), self._most)

    def state(self) -> dict[str, Any]:
        spent = self.spending.state() if self.spending is not None else {}
        return {"bound": self.bound, **spent}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's; UserError where it comes from rounds without noise, and this run has some."""
        if self.spending is not None:
            if state is None or "played" not in state:
                raise UserError(
                    "noise: the run to be resumed has trained on its clients' data without noise, and no epsilon would "
                    "hold; begin a new run"
                )
            self.spending.restore(state)
        if state is not None and self._quantile is not None:
            self.bound = self._allowed(float(state["bound"]))

    def summary(self) -> dict[str, Any]:
        """For the run's summary: plain values, and a sentence on what is promised to whom."""
        found: dict[str, Any] = {"clip": self.bound, "noise": self._terms.noise}
        terms, spending = self._terms, self.spending
        if spending is None:
            return found
        against = "the server and everybody else" if terms.noise_by == CLIENTS else "everybody but the server"
        words = f"privacy of each client, against {against}: {spending.summary()}, at delta={terms.delta:g}"
        if spending.most_rounds is not None:
            words += f", of a budget of {terms.epsilon:g}"
        if terms.randomness == SEED:
            words += "; but with randomness=seed, none against who knows the seed"
        return {
            **found,
            "epsilon": spending.epsilon,
            "delta": terms.delta,
            "budget": terms.epsilon,
            "rounds": spending.rounds,
            "sentence": words,
            "ended": self.ended,
        }
