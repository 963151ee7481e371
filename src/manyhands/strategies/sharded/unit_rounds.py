"""Rounds in which workers agree on the next exchange, so that they need not visit a model's units in the same order.

Before each exchange every worker states its request: the values of a unit, the sum of a unit's gradient, or the
rendezvous of all. The request of the first worker that has one is granted, every worker takes part, and the workers
with the same request continue; the others state theirs again. So a worker may skip a layer, have no samples, or have
fewer batches than the others, and no worker waits for an exchange that never comes. What is granted depends on the
requests alone, so a run is reproducible bit for bit.
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
    """All workers have arrived."""
    VALUES = 1
    """The values of a unit."""
    SUM = 2
    """The sum of a unit's gradient, with this worker's added."""


class UnitRequest(NamedTuple):
    """One worker's next request."""

    want: Want
    unit: int = 0


class Grant(NamedTuple):
    """The exchange of this round, and the members it is for."""

    stop_request: UnitRequest
    members: tuple[int, ...]
    """The members that requested it, by their index in the group."""


def grant(stop_requests: Sequence[UnitRequest]) -> Grant:
    """Grant the first request that is not a rendezvous; a rendezvous only if no worker requests anything else."""
    chosen = next(
        (stop_request for stop_request in stop_requests if stop_request.want is not Want.RENDEZVOUS),
        stop_requests[0],
    )
    return Grant(
        chosen, tuple(index for index, stop_request in enumerate(stop_requests) if stop_request == chosen)
    )


class UnitRounds:
    """One worker's side; `act` carries out a grant and is called on every member, in the same order."""

    def __init__(self, group: LinkGroup, act: Callable[[Grant], None]) -> None:
        self._group = group
        self._act = act
        self.waits: dict[int, int] = {}
        """Nanoseconds in which this worker was idle waiting for others, by the worker waited for."""

    def take(self, stop_request: UnitRequest) -> None:
        """Collective: take part in rounds until this request is granted."""
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
