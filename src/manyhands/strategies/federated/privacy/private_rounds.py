"""A private run: what its settings promise, who takes part, how updates are bounded and noised, and the cost so far.

A setting that promises less than a reader thinks is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.privacy.noise_draws import SeededDraws, SystemDraws, UniformDraws
from manyhands.strategies.federated.privacy.noising import LEAST_STEPS, NoiseShare, RoundNoise
from manyhands.strategies.federated.privacy.spending import PrivacyBudget, RoundKind, Spending
from manyhands.strategies.federated.privacy.update_clipping import ClipRule, next_bound
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.secure.secure_messages import fewest_clients
from manyhands.strategy import check_choice

__all__ = ["FIXED", "SERVER", "SYSTEM", "PrivacyTerms", "PrivateRounds"]

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
        self.ended = ""
        """Why no round may follow, once that is known."""
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
