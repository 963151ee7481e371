"""Who takes part in what next, agreed on before each exchange: workers need not go through a model in the same order.

Before each exchange every worker says what it wants next: the values of a unit, to hand on the gradient of one, or
nothing any more until all meet. The wish of the first worker that has one is granted, everybody takes part, and whoever
had the same wish goes on; the others say theirs again. So a worker may leave a layer out, or have no samples, or fewer
batches than the others, and nobody waits for something that does not come. What is granted follows from the wishes
alone: a run repeats itself to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, unique
from typing import NamedTuple

import torch

from manyhands.strategies.common.grid.grid_group import LinkGroup

__all__ = ["Grant", "UnitRequest", "UnitRounds", "Want", "grant"]


@unique
class Want(IntEnum):
    """What a worker waits for."""

    RENDEZVOUS = 0
    """That everybody has come this far."""
    VALUES = 1
    """Of a unit."""
    SUM = 2
    """That its gradient of a unit is added to those of others."""


class UnitRequest(NamedTuple):
    """What one worker wants next."""

    want: Want
    unit: int = 0


class Grant(NamedTuple):
    """What is done in this round, and for whom."""

    stop_request: UnitRequest
    members: tuple[int, ...]
    """Those who wanted it, by their place in the group."""


def grant(stop_requests: Sequence[UnitRequest]) -> Grant:
    """The wish of the first who has one; a meeting only when nobody has another."""
    chosen = next(
        (stop_request for stop_request in stop_requests if stop_request.want is not Want.RENDEZVOUS),
        stop_requests[0],
    )
    return Grant(
        chosen, tuple(index for index, stop_request in enumerate(stop_requests) if stop_request == chosen)
    )


class UnitRounds:
    """One worker's side; `act` carries out what was granted and is called on every member, in the same order."""

    def __init__(self, group: LinkGroup, act: Callable[[Grant], None]) -> None:
        self._group = group
        self._act = act
        self.waits: dict[int, int] = {}
        """Nanoseconds in which this worker had nothing to do but wait for others, by whom it waited for."""

    def take(self, stop_request: UnitRequest) -> None:
        """Collective: take part in rounds until this wish was granted."""
        while True:
            self._group.take_waits()
            told = self._group.all_gather(torch.tensor([stop_request.want, stop_request.unit]))
            if stop_request.want is Want.RENDEZVOUS:
                for worker, waited in self._group.take_waits().items():
                    self.waits[worker] = self.waits.get(worker, 0) + waited
            granted = grant([UnitRequest(Want(want), unit) for want, unit in (one.tolist() for one in told)])
            if granted.stop_request.want is not Want.RENDEZVOUS:
                self._act(granted)
            if self._group.index in granted.members:
                return
