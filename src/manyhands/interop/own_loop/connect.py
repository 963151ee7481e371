"""From a place to a connected worker: meet the others, and open what the strategy exchanges through.

    one host       shared memory for gradients and for words; links in shared memory where the algorithm needs them
    several hosts  a link to everyone, in shared memory on this host, and to others over TLS where MANYHANDS_TLS is set,
                   else over Gloo; `hierarchical` by itself, with the workers of a host as a group; and memory that the
                   workers of a host share

Under TLS all that workers of different hosts exchange (gradients, weights, words) is encrypted, and both ends are
known. Torch's store, where they find each other, and the heartbeats, which name a rank that falls silent within
seconds, hold addresses and signs of life alone, and stay as they are: whoever changes them can end a run, and cannot
join it. Gloo authenticates nobody and encrypts nothing: without TLS, several hosts need a network that is trusted, and
a warning says so. All listen on the one address that leads to torchrun's master, or on GLOO_SOCKET_IFNAME where that is
set.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.exchange import Exchange, Resources, SingleExchange
from manyhands.engine.loop_end import LoopEnd
from manyhands.engine.options import TLS_VARIABLE, Options
from manyhands.engine.worker_processes import exchanging, loop_exchange
from manyhands.errors import ManyhandsError, UserError
from manyhands.interop.own_loop.backward_rounds import Rounds
from manyhands.interop.own_loop.free_rounds import FreeRounds, StoreWords
from manyhands.interop.own_loop.small_sums import AloneCollective, Call, Words
from manyhands.observe.analyse.collect import Collector
from manyhands.observe.record.clocks import Bracket, Offset, offset_from
from manyhands.observe.record.event_ring import EventRing
from manyhands.observe.record.events import EventKind
from manyhands.places.external.links import address_towards, no_group, open_links, share_group, share_links
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.rendezvous import Rendezvous, meet
from manyhands.strategies.common.collectives.collective import SharedCollective
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.transport.heartbeats import BeatPlace, Heartbeats, address_of_interface, exchange_places
from manyhands.transport.link.interface import Link
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.link.torch_p2p import TorchLink
from manyhands.transport.liveness import Alarm

_log = logging.getLogger("manyhands")

FarLink = TorchLink | TcpLink  # a link to a worker of another host
Hosts = Sequence[Sequence[int]]  # the ranks of each host


@dataclass(frozen=True, kw_only=True)
class GroupConnection:
    """The channels of one worker of a group."""

    strategy: Strategy
    words: Words
    exchange: Exchange
    local_rank: int = 0  # this worker's place among those of its host
    on_one_host: bool = True
    rounds: Callable[..., Rounds] = Rounds  # made of words, exchange, worker context and `check_every`
    abort: Callable[[], None] = lambda: None  # end the waits of the others: this worker has failed
    close: Callable[[], None] = lambda: None  # say farewell; before `words` and `exchange` are closed


_ALONE = "single"
_BY_DEFAULT = "mirrored"


def in_own_loop(strategy: Strategy) -> Strategy:
    """What stands for a strategy in a loop of one's own."""
    instead = strategy.facts.in_own_loop
    return Strategy.parse(instead) if instead else strategy


def choose(requested: Strategy | None, hosts: Hosts) -> Strategy:
    """The strategy for workers on these hosts: the requested one if possible, else a suitable default."""
    world = sum(map(len, hosts))
    if requested is not None and requested.facts.instead_of_own_loop:
        raise UserError(
            f"strategy={requested} does not support a loop of your own; use another strategy, or "
            f"{requested.facts.instead_of_own_loop}"
        )
    if requested is not None and requested.most_workers is not None and world > requested.most_workers:
        raise UserError(f"strategy={requested} runs one process, but there are {world} workers; leave it out")
    if requested is not None and len(hosts) > 1 and requested.facts.cannot_loop_across_hosts:
        raise UserError(f"strategy={requested}: {requested.facts.cannot_loop_across_hosts}")
    requested = requested or Strategy.parse(_BY_DEFAULT)
    return requested if len(hosts) == 1 else requested.across_hosts(hosts)


