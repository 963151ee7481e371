"""`central` on several hosts: each has a copy, its workers reduce in its memory, and the hosts' leaders sum between.

    host 0     worker 0 (leads) ─┐                         ┌─ worker 3 (leads)     host 1
               worker 1          ├── one reduced bucket ◄═►┤  worker 4
               worker 2          ┘      of each host       ┘

A bucket, on a host of P workers:

    reduce     as on one host: each worker sums its range of all P parts into its own part
    gather     once all have, the leader copies their ranges into its part: the bucket as this host has it
    between    the leaders make it the sum over hosts, by `direct` over links, with the same bits on each
    hand out   each worker copies its range of the leader's part into its own, and steps by it

Over a network the middle two are done by a thread of the leader while backward goes on, bucket after bucket in the
order in which they were launched. A host sends 2 (H - 1) / H of a bucket to the H - 1 others, however many workers it
has; hosts may have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from manyhands.engine.exchange import PeerTraffic, Times, Traffic
from manyhands.engine.worker_resources import Resources
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.background import Background
from manyhands.strategies.common.collectives.collective import (
    Collective,
    ScheduleCollective,
    SharedCollective,
)
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.interface import Link
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.wire.parcels import Parcel

__all__ = ["BetweenHosts", "HostsCollective"]


class BetweenHosts:
    """One worker's side of what goes between hosts: their leaders, the lowest rank of each, have links to each other.

    `leads` says whether this worker is one; only then may `give`, `sum` and `broadcast` be called. Work is done in the
    order given, which is the same on all leaders. `close` is idempotent and closes the links.
    """

    def __init__(self, resources: Resources) -> None:
        self.rank = resources.rank
        self.world = resources.world
        self.hosts = [tuple(host) for host in resources.hosts]
        self.number = next(number for number, host in enumerate(self.hosts) if self.rank in host)
        """Of this host."""

        self.here = self.hosts[self.number]
        """The workers of this host."""

        self.leaders = tuple(min(host) for host in self.hosts)
        self.leads = self.rank in self.leaders
        self._links = resources.links()
        self._background = Background("manyhands sums between hosts")
        self._executor: ScheduleExecutor | None = None
        self._resources = resources
        if self.leads:
            far = {
                number: self._links[leader]
                for number, leader in enumerate(self.leaders)
                if leader != self.rank
            }
            self._executor = ScheduleExecutor(
                ALGORITHMS["direct"],
                self.number,
                len(self.hosts),
                far,
                resources.timeout_s,
                resources.alarm,
                roles=self.leaders,
            )

    @property
    def most_workers(self) -> int:
        """How many the largest host has."""
        return max(map(len, self.hosts))

    @property
    def wire(self) -> int:
        """What carries this worker's buckets to others."""
        if self._executor is None:
            return Wire.MEMORY
        return wire_of(next(link.wire for link in self._far()))

    @property
    def overlaps(self) -> bool:
        """Whether a thread sums while this worker computes: bytes on a network need no core of it."""
        return self.leads and any(link.wire in (Wire.TCP, Wire.TORCH) for link in self._far())

    @property
    def is_idle(self) -> bool:
        """Whether all that was given is done."""
        return self._background.is_idle

    def words(self) -> ScheduleCollective:
        """For small exact words among all workers, over the same links and in one order with the sums."""
        resources = self._resources
        executor = ScheduleExecutor(
            ALGORITHMS["direct"], self.rank, self.world, self._links, resources.timeout_s, resources.alarm
        )
        return ScheduleCollective(executor, self._links, background=self._background)

    def give(self, work: Callable[[], None]) -> int:
        """Have this done after what was given before it, by the thread where that `overlaps`; its number."""
        if self.overlaps:
            return self._background.give(work)
        work()
        return 0

    def wait(self, number: int) -> None:
        """Until work `number` is done, or raise what went wrong in it."""
        self._background.wait(number)

    def sum(self, buffer: torch.Tensor) -> None:
        """Collective among leaders: theirs become the sum over hosts."""
        self._need().all_reduce(buffer)

    def broadcast(self, buffer: torch.Tensor, root: int) -> None:
        """Collective among leaders: that of host number `root` becomes theirs."""
        self._need().broadcast(buffer, root)

    def take_traffic(self) -> Mapping[int, PeerTraffic]:
        """What went to and came from each other leader since the last call."""
        return self._executor.take_traffic() if self._executor is not None else {}

    def traffic(self) -> Traffic:
        """What this worker has sent to other hosts so far."""
        if self._executor is None:
            return Traffic()
        return Traffic(messages_sent=self._executor.messages_sent, bytes_sent=self._executor.bytes_sent)

    def close(self) -> None:
        """Close the links, and end what waits for them."""
        self._background.close(self._close_links)

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()

    def _far(self) -> list[Link]:
        return [self._links[leader] for leader in self.leaders if leader != self.rank]

    def _need(self) -> ScheduleExecutor:
        assert self._executor is not None, "only leaders exchange with other hosts"
        return self._executor


