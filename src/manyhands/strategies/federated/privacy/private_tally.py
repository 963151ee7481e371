"""A tally that bounds each update before it is added, and adds noise to the sum: nothing else of a round is told.

update ──clip──► one row of numbers, and whether it was clipped ──(secure: whole steps, a client's noise)──► the tally
inside ──total──► (the server's noise) ──► by the cohort, a number that depends on nobody

Every client weighs 1. Losses are not told: they would say something about each client that no noise covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manyhands.strategies.federated.client_updates import (
    ClientUpdate,
    RoundPlace,
    RoundTally,
    TallySum,
    shaped,
)
from manyhands.strategies.federated.privacy.private_rounds import PrivateRounds
from manyhands.strategies.federated.privacy.update_clipping import clipped

__all__ = ["PrivateTally"]


class PrivateTally:
    """The tally of one round of a private run."""

    def __init__(
        self,
        inside: Callable[[Sequence[Tensor]], RoundTally],
        rounds: PrivateRounds,
        like: Sequence[Tensor],
        place: RoundPlace,
    ) -> None:
        """`inside` makes the tally that sums updates of the shapes that it is given."""
        self._rounds, self._like, self._place = rounds, like, place
        self._noise = rounds.noise
        self._items = sum(one.numel() for one in like)
        self._inside = inside([torch.zeros(self._items + int(self._noise.adapts), dtype=torch.float64)])

    def add(self, update: ClientUpdate, weight: float) -> None:
        """Bounded, and as heavy as any other; one that is not finite is nought."""
        del weight
        rounds, noise = self._rounds, self._noise
        flat, within = clipped(update.change, noise.bound)
        vector = noise.vector(flat, within)
        if rounds.step:
            draws = rounds.client_draws(self._place.number, update.client)
            vector = torch.from_numpy(noise.in_steps(vector, rounds.step, rounds.fewest, draws) * rounds.step)
        sent = replace(update, change=[vector], loss=0.0, samples=1, encoded_bytes=update.num_bytes)
        self._inside.add(sent, 1.0)

    def total(self, largest: int | None = None) -> TallySum:
        """Collective: the noisy sum; what the round cost is counted, and the next one's bound is set."""
        del largest  # the clip bounds every norm
        rounds, place = self._rounds, self._place
        rounds.take(place.clients)
        found = self._inside.total()
        row = self._noised(found.sums[0].cpu())
        if self._noise.adapts:
            rounds.follow(self._noise.share_within(float(row[-1]), rounds.cohort))
        sums = shaped(row[: self._items], self._like)
        return TallySum(sums=sums, weight=rounds.cohort, loss=math.nan, traffic=found.traffic)

    def _noised(self, row: Tensor) -> Tensor:
        """With the server's noise, which worker 0 draws for all."""
        draws = self._rounds.server_draws(self._place.number)
        if draws is None:
            return row
        if self._place.rank:
            row.zero_()
        else:
            self._noise.add(row, draws)
        return self._place.total(row)
