"""From a place to a connected worker: meet the others, and open what the strategy exchanges through.

    one host       shared memory for gradients and for words; links in shared memory where the algorithm needs them
    several hosts  a link to everyone, in shared memory on this host and over Gloo to others; `hierarchical` by itself,
                   with the workers of a host as a group; and memory that the workers of a host share

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
from manyhands.hosts.links import address_towards
from manyhands.hosts.place import Place
from manyhands.hosts.sharing import no_group, share_group, share_links
from manyhands.link.alarm import Alarm
from manyhands.link.base import Link
from manyhands.link.heartbeats import BeatPlace, Heartbeats, address_of_interface, exchange_places
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
_BY_DEFAULT = "mirrored"


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
    asked = asked or Strategy.parse(_BY_DEFAULT)
    return asked if len(hosts) == 1 else asked.across_hosts(hosts)


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
            address = address or address_towards(place.master or "", socket.AF_UNSPEC)
            gloo = _open_gloo(PrefixStore("gloo", store), place, interface, address, timeout_s)
            beats = exchange_places(PrefixStore("beats", store), place.rank, place.world, address)
            connection = _on_several_hosts(meeting, strategy, gloo, beats, timeout_s, stack)
        return replace(connection, local_rank=meeting.local_rank, close=stack.pop_all().close)


def _on_one_host(meeting: Meeting, strategy: Strategy, timeout_s: float, stack: ExitStack) -> GroupConnection:
    groups = [
        stack.enter_context(share_group(meeting, purpose, timeout_s)) for purpose in ("words", "gradients")
    ]
    words, gradients = groups
    links = share_links(meeting, timeout_s, network=strategy.uses_network) if strategy.uses_links else {}
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
    shared = stack.enter_context(share_group(meeting, "gradients", timeout_s))
    links: dict[int, Link] = {**share_links(meeting, timeout_s, network=strategy.uses_network), **far}
    alarm = Alarm()

    def abort(rank: int = meeting.rank) -> None:
        shared.abort(meeting.here.index(rank) if rank in meeting.here else None)

    def lose(rank: int, sentence: str) -> None:
        alarm.ring(rank, sentence)
        abort(rank)
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
    resources = Resources(
        rank=meeting.rank,
        world=meeting.world,
        timeout_s=timeout_s,
        group=no_group,
        host_group=lambda: shared,
        links=lambda: links,
        hosts=meeting.hosts,
        alarm=alarm,
    )
    exchange, collective = exchanging(strategy).exchange_across_hosts(strategy, resources)
    connection = GroupConnection(
        strategy=strategy, words=Words(collective), exchange=exchange, on_one_host=False, abort=abort
    )
    meeting.watch(lambda rank, in_peace: None if in_peace else abort(rank))
    stack.callback(meeting.close)  # before the group: who watches must not find it closed
    return connection


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