def connect(place: ProcessPlace, name: str, requested: Strategy | None, timeout_s: float) -> GroupConnection:
    """Collective: connect to the other workers of the group `name`; every wait lasts at most `timeout_s`."""
    if place.world == 1:
        choose(requested, [[0]])  # rejects what no loop can mean, on several workers as alone
        alone, words = Strategy.parse(_ALONE), Words(AloneCollective())
        return GroupConnection(strategy=alone, words=words, exchange=SingleExchange())
    loop: type[LoopEnd] | None = STRATEGIES[requested.word].load_loop() if requested is not None else None
    if requested is not None and loop is not None:
        replays = place.launched.replays if place.launched is not None else None
        chosen = choose(requested, [range(place.world)])
        end: LoopEnd = (replays or loop.open)(place, name, chosen, timeout_s)
        return GroupConnection(strategy=requested, words=StoreWords(end), exchange=end, rounds=FreeRounds)
    if "ps" in place.roles:
        raise UserError(
            f"the cluster lists ps, but strategy={requested or _BY_DEFAULT} has no servers; leave ps out"
        )
    store = PrefixStore(f"manyhands/{name}", place.open_store(timeout_s))
    with ExitStack() as stack:
        stack.enter_context(nullcontext(store))  # rank 0 may host it: it lives as long as the group
        where = PrefixStore("rendezvous", store)
        met = meet(where, rank=place.rank, world=place.world, name=name, timeout_s=timeout_s)
        rendezvous = stack.enter_context(met)
        strategy = choose(requested, rendezvous.hosts)
        if len(rendezvous.hosts) == 1:
            connection = _on_one_host(rendezvous, strategy, timeout_s, stack)
        else:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
            address = address_of_interface(interface) if interface else None
            address = address or address_towards(place.master or "", socket.AF_UNSPEC)
            far = _reach_others(rendezvous, store, place, interface, address, timeout_s)
            heartbeats = exchange_places(PrefixStore("beats", store), place.rank, place.world, address)
            connection = _on_several_hosts(rendezvous, strategy, far, heartbeats, timeout_s, stack)
        return replace(connection, local_rank=rendezvous.local_rank, close=stack.pop_all().close)


def _on_one_host(
    rendezvous: Rendezvous, strategy: Strategy, timeout_s: float, stack: ExitStack
) -> GroupConnection:
    words = stack.enter_context(share_group(rendezvous, "words", timeout_s))
    gradients = stack.enter_context(share_group(rendezvous, "gradients", timeout_s))
    links: Mapping[int, Link] = {}
    if strategy.facts.uses_links:
        links = share_links(rendezvous, timeout_s, network=strategy.uses_network)
    here: Any = {"rank": rendezvous.local_rank, "world": len(rendezvous.here), "timeout_s": timeout_s}
    resources = Resources(**here, group=lambda: gradients, links=lambda: links)

    def abort(rank: int = rendezvous.rank) -> None:
        for group in (words, gradients):
            group.abort(rendezvous.here.index(rank))

    both, exchange = Words(SharedCollective(words)), loop_exchange(strategy, resources)
    connection = GroupConnection(strategy=strategy, words=both, exchange=exchange, abort=abort)
    rendezvous.watch(lambda rank, in_peace: None if in_peace else abort(rank))
    stack.callback(rendezvous.close)  # before the groups: the liveness monitor must not find them closed
    return connection


def _reach_others(
    rendezvous: Rendezvous, store: Store, place: ProcessPlace, interface: str, address: str, timeout_s: float
) -> Mapping[int, FarLink]:
    ranks = [rank for rank in range(rendezvous.world) if rank not in rendezvous.here]
    security = Options().security()  # that of the environment
    store.set(f"tls/{place.rank}", str(security.tls))
    said = store.multi_get([f"tls/{other}" for other in ranks])
    for other, theirs in zip(ranks, said, strict=True):  # with certificates on some only, they would wait
        if theirs != str(security.tls).encode():
            has, lacks = (place.rank, other) if security.tls else (other, place.rank)
            raise UserError(
                f"rank {has} has {TLS_VARIABLE}, but rank {lacks} on another host does not; set it on every host"
            )
    if security.tls:
        return open_links(
            place.rank,
            ranks,
            PrefixStore("links", store),
            address=address,
            token=security.token,
            security=security,
            timeout_s=timeout_s,
        )
    if place.rank == 0:
        _log.warning(
            "manyhands: group %r spans %d hosts, and its traffic is neither encrypted nor authenticated; "
            "set %s on each host (docs/security.md), or use a trusted network",
            rendezvous.name,
            len(rendezvous.hosts),
            TLS_VARIABLE,
        )
    where = {"interface": interface} if interface else {"hostname": address}
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(**where)]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), place.rank, place.world, options)
    except RuntimeError as error:
        raise ManyhandsError(
            f"rank {place.rank} could not connect to the workers of other hosts from {', '.join(where.values())}: "
            f"{error}; set GLOO_SOCKET_IFNAME to the interface that reaches them"
        ) from error
    group = cast(dist.ProcessGroup, gloo)  # which it is not, but a link asks for nothing that it has not
    return {rank: TorchLink(group, rank) for rank in ranks}


