"""What a worker uses to exchange with the others, however it was started; each is made when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup
from manyhands.transport.link.interface import Link
from manyhands.transport.liveness import Alarm

__all__ = ["Resources"]


def _apart() -> SharedGroup:
    raise UserError("the workers of this host share no memory")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One worker's resources, on one host or several; the caller that requests the group closes it."""

    rank: int
    world: int  # how many workers there are
    timeout_s: float
    # Memory that all of them share, with barriers; UserError where they are on several hosts
    group: Callable[[], SharedGroup]
    # A link to each of the others; only where the strategy `uses_links`, or there are several hosts
    links: Callable[[], Mapping[int, Link]]
    # Memory that those of this worker's host share, by their places in it, where there are several hosts
    host_group: Callable[[], SharedGroup] = _apart
    seed: int = 0  # of the run
    # Where this worker computes
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a value, never changed
    # The ranks of each host, where there are several; empty: all are on this one
    hosts: Sequence[Sequence[int]] = ()
    helpers: int = 0  # processes that only sum for the workers: those of the ranks after them
    shares_memory: bool = True  # whether there is a `group` to ask for
    # A store for the process groups of torch's engines, with the run's deadline; None where nobody keeps one
    torch_store: Callable[[], Store] | None = None
    # Whether the user trusts the network between hosts, so that what cannot be encrypted may go there, too
    in_the_clear: bool = False
    alarm: Alarm | None = None  # ends waits for what comes over links, where somebody watches over the others

    @property
    def several_hosts(self) -> bool:
        """Whether some workers are on other hosts, so that no memory is shared by all."""
        return len(self.hosts) > 1
