"""From a place to a connected worker: meet the others, and open what the strategy exchanges through.

    one host       shared memory for gradients and for words; links in shared memory where the algorithm needs them
    several hosts  a link to everyone, in shared memory on this host and over Gloo to others; `hierarchical` by itself,
                   with the workers of a host as a group

Gloo and torch's store authenticate nobody: several hosts need a network that is trusted. Gloo listens on the one
address that leads to torchrun's master, or on GLOO_SOCKET_IFNAME where that is set; so do the heartbeats, which name a
rank that falls silent within seconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from manyhands.allreduce.collective import SharedCollective
from manyhands.cluster.meeting import Meeting, meet
from manyhands.errors import ManyhandsError, UserError
from manyhands.group.shared import SharedGroup, SharedGroupFiles
from manyhands.hosts.place import Place
from manyhands.link.alarm import Alarm
from manyhands.link.base import Link
from manyhands.link.heartbeats import BeatPlace, Heartbeats, address_of_interface, exchange_places
from manyhands.link.mesh import mesh_kind
from manyhands.link.torch_p2p import TorchLink
from manyhands.loop.agreement import AloneCollective, Words
from manyhands.strategy import Strategy
from manyhands.training.exchange import Exchange, SingleExchange
from manyhands.training.exchanging import exchange_for, exchanging
from manyhands.training.resources import Resources

__all__ = ["GroupConnection", "choose", "connect"]

Hosts = Sequence[Sequence[int]]
"""The ranks of each host."""


@dataclass(frozen=True, kw_only=True)
class GroupConnection:
    """What one worker of a group exchanges through."""

    strategy: Strategy
    words: Words
    exchange: Exchange
    local_rank: int = 0
    """This worker's place among those of its host."""

    on_one_host: bool = True
    abort: Callable[[], None] = lambda: None
    """End the waits of the others: this worker has failed."""

    close: Callable[[], None] = lambda: None
    """Say farewell; before `words` and `exchange` are closed."""


_ALONE = "single"
_ON_ONE_HOST = "mirrored"
_IN_GROUPS = "allreduce algorithm=hierarchical"
_OVER_HOSTS = "allreduce algorithm=ring"


def choose(asked: Strategy | None, hosts: Hosts) -> Strategy:
    """The strategy for workers on these hosts: what was asked for if that can be, else what suits them."""
    world = sum(map(len, hosts))
    if asked is not None and asked.instead_of_own_loop:
        raise UserError(
            f"strategy={asked} is not for a loop of your own; use mirrored, central or allreduce there, or "
            f"{asked.instead_of_own_loop}"
        )
    if asked is not None and asked.most_workers is not None and world > asked.most_workers:
        raise UserError(f"strategy={asked} is one process, but there are {world} workers; leave it out")
    if len(hosts) == 1:
        return asked or Strategy.parse(_ON_ONE_HOST)
    own = Strategy.parse(f"{_IN_GROUPS} group={len(hosts[0])}" if _in_order(hosts) else _OVER_HOSTS)
    if asked is None or asked == Strategy.parse(_IN_GROUPS):
        return own
    if not asked.crosses_hosts:
        raise UserError(
            f"strategy={asked} is for the workers of one host, but there are {len(hosts)} hosts (with the ranks "
            f"{', '.join(map(str, map(list, hosts)))}); leave it out for {own}"
        )
    return asked


def connect(place: Place, name: str, asked: Strategy | None, timeout_s: float) -> GroupConnection:
    """Collective: meet the other workers of the group `name`; every wait lasts at most `timeout_s`."""
    if place.world == 1:
        return GroupConnection(
            strategy=Strategy.parse(_ALONE), words=Words(AloneCollective()), exchange=SingleExchange()
        )
    store = PrefixStore(f"manyhands/{name}", place.open_store(timeout_s))
    with ExitStack() as stack:
        stack.enter_context(
            nullcontext(store)
        )  # without an agent, rank 0 hosts it: it lives as long as the group
        meeting = stack.enter_context(
            meet(
                PrefixStore("meeting", store),
                rank=place.rank,
                world=place.world,
                name=name,
                timeout_s=timeout_s,
            )
        )
        strategy = choose(asked, meeting.hosts)
        if len(meeting.hosts) == 1:
            connection = _on_one_host(meeting, strategy, timeout_s, stack)
        else:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
            address = address_of_interface(interface) if interface else None
            address = address or _address_towards(place.master)
            gloo = _open_gloo(PrefixStore("gloo", store), place, interface, address, timeout_s)
            beats = exchange_places(PrefixStore("beats", store), place.rank, place.world, address)
            connection = _on_several_hosts(meeting, strategy, gloo, beats, timeout_s, stack)
        return replace(connection, local_rank=meeting.local_rank, close=stack.pop_all().close)


