"""What a strategy's settings promise, checked: a setting that promises less than a reader thinks is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from manyhands.errors import UserError
from manyhands.strategies.federated.privacy.noising import LEAST_STEPS, NoiseShare, RoundNoise
from manyhands.strategies.federated.privacy.spending import PrivacyBudget
from manyhands.strategies.federated.privacy.update_clipping import ClipRule
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.secure.secure_messages import fewest_clients
from manyhands.strategy import check_choice

__all__ = ["CLIENTS", "FIXED", "POISSON", "SEED", "SERVER", "SYSTEM", "PrivacyTerms"]

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
        """Without noise there is nothing to promise."""
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
        """The largest epsilon and its delta."""
        return PrivacyBudget(epsilon=self.epsilon, delta=self.delta)

    def cohort(self, clients: int, per_round: int) -> float:
        """How many of so many clients take part in a round, on average; sums are divided by it."""
        return self.fraction * clients if self.sampling == POISSON else float(per_round)

    def round_noise(self, cohort: float, bound: float) -> RoundNoise:
        """The noise of a round with this bound."""
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
