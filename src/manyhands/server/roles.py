"""Which processes serve and which work, where somebody else started them. Pure.

a specification    servers are the roles of type ps; workers those of type worker. A chief leads and does not train;
without one worker 0 leads, and has a child that trains
torchrun           the first ranks serve, as many as the strategy has servers; the others work. Rank 0 leads, and has
a child that serves
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands.errors import UserError
from manyhands.hosts.place import Place
from manyhands.hosts.specification import ClusterRole, ClusterSpec
from manyhands.hosts.specified import ranked
from manyhands.server.strategy import Ps

__all__ = ["PsRanks", "ps_at", "ps_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PsRanks:
    """Which rank of a run is which server and worker; rank 0 leads, and is one of them where it is listed."""

    servers: tuple[int, ...]
    """By the place of the server."""

    workers: tuple[int, ...]
    """By slot."""

    names: tuple[str, ...]
    """By rank: what it is called before it is there, `ps 1 at hostB:2222`."""

    @property
    def others(self) -> tuple[int, ...]:
        """All but the leader's own."""
        return tuple(rank for rank in sorted((*self.servers, *self.workers)) if rank)

    def of(self, number: int, *, serves: bool) -> int:
        """The rank of a server or a worker."""
        return self.servers[number] if serves else self.workers[number]


def ps_at(strategy: Ps, place: Place) -> tuple[Ps, int]:
    """The strategy with the servers that there are, and how many workers; UserError where they do not fit."""
    if place.cluster is not None:
        return _as_specified(strategy, place.cluster)
    servers, workers = strategy.num_server_processes, place.world - strategy.num_server_processes
    if workers < 1:
        raise UserError(
            f"strategy={strategy}: of {place.world} processes {servers} would serve, and nobody would train; start at "
            f"least {servers + 1}, servers and workers together"
        )
    return strategy, workers


def _as_specified(strategy: Ps, cluster: ClusterSpec) -> tuple[Ps, int]:
    servers, workers = len(cluster.roles("ps")), len(cluster.roles("worker"))
    if not servers:
        raise UserError(
            f"strategy={strategy}: the cluster lists no ps ({cluster}); add one, or use allreduce"
        )
    if not workers:
        raise UserError(
            f"strategy={strategy}: the cluster lists no worker ({cluster}): its chief leads and does not train; add one"
        )
    if strategy.servers not in (1, servers):
        raise UserError(
            f"strategy={strategy}: servers={strategy.servers}, and the cluster lists {servers} of type ps; leave "
            "servers= out, or make them equal"
        )
    strategy = replace(strategy, servers=servers)
    if strategy.num_server_processes > servers:
        raise UserError(
            f"strategy={strategy}: replicas={strategy.replicas} needs {strategy.num_server_processes} servers, and the "
            f"cluster lists {servers} of type ps; add one, or leave replicas out"
        )
    return strategy, workers


def ps_ranks(strategy: Ps, place: Place) -> PsRanks:
    """Who is who, of a strategy that `ps_at` has made fit."""
    if place.cluster is not None:
        roles = ranked(place.cluster)
        names = tuple(f"{role} at {place.cluster.address(role)}" for role in roles)
        return PsRanks(servers=_of(roles, "ps"), workers=_of(roles, "worker"), names=names)
    servers = strategy.num_server_processes
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