def _on_one_host(meeting: Meeting, strategy: Strategy, timeout_s: float, stack: ExitStack) -> GroupConnection:
    groups = [
        stack.enter_context(_share_group(meeting, purpose, timeout_s)) for purpose in ("words", "gradients")
    ]
    words, gradients = groups
    links = _share_links(meeting, strategy, timeout_s) if strategy.uses_links else {}
    resources = Resources(
        rank=meeting.local_rank,
        world=len(meeting.here),
        timeout_s=timeout_s,
        group=lambda: gradients,
        links=lambda: links,
    )

    def abort(rank: int = meeting.rank) -> None:
        for group in groups:
            group.abort(meeting.here.index(rank))

    connection = GroupConnection(
        strategy=strategy,
        words=Words(SharedCollective(words)),
        exchange=exchange_for(strategy, resources),
        abort=abort,
    )
    meeting.watch(lambda rank, in_peace: None if in_peace else abort(rank))
    stack.callback(meeting.close)  # before the groups: who watches must not find them closed
    return connection


def _on_several_hosts(
    meeting: Meeting,
    strategy: Strategy,
    gloo: ProcessGroupGloo,
    beats: tuple[socket.socket, Mapping[int, BeatPlace], bytes],
    timeout_s: float,
    stack: ExitStack,
) -> GroupConnection:
    group = cast(dist.ProcessGroup, gloo)  # which it is not, but a link asks for nothing that it has not
    far = {rank: TorchLink(group, rank) for rank in range(meeting.world) if rank not in meeting.here}
    links: dict[int, Link] = {**_share_links(meeting, strategy, timeout_s), **far}
    alarm = Alarm()

    def lose(rank: int, sentence: str) -> None:
        alarm.ring(rank, sentence)
        for link in far.values():  # the group is of no further use, and leaving it must not wait
            link.give_up(sentence)

    own, places, secret = beats
    heartbeats = Heartbeats(
        meeting.rank,
        own,
        {rank: places[rank] for rank in far},
        secret,
        on_lost=lose,
        in_peace=lambda rank: far[rank].left_in_peace,
    )
    stack.callback(heartbeats.close)
    alarm.mark = heartbeats.mark
    exchange, collective = exchanging(strategy).exchange_across_hosts(
        strategy, meeting.rank, links, timeout_s, alarm
    )
    return GroupConnection(strategy=strategy, words=Words(collective), exchange=exchange, on_one_host=False)


def _share_group(meeting: Meeting, purpose: str, timeout_s: float) -> SharedGroup:
    """Collective: memory that the workers of this host share."""
    world = len(meeting.here)
    with ExitStack() as made:

        def make() -> list[tuple[int, int]]:
            return [made.enter_context(SharedGroupFiles.create(world)).descriptors] * world

        control, arena = meeting.share(purpose, make, timeout_s)
    return SharedGroup(
        control=control, arena=arena, rank=meeting.local_rank, world=world, timeout_s=timeout_s
    )


def _share_links(meeting: Meeting, strategy: Strategy, timeout_s: float) -> Mapping[int, Link]:
    """Collective: a link to every other worker of this host, by rank."""
    places = range(len(meeting.here))
    kind = mesh_kind(network=strategy.uses_network)
    with ExitStack() as made:

        def make() -> list[list[int]]:
            mesh = made.enter_context(kind(len(meeting.here)))
            return [
                [one for _, link in sorted(mesh.descriptors(place).items()) for one in link]
                for place in places
            ]

        descriptors = meeting.share("links", make, timeout_s)
    peers = [rank for rank in meeting.here if rank != meeting.rank]
    width = len(kind.parts)
    ends = [descriptors[begin : begin + width] for begin in range(0, len(descriptors), width)]
    return kind.attach(meeting.rank, dict(zip(peers, ends, strict=True)))


def _open_gloo(
    store: Store, place: Place, interface: str, address: str, timeout_s: float
) -> ProcessGroupGloo:
    """Collective: connections to the workers of other hosts."""
    where = {"interface": interface} if interface else {"hostname": address}
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(**where)]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        return ProcessGroupGloo(store, place.rank, place.world, options)
    except RuntimeError as error:
        raise ManyhandsError(
            f"rank {place.rank} could not connect to the workers of other hosts from {', '.join(where.values())}: "
            f"{error}; set GLOO_SOCKET_IFNAME to the interface that leads to them"
        ) from error


def _address_towards(master: str | None) -> str:
    """This host's own address on the way to the master; nothing is sent."""
    assert master is not None, "workers on several hosts were started by torchrun"
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ManyhandsError(f"MASTER_ADDR={master} cannot be reached from here: {error}") from error


def _in_order(hosts: Hosts) -> bool:
    """Whether hosts hold equally many ranks one after the other, the last one perhaps fewer."""
    size = len(hosts[0])
    world = sum(map(len, hosts))
    return [list(ranks) for ranks in hosts] == [
        list(range(begin, min(begin + size, world))) for begin in range(0, world, size)
    ]
