"""The rounds of a private run: who takes part, how updates are bounded and noised, and what that has cost so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.privacy.accountant import RoundKind
from manyhands.strategies.federated.privacy.noise_draws import SeededDraws, SystemDraws, UniformDraws
from manyhands.strategies.federated.privacy.noising import RoundNoise
from manyhands.strategies.federated.privacy.spending import Spending
from manyhands.strategies.federated.privacy.terms import CLIENTS, POISSON, SEED, PrivacyTerms
from manyhands.strategies.federated.privacy.update_clipping import next_bound
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.secure.secure_messages import fewest_clients

__all__ = ["PrivateRounds"]

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
        self._bound = self._allowed(rule.bound)
        self.ended = ""
        """Why no round may follow, once that is known."""
        self.cohort: Final = terms.cohort(clients, per_round)
        self.fewest: Final = fewest_clients(per_round)
        probability = terms.fraction if terms.sampling == POISSON else 1.0
        self.spending: Final = (
            Spending(
                RoundKind(noise=terms.noise, probability=probability),
                terms.budget,
                clients if terms.secure else 0,
            )
            if terms.noise
            else None
        )

    @property
    def bound(self) -> float:
        """The most that the norm of an update is now."""
        return self._bound

    @property
    def noise(self) -> RoundNoise:
        """The noise of the next round."""
        return self._terms.round_noise(self.cohort, self._bound)

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
        """Record a round of these clients and spend its cost."""
        if self.spending is not None:
            self.spending.take(clients)

    def follow(self, within: float) -> None:
        """Set the next round's bound, by the share of updates that were within this one's."""
        if self._quantile is not None:
            self._bound = self._allowed(next_bound(self._bound, self._quantile, within))

    def _allowed(self, bound: float) -> float:
        return min(max(bound, self._least), self._most)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        spent = self.spending.state() if self.spending is not None else {}
        return {"bound": self._bound, **spent}

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
            self._bound = self._allowed(float(state["bound"]))

    def summary(self) -> dict[str, Any]:
        """For the run's summary: plain values, and a sentence on what is promised to whom."""
        found: dict[str, Any] = {"clip": self._bound, "noise": self._terms.noise}
        if self.spending is None:
            return found
        return {
            **found,
            "epsilon": self.spending.epsilon,
            "delta": self._terms.delta,
            "budget": self._terms.epsilon,
            "rounds": self.spending.rounds,
            "sentence": self._promise(self.spending),
            "ended": self.ended,
        }

    def _promise(self, spending: Spending) -> str:
        terms = self._terms
        against = "the server and everybody else" if terms.noise_by == CLIENTS else "everybody but the server"
        words = f"privacy of each client, against {against}: {spending.summary()}, at delta={terms.delta:g}"
        if spending.most_rounds is not None:
            words += f", of a budget of {terms.epsilon:g}"
        if terms.randomness == SEED:
            words += "; but with randomness=seed, none against who knows the seed"
        return words