def _on_several_hosts(
    rendezvous: Rendezvous,
    strategy: Strategy,
    far: Mapping[int, FarLink],
    exchanged: tuple[socket.socket, Mapping[int, BeatPlace], bytes],
    timeout_s: float,
    stack: ExitStack,
) -> GroupConnection:
    shared = stack.enter_context(share_group(rendezvous, "gradients", timeout_s))
    links: dict[int, Link] = {**share_links(rendezvous, timeout_s, network=strategy.uses_network), **far}
    alarm = Alarm()

    def abort(rank: int = rendezvous.rank) -> None:
        shared.abort(rendezvous.here.index(rank) if rank in rendezvous.here else None)

    def lose(rank: int, sentence: str) -> None:
        alarm.ring(rank, sentence)
        abort(rank)
        for link in far.values():  # the group is not used any more, and leaving it must not wait
            if isinstance(link, TorchLink):
                link.give_up(sentence)
            else:
                link.interrupt()

    def left_in_peace(rank: int) -> bool:
        link = far[rank]  # whether it has said goodbye, as far as that is known without a receive
        return isinstance(link, TorchLink) and link.left_in_peace

    own, places, secret = exchanged
    theirs = {rank: places[rank] for rank in far}
    heartbeats = Heartbeats(rendezvous.rank, own, theirs, secret, on_lost=lose, in_peace=left_in_peace)
    stack.callback(heartbeats.close)
    alarm.mark = heartbeats.mark
    resources = Resources(
        rank=rendezvous.rank,
        world=rendezvous.world,
        timeout_s=timeout_s,
        group=no_group,
        host_group=lambda: shared,
        links=lambda: links,
        hosts=rendezvous.hosts,
        alarm=alarm,
    )
    exchange, collective = exchanging(strategy).exchange_across_hosts(strategy, resources)
    parts: Any = {"words": Words(collective), "exchange": exchange, "abort": abort}
    connection = GroupConnection(strategy=strategy, on_one_host=False, **parts)
    rendezvous.watch(lambda rank, in_peace: None if in_peace else abort(rank))
    stack.callback(rendezvous.close)  # before the group: the liveness monitor must not find it closed
    return connection


_ROUNDS = 9  # of comparing clocks


def own_loop_config(script: str, strategy: str, workers: int) -> dict[str, Any]:
    """What config.json says of a run whose loop is the user's; what only the script knows is left at nothing."""
    unknown = dict.fromkeys(("steps", "seed", "batch_size", "samples"), 0)
    return {"task": script, "strategy": strategy, "workers": workers, **unknown, "parameters": {}}


class Unwatched:
    """The worker context of a worker without a manyhands launcher: events go to a ring, if there is one."""

    def __init__(self, ring: EventRing | None = None) -> None:
        self.record: Callable[..., bool] = ring.record if ring is not None else lambda *_, **__: False
        self.mark: Callable[..., None] = lambda *_, **__: None
        self.note = self.mark
        self.stop_requested = lambda: False


@contextmanager
def keeping(ring: EventRing, connection: GroupConnection, out: Path) -> Iterator[None]:
    """Collective: while this is open, the events of this worker's `ring` go to `out`, which worker 0 makes."""
    words = connection.words
    config = own_loop_config(Path(sys.argv[0]).name, str(connection.strategy), words.world)
    made = RunDirectory.create(out, config) if words.rank == 0 else None
    try:
        offset, wall_offset_ns = align(words)  # and nobody writes before worker 0 has made the directory
        rings, wall_ns = {f"worker-{words.rank}": ring}, wall_offset_ns + offset.ns
        with Collector(rings, workers=words.world, directory=out / "events", wall_offset_ns=wall_ns):
            ring.record(EventKind.JOIN, time.monotonic_ns())
            yield
            ring.record(EventKind.LEAVE, time.monotonic_ns())
    finally:
        if made is not None:
            made.close()


def align(words: Words, now_ns: Callable[[], int] = time.monotonic_ns) -> tuple[Offset, int]:
    """Collective: this worker's distance to worker 0's clock, and worker 0's own distance to the time of day.

    All meet after looking at their clocks, then worker 0 looks at its own and tells all: so its reading lies between
    the two looks of everyone, however the workers are connected.
    """
    content = torch.zeros(2, dtype=torch.int64)
    brackets = []
    for _ in range(_ROUNDS):
        before_ns = now_ns()
        words.meet(Call.ALIGN)
        if words.rank == 0:
            content[0], content[1] = now_ns(), time.time_ns() - time.monotonic_ns()
        words.broadcast(content.view(torch.uint8))
        brackets.append(Bracket(before_ns=before_ns, theirs_ns=int(content[0]), after_ns=now_ns()))
    offset = offset_from(brackets) if words.rank else Offset(ns=0, error_ns=0)
    return offset, int(content[1])
