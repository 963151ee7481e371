"""Updates summed in double precision, grouped by the power of two of their norm.

Once the median of a round's norms is known, whole groups can be left out, without keeping single updates. Norms of
honest clients lie within a few powers of two, so there are only a few sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.norms import norm_class

__all__ = ["ClassSums", "PartialSum"]

_ONE: Final = 0  # class, where no norm matters


@dataclass(slots=True)
class PartialSum:
    """A partial sum of weight times update, with its weights and losses."""

    sums: list[Tensor]
    weight: float = 0.0
    loss: float = 0.0


class ClassSums:
    """The partial sums of a round's updates so far, by norm class."""

    def __init__(self, like: Sequence[Tensor], *, by_norm: bool) -> None:
        """Of tensors like these; not `by_norm`: all in one sum."""
        self._like, self._by_norm = like, by_norm
        self._classes: dict[int, PartialSum] = {}

    @classmethod
    def whole(cls, sums: Sequence[Tensor], weight: float, loss: float) -> ClassSums:
        """A sum of which no part is seen."""
        made = cls(sums, by_norm=False)
        made._classes[_ONE] = PartialSum(list(sums), weight, loss)
        return made

    def add(self, update: ClientUpdate, weight: float) -> None:
        """Add one update."""
        which = norm_class(update.norm) if self._by_norm else _ONE
        if which not in self._classes:
            self._classes[which] = self._empty()
        part = self._classes[which]
        for total, change in zip(part.sums, update.change, strict=True):
            total.add_(change, alpha=weight)
        part.weight += weight
        part.loss += weight * update.loss

    def total(self, largest: int | None = None) -> PartialSum:
        """The sum of all updates up to the class `largest`, if given; it may be the stored sum, not a copy."""
        parts = [part for which, part in sorted(self._classes.items()) if largest is None or which <= largest]
        if len(parts) == 1:
            return parts[0]
        found = self._empty()
        for part in parts:
            for total, one in zip(found.sums, part.sums, strict=True):
                total.add_(one)
            found.weight += part.weight
            found.loss += part.loss
        return found

    def _empty(self) -> PartialSum:
        return PartialSum([torch.zeros_like(one, dtype=torch.float64) for one in self._like])
