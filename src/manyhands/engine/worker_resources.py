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
    world: int
    """How many workers there are."""

    timeout_s: float
    group: Callable[[], SharedGroup]
    """Memory that all of them share, with barriers; UserError where they are on several hosts."""

    links: Callable[[], Mapping[int, Link]]
    """A link to each of the others; only where the strategy `uses_links`, or there are several hosts."""

    host_group: Callable[[], SharedGroup] = _apart
    """Memory that those of this worker's host share, by their places in it, where there are several hosts."""

    seed: int = 0
    """Of the run."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a value, never changed
    """Where this worker computes."""

    hosts: Sequence[Sequence[int]] = ()
    """The ranks of each host, where there are several; empty: all are on this one."""

    helpers: int = 0
    """Processes that only sum for the workers: those of the ranks after them."""

    shares_memory: bool = True
    """Whether there is a `group` to ask for."""

    torch_store: Callable[[], Store] | None = None
    """A store for the process groups of torch's engines, with the run's deadline; None where nobody keeps one."""

    in_the_clear: bool = False
    """Whether the user trusts the network between hosts, so that what cannot be encrypted may go there, too."""

    alarm: Alarm | None = None
    """Ends waits for what comes over links, where somebody watches over the others."""

    @property
    def several_hosts(self) -> bool:
        """Whether some workers are on other hosts, so that no memory is shared by all."""
        return len(self.hosts) > 1
