"""The privacy that a run has spent for each client, and how many more rounds its budget allows.

A round is the Gaussian mechanism: noise of `noise` times the most that one client can change. Where a client is in a
round with a probability, and it stays secret in which, the cost is lower (Poisson sampling). Costs are Rényi
divergences, by Google's `dp-accounting`; they add up over rounds, and epsilon follows from their sum.

A trusted server alone knows which clients were in which round: all are counted alike, at the price of a round that one
may have been in. With secure aggregation the server is not trusted, and knows which clients it asked: each is counted
by its own rounds, at the full price, and the one with most of them is the worst off.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import UserError, num_of
from manyhands.strategies.federated import privacy_noise
from manyhands.strategies.federated.privacy_noise import LEAST_STEPS, TAIL, ClipRule, RoundNoise, UniformDraws
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.secure.secure_messages import fewest_clients
from manyhands.strategy import check_choice

_ENDLESS: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundKind:
    """The properties of a round that determine its privacy cost."""

    noise: float  # the deviation of the noise, by the most that one client can change
    probability: float
    """The probability with which a client is in the round, where that stays secret; 1 where it is known."""


def need_accountant(setting: str = "noise") -> None:
    try:
        import dp_accounting  # noqa: F401
    except ImportError as error:
        what = "computes epsilon" if setting == "noise" else "computes the noise that it takes"
        raise UserError(
            f"{setting} needs the dp-accounting package, which {what}; "
            f"pip install 'manyhands[privacy]', or leave out {setting}="
        ) from error


@lru_cache(maxsize=64)
def _one_round(kind: RoundKind) -> tuple[Any, Any]:
    import dp_accounting

    event = dp_accounting.GaussianDpEvent(kind.noise)
    if kind.probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(kind.probability, event)
    accountant = dp_accounting.rdp.RdpAccountant()
    with _silent():
        accountant.compose(event)
    return accountant.orders, accountant.rdp


@contextmanager
def _silent() -> Iterator[None]:
    """Without the package's warnings of orders that it leaves out: epsilon is the least of all the others."""
    root, absl, none = logging.getLogger(), logging.getLogger("absl"), logging.NullHandler()
    level = absl.level
    absl.setLevel(logging.ERROR)
    root.addHandler(none)  # or absl would give the process one that prints
    try:
        yield
    finally:
        root.removeHandler(none)
        absl.setLevel(level)


def epsilon_of(played: Mapping[RoundKind, int], delta: float) -> float:
    import dp_accounting

    orders, divergences = None, 0.0
    for kind, rounds in played.items():
        if rounds:
            orders, one = _one_round(kind)
            divergences = divergences + rounds * one
    if orders is None:
        return 0.0
    with _silent():
        found, _ = dp_accounting.rdp.compute_epsilon(orders, divergences, delta)
    return float(found)


def most_rounds(
    kind: RoundKind, epsilon: float, delta: float, before: Mapping[RoundKind, int] | None = None
) -> int:
    def exceeds(rounds: int) -> bool:
        played = dict(before or {})
        played[kind] = played.get(kind, 0) + rounds
        return epsilon_of(played, delta) > epsilon

    return bisect_left(range(1, _ENDLESS), True, key=exceeds)


_DIGITS: Final = 9000  # numbers of four digits in each power of ten


@lru_cache(maxsize=64)
def least_noise(rounds: int, probability: float, epsilon: float, delta: float) -> float | None:
    """The smallest noise of four digits with which so many rounds cost at most `epsilon`; None: no noise is enough."""

    def noise(number: int) -> float:
        power, digits = divmod(number, _DIGITS)
        return float(f"{1000 + digits}e{power - 3}") * _LEAST_NOISE

    def suffices(number: int) -> bool:
        kind = RoundKind(noise=float(f"{noise(number):.4g}"), probability=probability)
        return epsilon_of({kind: rounds}, delta) <= epsilon

    powers = round(math.log10(_MOST_NOISE / _LEAST_NOISE))
    found = bisect_left(range(powers * _DIGITS), True, key=suffices)
    return float(f"{noise(found):.4g}") if found < powers * _DIGITS else None


