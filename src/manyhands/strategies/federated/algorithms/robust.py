"""Means that a few hostile clients cannot move far: median, trimmed mean, Krum.

Median and trimmed mean of each item by itself: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018. Krum:
Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017. All must see every update, so none goes with secure
aggregation; and all count every client as one, since a weight is what a hostile client would lie about first.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum

__all__ = ["CoordinateMedian", "Krum", "MultiKrum", "TrimmedMean"]


class _Robust(FederatedAlgorithm):
    """Base of the robust algorithms: clients train as in FedAvg, and the server uses another mean."""

    single_updates: ClassVar[bool] = True

    def weight(self, update: ClientUpdate) -> float:
        del update
        return 1.0

    def mean(self, found: TallySum) -> Sequence[Tensor]:
        columns = zip(*(one.change for one in found.updates), strict=True)
        return [self._middle(torch.stack([one.double() for one in column])) for column in columns]

    @abstractmethod
    def _middle(self, rows: Tensor) -> Tensor:
        """What is made of one tensor of every client, stacked."""


class CoordinateMedian(_Robust):
    """Each item is the median of the clients'; of an even number, the mean of the middle two."""

    word: ClassVar[str] = "median"
    about: ClassVar[str] = "the median of every item: right while fewer than half of the clients are hostile"

    def _middle(self, rows: Tensor) -> Tensor:
        return _trimmed(rows, (len(rows) - 1) // 2)


class TrimmedMean(_Robust):
    """Trimmed mean: of each item the largest and smallest values are left out, and the others averaged."""

    word: ClassVar[str] = "trimmed"
    about: ClassVar[str] = "the mean of every item without a fraction of its largest and smallest values"
    number: ClassVar[str] = "FRACTION"

    def __init__(self, fraction: float = 0.1) -> None:
        super().__init__()
        if not 0 <= fraction < 0.5:
            raise UserError(
                f"algorithm=trimmed:{fraction:g}: so much is left out at either end, and something must stay; use a "
                "fraction from 0 to below 0.5"
            )
        self._fraction = fraction

    def _left_out(self, clients: int) -> int:
        """At either end: rounded up, or of a few clients none would be."""
        return math.ceil(self._fraction * clients - 1e-9)

    def check_round(self, clients: int) -> None:
        if 2 * self._left_out(clients) >= clients:
            raise UserError(
                f"algorithm=trimmed:{self._fraction:g}: of {clients} clients a round nobody would stay; use "
                "more clients or a smaller fraction"
            )

    def _middle(self, rows: Tensor) -> Tensor:
        return _trimmed(rows, min(self._left_out(len(rows)), (len(rows) - 1) // 2))


class Krum(_Robust):
    """Krum: selects the one update that is nearest to its neighbours."""

    word: ClassVar[str] = "krum"
    about: ClassVar[str] = "the one update that lies closest to most others, of whom HOSTILE may be anything"
    number: ClassVar[str] = "HOSTILE"

    def __init__(self, hostile: float = 1) -> None:
        super().__init__()
        if hostile != int(hostile):
            raise UserError(
                f"algorithm={self.word}:{hostile:g}: how many clients of a round may be hostile is an integer"
            )
        self._hostile = int(hostile)

    def check_round(self, clients: int) -> None:
        if clients < 2 * self._hostile + 3:
            raise UserError(
                f"algorithm={self.word}:{self._hostile}: takes {2 * self._hostile + 3} clients a round (twice that "
                f"and 3), and there are {clients}; use more of them or a smaller number"
            )

    def mean(self, found: TallySum) -> Sequence[Tensor]:
        hostile = max(0, self._hostile - found.missing)
        rows = [
            torch.cat([one.double().flatten() for one in each.change[: self.facts.parameters]])
            for each in found.updates
        ]
        best = torch.argsort(krum_scores(torch.stack(rows), hostile), stable=True)
        chosen = [found.updates[at] for at in sorted(best[: self._chosen(len(rows), hostile)].tolist())]
        columns = zip(*(one.change for one in chosen), strict=True)
        return [self._middle(torch.stack([one.double() for one in column])) for column in columns]

    def _chosen(self, clients: int, hostile: int) -> int:
        del clients, hostile
        return 1

    def _middle(self, rows: Tensor) -> Tensor:
        return rows.mean(0)


class MultiKrum(Krum):
    """Multi-Krum: the mean of all but HOSTILE updates."""

    word: ClassVar[str] = "multikrum"
    about: ClassVar[str] = "the mean of the updates that lie closest to others, all but HOSTILE"

    def _chosen(self, clients: int, hostile: int) -> int:
        return clients - hostile


def krum_scores(rows: Tensor, hostile: int) -> Tensor:
    """For each row the sum of its squared distances to the n - hostile - 2 others that are nearest."""
    nearest = max(1, len(rows) - hostile - 2)
    distances = torch.stack([(rows - row).square().sum(1) for row in rows])
    distances.fill_diagonal_(math.inf)
    return distances.sort(1).values[:, : min(nearest, len(rows) - 1)].sum(1)


def _trimmed(rows: Tensor, each: int) -> Tensor:
    return rows.sort(0).values[each : len(rows) - each].mean(0)