class HostsCollective(Collective):
    """Buckets in the memory of each host, summed over all workers of all hosts.

    As in `SharedCollective`, of the first buckets each worker gets the sum of the items that `owned` says, by bucket
    and place in the host; the others become the sum as a whole. Does not own `group` and `between`.
    """

    def __init__(self, group: SharedGroup, owned: Sequence[Sequence[range]], between: BetweenHosts) -> None:
        self.rank = between.rank
        self.world = between.world
        self.inside = SharedCollective(group, owned)
        """Among the workers of this host."""

        self._group = group
        self._owned = owned
        self._between = between
        self._launched: list[int] = []
        self._given = 0  # of those launched
        self._last_given = 0
        self._exchange_ns = 0
        self._waits: dict[int, int] = {}

    @property
    def wire(self) -> int:  # type: ignore[override]
        """Of a leader the network."""
        return self._between.wire

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """Collective, once: in the memory of each host."""
        return self.inside.allocate(parcels)

    def launch(self, index: int) -> None:
        """Say to the workers of this host that this one's part is there."""
        self.inside.launch(index)
        self._launched.append(index)

    def poll(self) -> bool:
        """Reduce what everyone here has filled; a leader lets buckets leave that all have reduced."""
        waiting = self.inside.poll()
        if not self._between.overlaps:
            return waiting
        while self._given < len(self._launched) and self.inside.is_done(self._launched[self._given]):
            self._give()
        return self._given < len(self._launched)

    def finish(self) -> None:
        """Wait until this worker's items of every launched bucket are the sum over all hosts."""
        self.inside.finish()
        self._note_times()
        if self._between.leads:
            while self._given < len(self._launched):
                self._give()
            self._between.wait(self._last_given)
        self._hand_out()
        self._launched, self._given = [], 0

    def broadcast(self, index: int, root: int = 0) -> None:
        """Worker `root`'s bytes to all: on its host, between the leaders, and on each host."""
        between = self._between
        at = next(number for number, host in enumerate(between.hosts) if root in host)
        if at == between.number:
            self.inside.broadcast(index, between.here.index(root))
        if between.leads:
            between.broadcast(self.inside.parts(index)[0], at)
        if at != between.number:
            self.inside.broadcast(index)

    def take_times(self) -> Times:
        """Waiting for the workers of this host; what goes between hosts is timed by the caller."""
        self._note_times()
        exchange_ns, self._exchange_ns = self._exchange_ns, 0
        waits, self._waits = self._waits, {}
        over = not self._launched and self._between.is_idle  # a step's posts stay together
        return Times(
            exchange_ns=exchange_ns, wait_ns=waits, posts=self._between.take_traffic() if over else {}
        )

    def traffic(self) -> Traffic:
        """What was read of others on this host, and what a leader sent to other hosts."""
        return self.inside.traffic() + self._between.traffic()

    def close(self) -> None:
        """Nothing here is its own."""

    def _give(self) -> None:
        index = self._launched[self._given]
        self._given += 1
        self._last_given = self._between.give(partial(self._sum_between, index))

    def _sum_between(self, index: int) -> None:
        """On a leader, maybe in its thread: all workers here have reduced their items, so nobody reads its part."""
        whole, *others = self.inside.parts(index)
        for place, part in enumerate(others, start=1):
            items = self._of(index, place)
            if items is not None:
                whole[items].copy_(part[items])
        self._between.sum(whole)

    def _hand_out(self) -> None:
        """Collective on this host: everyone's items of what the leader has."""
        if self._group.world == 1:
            return
        self._group.barrier()
        for index in self._launched if not self._between.leads else ():
            whole = self.inside.parts(index)[0]
            mine = self.inside.parts(index)[self._group.rank]
            items = self._of(index, self._group.rank)
            if items is None:
                mine.copy_(whole)
            else:
                mine[items].copy_(whole[items])
        self._group.barrier()  # from here on the leader may write its part
        self._exchange_ns += self.inside.take_times().exchange_ns  # the leader is not late: it exchanges

    def _of(self, index: int, place: int) -> slice | None:
        """Which items of a bucket a worker of this host owns; None: it gets all of them."""
        if index >= len(self._owned):
            return None
        mine = self._owned[index][place]
        return slice(mine.start, mine.stop)

    def _note_times(self) -> None:
        times = self.inside.take_times()
        self._exchange_ns += times.exchange_ns
        for place, waited_ns in times.wait_ns.items():
            peer = self._between.here[place]
            self._waits[peer] = self._waits.get(peer, 0) + waited_ns