class Spending:
    """Counts rounds of one kind, after those of others of a resumed run; each of `clients` by itself, with 0 all alike.

    The budget is the largest `epsilon` (0: unlimited) at this `delta`.
    """

    def __init__(self, kind: RoundKind, *, epsilon: float, delta: float, clients: int = 0) -> None:
        self._kind, self._epsilon, self._delta = kind, epsilon, delta
        self._apart = clients > 0
        self._rounds = np.zeros(max(1, clients), dtype=np.int64)
        self._before: dict[RoundKind, int] = {}
        self.most_rounds = self._allowed()  # by the budget; None: there is none

    def _allowed(self) -> int | None:
        if not self._epsilon:
            return None
        return most_rounds(self._kind, self._epsilon, self._delta, self._before)

    @property
    def rounds(self) -> int:
        return int(self._rounds.max()) + sum(self._before.values())

    @property
    def noises(self) -> str:
        """The noise of the rounds so far, one after another where a resumed run has another; or of those to come."""
        kinds = [*self._before, *([self._kind] if self._rounds.any() or not self._before else [])]
        return " and ".join(dict.fromkeys(f"noise={kind.noise:g}" for kind in kinds))

    def take(self, chosen: Sequence[int]) -> None:
        self._rounds[list(chosen) if self._apart else 0] += 1

    def affords(self, chosen: Sequence[int]) -> bool:
        rounds = self._rounds[list(chosen)] if self._apart else self._rounds
        return self.most_rounds is None or bool((rounds < self.most_rounds).all())

    def require(self, more: int) -> None:
        """UserError where so many more rounds of the client with the most would exceed the budget."""
        left = more if self.most_rounds is None else max(0, self.most_rounds - int(self._rounds.max()))
        if left < more:
            raise UserError(
                f"epsilon={self._epsilon:g}: the run to resume has spent {self.epsilon_after(0):.4g} of it, which with "
                f"noise={self._kind.noise:g} leaves {left} of {num_of(more, 'more round')}; use fewer rounds, more "
                "noise, or a larger epsilon"
            )

    def why_over(self) -> str:
        next_one = "the next round would bring a client to" if self._apart else "another one would make it"
        return (
            f"the privacy budget of epsilon={self._epsilon:g} at delta={self._delta:g} is spent: {self.summary()}, "
            f"and {next_one} {self.epsilon_after(1):.4g}"
        )

    def summary(self) -> str:
        count = f"{self.rounds} round" + ("" if self.rounds == 1 else "s")
        whose = " of the client with the most rounds" if self._apart else ""
        return f"epsilon is {self.epsilon_after(0):.4g} after {count}{whose}"

    def state(self) -> dict[str, Any]:
        played = [
            *((kind, [rounds]) for kind, rounds in self._before.items()),
            (self._kind, self._rounds.tolist()),
        ]
        return {"played": [{**asdict(kind), "rounds": rounds} for kind, rounds in played]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what was spent before; of rounds of another kind every client has been in the most."""
        self._before = {}
        self._rounds[:] = 0
        for one in state["played"]:
            kind = RoundKind(noise=float(one["noise"]), probability=float(one["probability"]))
            rounds = np.asarray(one["rounds"], dtype=np.int64)
            if kind == self._kind and rounds.shape == self._rounds.shape:
                self._rounds += rounds
            elif rounds.max(initial=0):
                self._before[kind] = self._before.get(kind, 0) + int(rounds.max())
        self.most_rounds = self._allowed()

    def epsilon_after(self, more: int) -> float:
        played = dict(self._before)
        played[self._kind] = played.get(self._kind, 0) + int(self._rounds.max()) + more
        return epsilon_of(played, self._delta)


# A private run: what its settings promise, who takes part, how updates are bounded and noised, and the cost so far. A
# setting that promises less than a reader thinks is rejected.

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e6
SERVER, CLIENTS = "server", "clients"
FIXED, POISSON, AUTO = "fixed", "poisson", "auto"
SYSTEM, SEED = "system", "seed"
_USUAL_CLIP: Final = "adaptive:0.5"
_USUAL_DELTA: Final = 1e-5


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
        check_choice("sampling", self.sampling, (AUTO, FIXED, POISSON))
        check_choice("randomness", self.randomness, (SYSTEM, SEED))
        if self.noise != 0 and not _LEAST_NOISE <= self.noise <= _MOST_NOISE:
            raise UserError(
                f"noise={self.noise:g}: must be 0, or a number from {_LEAST_NOISE:g} to {_MOST_NOISE:g}: the noise "
                "divided by what one client can change"
            )
        rule = ClipRule.parse(self.clip)
        if not 0 <= self.epsilon < math.inf:
            raise UserError(f"epsilon={self.epsilon:g}: must be a number above 0, or 0 for no budget")
        if not (self.noise or self.epsilon):
            usual = {"delta": 0.0, "noise_by": SERVER, "sampling": AUTO, "randomness": SYSTEM}
            for name, default in usual.items():
                if (value := getattr(self, name)) != default:
                    shown = f"{value:g}" if isinstance(value, float) else value
                    raise UserError(f"{name}={shown}: needs noise; add epsilon=8 or noise=1.0")
            return
        if self.noise and rule is None:
            raise UserError(
                f"noise={self.noise:g}: without clip= an update may have any norm, and no noise hides it; add "
                "clip=1.0 or clip=adaptive:0.5"
            )
        self._check_promise()

    def _check_promise(self) -> None:
        if self.delta == 0 and self.epsilon and self.noise:
            raise UserError(f"epsilon={self.epsilon:g}: needs delta; add delta=1e-5, well below 1 / clients")
        if not 0 < self.delta < 1 and (self.noise or self.delta):
            raise UserError(
                f"delta={self.delta:g}: with noise it must be above 0 and below 1, as in delta=1e-5"
            )
        if self.noise_by == CLIENTS and not self.secure:
            raise UserError(
                "noise_by=clients: the server would see each update with a small share of the noise; add secure=yes, "
                "so that it sees only the sum, or use noise_by=server"
            )
        if self.secure and self.sampling == POISSON:
            raise UserError(
                "sampling=poisson: with secure=yes the server knows which clients take part, and random draws protect "
                "none of them; use sampling=fixed"
            )
        if not self.secure and self.fraction < 1 and self.sampling == FIXED:
            raise UserError(
                f"fraction={self.fraction:g}: with noise, epsilon holds only if each client is drawn independently; "
                "use sampling=poisson"
            )

    @property
    def poisson(self) -> bool:
        """Whether each client is drawn by itself: that makes rounds cheap where the draws are secret."""
        secret = self.noise > 0 and self.fraction < 1 and not self.secure
        return self.sampling == POISSON or (self.sampling == AUTO and secret)

    def with_noise(self, clients: int, rounds: int) -> PrivacyTerms:
        """With the least noise that keeps a client of so many rounds within epsilon, and what else is left open.

        The usual delta is 1e-5, or clients^-1.1 where that is less (McMahan et al., ICLR 2018).
        """
        usual = min(_USUAL_DELTA, float(f"{clients**-1.1:.0e}"))
        clip = self.clip if self.rule is not None else _USUAL_CLIP
        open_yet = replace(self, noise=_MOST_NOISE, clip=clip, delta=self.delta or usual)
        probability = self.fraction if open_yet.poisson else 1.0
        noise = least_noise(rounds, probability, self.epsilon, open_yet.delta)
        if noise is None:
            raise UserError(
                f"epsilon={self.epsilon:g}: no noise up to {_MOST_NOISE:g} keeps {rounds} rounds within it at "
                f"delta={open_yet.delta:g}; use fewer rounds, or a larger epsilon or delta"
            )
        return replace(open_yet, noise=noise)

    @property
    def rule(self) -> ClipRule | None:
        """How updates are clipped; None: not at all, and nothing here applies."""
        return ClipRule.parse(self.clip)

    def round_noise(self, cohort: float, bound: float) -> RoundNoise:
        adapts = self.rule is not None and self.rule.quantile is not None
        return RoundNoise.of(self.noise, cohort, bound=bound, adapts=adapts)

    def limits(
        self, per_round: int, fixed: FixedPoint | None, fewest: int | None = None
    ) -> tuple[float, float]:
        """Between which the clip's bound must stay: with a secure sum it has a smallest step and a largest number.

        `fewest` clients may make a sum, where a round may begin with fewer than `per_round`: their shares are larger.
        """
        if fixed is None:
            return 0.0, math.inf
        if self.noise == 0 or self.noise_by == SERVER:
            return fixed.step, fixed.clip
        # Clients add noise: it takes enough steps, and capacity for its tail.
        usual, noise = fewest_clients(per_round), self.round_noise(float(per_round), 1.0).update
        fewest = usual if fewest is None else fewest
        least = LEAST_STEPS * fixed.step * math.sqrt(max(usual, fewest)) / noise
        return least, fixed.clip / (1.0 + TAIL * noise / math.sqrt(min(usual, fewest)))

    def check_clients(
        self, clients: int, per_round: int, fixed: FixedPoint | None, fewest: int | None = None
    ) -> None:
        """UserError where the promise is void for so many clients, or the fixed point cannot hold the noise."""
        if self.noise and self.delta * clients >= 1:
            raise UserError(
                f"delta={self.delta:g}: must be below 1/{clients} (one over the clients), or it allows revealing one "
                "client's data; use a smaller one"
            )
        if self.rule is None:
            return
        least, most = self.limits(per_round, fixed, fewest)
        bound = self.rule.bound
        if least > most or (self.rule.quantile is None and not least <= bound):
            raise UserError(
                f"clip={self.clip}: a client's share of the noise must be at least {LEAST_STEPS:g} fixed-point steps, "
                f"which needs a clip of at least {least:.2g}; use more bits, or a smaller range"
            )
        if self.rule.quantile is None and bound > most:
            raise UserError(
                f"clip={self.clip}: with range={fixed.clip if fixed else 0:g} updates and their noise fit only up to "
                f"clip={most:.3g}; use a larger range"
            )


def spoiled_buffer(noise: float, name: str) -> str:
    return (
        f"noise={noise:g}: the model's buffer {name!r} is averaged over clients, like BatchNorm "
        "statistics, and noise would corrupt it; use GroupNorm or LayerNorm instead"
    )


_SELECTING, _SERVER, _CLIENT = 11, 12, 13


class PrivateRounds:
    """What a server of a private run keeps from round to round, the same on every worker."""

    def __init__(
        self,
        terms: PrivacyTerms,
        clients: int,
        per_round: int,
        fixed: FixedPoint | None,
        seed: int,
        *,
        known: bool = False,
        fewest: int | None = None,
    ) -> None:
        """For so many clients; `fixed` is that of the secure sum, where there is one, of `fewest` clients.

        Where it is `known` who is in which round, as with secure sums, each client is counted by its own.
        """
        rule = terms.rule
        assert rule is not None, "without a clip nothing is private"
        assert terms.noise or not terms.epsilon, "noise follows from epsilon before"
        terms.check_clients(clients, per_round, fixed, fewest)
        self._terms, self._clients, self._seed = terms, clients, seed
        self._quantile = rule.quantile
        self._least, self._most = terms.limits(per_round, fixed, fewest)
        self.bound = self._allowed(rule.bound)
        self.ended = ""  # why no round may follow, once that is known
        self.draws_itself: Final = terms.poisson  # whether `drawn` says who takes part
        # how many clients take part in a round, on average; sums are divided by it
        self.cohort: Final = terms.fraction * clients if self.draws_itself else float(per_round)
        self.fewest: Final = fewest_clients(per_round)
        kind = RoundKind(noise=terms.noise, probability=terms.fraction if self.draws_itself else 1.0)
        counted = clients if terms.secure or known else 0
        budget = {"epsilon": terms.epsilon, "delta": terms.delta}
        self.spending: Final = Spending(kind, **budget, clients=counted) if terms.noise else None
        self.step: Final = fixed.step if fixed is not None else 0.0  # of the fixed-point encoding

    @property
    def noise(self) -> RoundNoise:
        return self._terms.round_noise(self.cohort, self.bound)

    def drawn(self, number: int, total: Callable[[Tensor], Tensor], rank: int) -> list[int]:
        """Collective: who takes part in round `number`, each client by a draw of its own that worker 0 makes."""
        taken = torch.zeros(self._clients, dtype=torch.float64)
        if rank == 0:
            drawn = self._draws(number, _SELECTING)(self._clients)
            taken += torch.from_numpy((drawn <= self._terms.fraction).astype(float))
        return [int(one) for one in total(taken).nonzero().flatten()]

    def draws(self, number: int, client: int | None = None) -> UniformDraws | None:
        """Where the noise of a client comes from, or of the server (None); None where it adds none."""
        by_clients = self._terms.noise_by == CLIENTS
        if not self._terms.noise or by_clients is (client is None):
            return None
        return self._draws(number, _SERVER) if client is None else self._draws(number, _CLIENT, client)

    def _draws(self, *numbers: int) -> UniformDraws:
        if self._terms.randomness == SEED:
            return privacy_noise.seeded_draws(self._seed, *numbers)
        return privacy_noise.system_draws

    def follow(self, within: float) -> None:
        """Set the next round's bound, by the share of updates that were within this one's."""
        if self._quantile is not None:
            self.bound = self._allowed(privacy_noise.next_bound(self.bound, self._quantile, within))

    def _allowed(self, bound: float) -> float:
        return min(max(bound, self._least), self._most)

    def state(self) -> dict[str, Any]:
        spent = self.spending.state() if self.spending is not None else {}
        return {"bound": self.bound, **spent}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """From a checkpoint; UserError where it comes from rounds without noise, and this run has some."""
        if self.spending is not None:
            if state is None or "played" not in state:
                raise UserError(
                    "noise: the run to resume has trained without noise, so no epsilon would hold; start a new run"
                )
            self.spending.restore(state)
        if state is not None and self._quantile is not None:
            self.bound = self._allowed(float(state["bound"]))

    def forecast(self, rounds: int) -> str:
        """What so many rounds will cost, or how many the budget allows; empty without a budget."""
        terms, spending = self._terms, self.spending
        if spending is None or spending.most_rounds is None:
            return ""
        drawn = f", each client drawn with probability {terms.fraction:g}" if self.draws_itself else ""
        given = f"clip={terms.clip}, delta={terms.delta:g}{drawn}"
        if rounds > spending.most_rounds:
            most = f"{spending.most_rounds} of {rounds}"
            return f"epsilon={terms.epsilon:g} with noise={terms.noise:g} allows {most} rounds of a client ({given})"
        after = f"{spending.epsilon_after(rounds):.4g} after {rounds} round{'s' * (rounds != 1)}"
        return f"epsilon={terms.epsilon:g} with noise={terms.noise:g} will be {after} of a client ({given})"

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"clip": self.bound, "noise": self._terms.noise}
        terms, spending = self._terms, self.spending
        if spending is None:
            return found
        against = "the server and everybody else" if terms.noise_by == CLIENTS else "everybody but the server"
        words = f"privacy of each client, against {against}: {spending.summary()} with {spending.noises}, "
        words += f"at delta={terms.delta:g}"
        if spending.most_rounds is not None:
            words += f", of a budget of {terms.epsilon:g}"
        if terms.randomness == SEED:
            words += "; but with randomness=seed, none against anyone who knows the seed"
        return {
            **found,
            "epsilon": spending.epsilon_after(0),
            "delta": terms.delta,
            "budget": terms.epsilon,
            "rounds": spending.rounds,
            "sentence": words,
            "ended": self.ended,
        }
