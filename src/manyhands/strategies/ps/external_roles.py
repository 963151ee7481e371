"""Which externally started processes are servers and which are workers. Pure.

a specification    servers are the roles of type ps; workers those of type worker. A chief leads and does not train;
without one worker 0 leads, and has a child that trains
torchrun           the first ranks serve, as many as the strategy has servers; the others work. Rank 0 leads, and has
a child that serves
Ray                a chief leads and does not train; then come the servers, then the workers
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.external.specification import ClusterRole
from manyhands.strategies.ps.strategy import Ps

__all__ = ["PsRanks", "ps_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PsRanks:
    """The ranks of the servers and workers of a run; rank 0 leads, and also has a role if it is listed."""

    servers: tuple[int, ...]
    """The rank of each server, by server index."""

    workers: tuple[int, ...]
    """The rank of each worker, by slot."""

    names: tuple[str, ...]
    """By rank: the name before the process has connected, such as `ps 1 at hostB:2222`."""

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in sorted((*self.servers, *self.workers)) if rank)

    def of(self, number: int, *, serves: bool) -> int:
        return self.servers[number] if serves else self.workers[number]


def ps_ranks(strategy: Ps, place: ProcessPlace) -> PsRanks:
    """Assign ranks to the roles of a strategy that `Ps.placed` has adapted to this place."""
    if place.cluster is not None:
        roles = place.cluster.ranked
        names = tuple(f"{role} at {place.cluster.address(role)}" for role in roles)
        return PsRanks(servers=_of(roles, "ps"), workers=_of(roles, "worker"), names=names)
    servers = strategy.num_server_processes
    if place.role == "chief":
        serving, working = range(1, servers + 1), range(servers + 1, place.world)
        names = (
            "chief",
            *(f"ps {one}" for one in range(servers)),
            *(f"worker {one}" for one in range(len(working))),
        )
        return PsRanks(servers=tuple(serving), workers=tuple(working), names=names)
    return PsRanks(
        servers=tuple(range(servers)),
        workers=tuple(range(servers, place.world)),
        names=tuple(
            f"server {rank} (rank {rank})" if rank < servers else f"worker {rank - servers} (rank {rank})"
            for rank in range(place.world)
        ),
    )


def _of(roles: tuple[ClusterRole, ...], kind: str) -> tuple[int, ...]:
    return tuple(rank for rank, role in enumerate(roles) if role.type == kind)
