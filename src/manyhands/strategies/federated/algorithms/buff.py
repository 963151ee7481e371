"""FedBuff (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022).

Some clients are always under way, as many as a synchronous round would have. Whoever comes back hands in its update,
and somebody else begins with the model of that moment; after SIZE updates the server takes a step, a round here:

    w ← w + (1 / SIZE) Σ Δw_i / √(1 + τ_i)      τ_i: how many steps the server took since client i began

That is the consistency policy `damped:buffered:SIZE`, of the same kind as those of parameter servers. How long a client
takes is drawn from the seed, most a while and a few very long (log-normal): a run can be repeated, resumed and shared
among workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from manyhands.data.randomness import mix
from manyhands.errors import UserError
from manyhands.strategies.common.consistency import Buffered
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate, TallySum, Tensors

_SPEED, _TRIP, _NEXT = 11, 12, 13
_SPREAD, _JITTER = 1.0, 0.25  # of the logarithms


def duration_s(seed: int, client: int, trip: int) -> float:
    """How long a client takes, the `trip`-th to begin: it is a fast or a slow one, and a little different each time."""
    own = _speed_of(seed, client)
    now = np.random.default_rng(mix(seed, trip, _TRIP)).standard_normal()
    return math.exp(_SPREAD * own + _JITTER * now)


@lru_cache(maxsize=1 << 16)  # making a generator takes all the time there is
def _speed_of(seed: int, client: int) -> float:
    return np.random.default_rng(mix(seed, client, _SPEED)).standard_normal()


def next_client(seed: int, trip: int, free: Sequence[int]) -> int:
    return int(np.random.default_rng(mix(seed, trip, _NEXT)).choice(free))


class Underway(NamedTuple):
    """A client that has started training and has not reported yet."""

    back_s: float
    client: int
    version: int  # the number of the round whose weights it began with


class FedBuff(FederatedAlgorithm):
    """FedBuff: the server does not wait for slow clients; late updates count for less."""

    word: ClassVar[str] = "fedbuff"
    about: ClassVar[str] = "asynchronous: a step after every SIZE updates, which count for less when stale"
    number: ClassVar[str] = "SIZE"
    cannot_drop_clients: ClassVar[str] = "its rounds do not wait for clients"
    cannot_sum_securely: ClassVar[str] = "its clients start from different models, with fractional weights"
    keeps_versions: ClassVar[bool] = True

    def __init__(self, size: float = 5) -> None:
        super().__init__()
        if size != int(size) or size < 1:
            why = f"algorithm=fedbuff:{size:g}: the number of updates in a step must be an integer of at least 1"
            raise UserError(why)
        self._size = int(size)
        self.policy = Buffered(self._size, rates="damped")  # what an update counts for
        self._clock_s, self._trips = 0.0, 0
        self._underway: list[Underway] = []
        self._versions: dict[int, list[Tensor]] = {}
        self._stale = [0, 0, 0]  # updates, their staleness together, the most

    def check_round(self, clients: int) -> None:
        if self._size > clients:
            raise UserError(
                f"algorithm=fedbuff:{self._size}: a step needs {self._size} updates, but only {clients} clients train "
                "at once; use a smaller number, or a larger fraction"
            )

    def updates_in_round(self, cohort: int) -> int:
        del cohort
        return self._size

    def given(self, number: int, chosen: Sequence[int], weights: Tensors) -> Sequence[ClientAssignment]:
        """The clients that report before the next step, with what each began with; `chosen`: a synchronous cohort."""
        del chosen
        self._versions[number] = [one.detach().clone() for one in weights]
        while len(self._underway) < self.facts.per_round and self._send_off(number, ()):
            pass
        found: list[ClientAssignment] = []
        while len(found) < self._size:
            first = min(self._underway)
            self._underway.remove(first)
            self._clock_s, client, version = first
            weights, staleness = self._versions[version], number - version
            found.append(
                ClientAssignment(client=client, weights=weights, number=version, staleness=staleness)
            )
            self._send_off(number, [one.client for one in found])
        count, total, most = self._stale
        stale = [one.staleness for one in found]
        self._stale = [count + len(stale), total + sum(stale), max(most, *stale)]
        used = {one.version for one in self._underway}
        self._versions = {version: kept for version, kept in self._versions.items() if version in used}
        return found

    def _send_off(self, number: int, back: Sequence[int]) -> bool:
        """Let another client start that is neither training nor just back; False where there is none."""
        busy = {one.client for one in self._underway} | set(back)
        free = [client for client in range(self.facts.clients) if client not in busy]
        if not free:
            return False
        seed, trip = self.facts.seed, self._trips
        client = next_client(seed, trip, free)
        self._underway.append(Underway(self._clock_s + duration_s(seed, client, trip), client, number))
        self._trips += 1
        return True

    def weight(self, update: ClientUpdate) -> float:
        return self.policy.rate(update.staleness)

    def mean(self, found: TallySum) -> Tensors:
        """The sum by the number of updates, not by their weights: a late, or a rejected one, makes a step smaller."""
        return [one / self._size for one in found.sums]

    def summary(self) -> Mapping[str, Any]:
        count, total, most = self._stale
        stale = {"mean": total / count if count else 0.0, "max": most}
        return {"staleness": stale, "simulated_s": self._clock_s}

    def memory(self) -> Mapping[str, Any]:
        return {
            "clock_s": self._clock_s,
            "trips": self._trips,
            "underway": [list(one) for one in self._underway],
            "versions": [[version, kept] for version, kept in self._versions.items()],
            "stale": self._stale,
        }

    def load_state(self, memory: Mapping[str, Any]) -> None:
        if not memory:
            return
        self._clock_s, self._trips = float(memory["clock_s"]), int(memory["trips"])
        self._underway = [Underway(*one) for one in memory["underway"]]
        self._versions = {int(version): list(kept) for version, kept in memory["versions"]}
        self._stale = list(memory["stale"])
