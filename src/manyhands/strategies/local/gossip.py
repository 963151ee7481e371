"""Gossip between averages: after a step each worker and one partner take the mean of the two.

Partners follow a round-robin tournament in which every two workers are paired once: in each round all are in pairs,
except one worker that rests if their number is odd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manyhands.engine.exchange import PeerTraffic, Traffic
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.transport.link.interface import Link

__all__ = ["Gossip", "partner"]

_KIND = 61  # of messages; the averages over the same links have other ones


def partner(rank: int, world: int, rendezvous: int) -> int | None:
    """Return the partner of worker `rank` of `world` in round `rendezvous`, counted from 0; None: it rests."""
    places = world + world % 2
    if places < 2:
        return None
    last, turn = places - 1, rendezvous % (places - 1)
    if rank == last:
        other = turn
    elif rank == turn:
        other = last
    else:
        other = (2 * turn - rank) % (places - 1)
    return other if other < world else None


class Gossip:
    """One worker's end, over links to all others; `close` closes them and is idempotent."""

    def __init__(self, rank: int, world: int, links: Mapping[int, Link], timeout_s: float) -> None:
        self._rank, self._world = rank, world
        self._links = links
        self._group = LinkGroup(rank, range(world), links, timeout_s, kind=_KIND, name="gossip")

    @torch.no_grad()
    def meet(self, step: int, parameters: Sequence[Tensor]) -> None:
        """Called on every worker after `step`: parameters become the mean of this worker's and its partner's."""
        other = partner(self._rank, self._world, step)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for tensors in by_type.values():
            if other is None:
                self._group.exchange({}, {})
                continue
            mine = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
            theirs = torch.empty_like(mine)
            self._group.exchange({other: mine}, {other: theirs})
            theirs.add_(mine).mul_(0.5)  # a sum of two has one order: both have the same bits
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, mean in zip(tensors, torch.split(theirs, sizes), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def traffic(self) -> Traffic:
        """Return what was sent so far."""
        return self._group.traffic()

    def take_waits(self) -> Mapping[int, int]:
        """Return how long this worker waited for each other one since the last call, in nanoseconds."""
        return self._group.take_waits()

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        """Return what went to and came from each worker since the last call."""
        return self._group.take_traffic()

    def close(self) -> None:
        """Close the links."""
        for link in self._links.values():
            link.close()
