"""`central` on several hosts: a copy on each, whose workers reduce in memory and whose leader sums with the others.

    host 0     worker 0 (leads) ─┐                         ┌─ worker 3 (leads)     host 1
               worker 1          ├── one reduced bucket ◄═►┤  worker 4
               worker 2          ┘      of each host       ┘

A bucket, on a host of P workers:

    reduce     as on one host: each worker sums its range of all P parts into its part
    gather     once all have, the leader copies their ranges into its part: the bucket summed over this host
    between    the leaders sum it over hosts, by `direct` over links, with the same bits on each
    hand out   each worker copies its range of the leader's part into its part, and steps by it

Over a network a thread of the leader does the middle two while backward continues, in launch order. A host sends
2 (H - 1) / H of a bucket to the H - 1 others, however many workers it has; their numbers may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from manyhands.engine.exchange import Resources, Times, Traffic
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategies.common.collectives import schedule_collective as scheduled
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective import Collective, SharedCollective
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.wire.parcels import Parcel


class BetweenHosts:
    """One worker's side of the exchange between hosts: the leaders, the lowest rank of each host, have links.

    `leads` says whether this worker is a leader. `close` is idempotent and closes the links.
    """

    def __init__(self, resources: Resources) -> None:
        self.rank, self.world = resources.rank, resources.world
        self.hosts = [tuple(host) for host in resources.hosts]
        self.number = next(
            number for number, host in enumerate(self.hosts) if self.rank in host
        )  # of this host
        self.here = self.hosts[self.number]  # the workers of this host
        self.leaders = tuple(min(host) for host in self.hosts)
        self.leads = self.rank in self.leaders
        self._links, self._resources = resources.links(), resources
        self.background = scheduled.Background("manyhands sums between hosts")
        self.executor: ScheduleExecutor | None = None  # among the leaders, by number of the host
        self.wire: int = Wire.MEMORY
        self.overlaps = False  # whether a thread sums meanwhile; data on a network needs no core of this host
        if self.leads:
            far = {host: self._links[one] for host, one in enumerate(self.leaders) if one != self.rank}
            self.wire = wire_of(next(link.wire for link in far.values()))
            self.overlaps = any(link.wire in (Wire.TCP, Wire.TORCH) for link in far.values())
            direct, wait_s, alarm = ALGORITHMS["direct"], resources.timeout_s, resources.alarm
            self.executor = ScheduleExecutor(
                direct, self.number, len(self.hosts), far, wait_s, alarm, roles=self.leaders
            )

    def words(self) -> scheduled.ScheduleCollective:
        """Return a collective for small exact values among all workers, ordered with the sums on the same links."""
        resources = self._resources
        executor = ScheduleExecutor(
            ALGORITHMS["direct"], self.rank, self.world, self._links, resources.timeout_s, resources.alarm
        )
        return scheduled.ScheduleCollective(executor, self._links, background=self.background)

    def close(self) -> None:
        self.background.close(partial(scheduled.close_links, self._links))


class HostsCollective(Collective):
    """Buckets in the memory of each host, summed over all workers of all hosts.

    As in `SharedCollective`, each worker gets only the items in `owned` of the first buckets, by bucket and place in
    the host; the other buckets become the whole sum. Does not own `group` and `between`.
    """

    def __init__(self, group: SharedGroup, owned: Sequence[Sequence[range]], between: BetweenHosts) -> None:
        self.rank, self.world, self.wire = between.rank, between.world, between.wire
        self.inside = SharedCollective(group, owned)  # among the workers of this host
        self._group, self._owned, self._between = group, owned, between
        self._launched: list[int] = []
        self._given = 0  # of those launched
        self._last_given = self._exchange_ns = 0
        self._waits: Counter[int] = Counter()

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        return self.inside.allocate(parcels)

    def launch(self, index: int) -> None:
        self.inside.launch(index)
        self._launched.append(index)

    def poll(self) -> bool:
        """Reduce what all workers of this host have filled; a leader sends buckets that all have reduced."""
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
            self._between.background.wait(self._last_given)
        if self._group.world > 1:  # each worker copies its items from the leader's part
            self._group.barrier()
            for index in self._launched if not self._between.leads else ():
                parts, items = self.inside.parts(index), self._of(index, self._group.rank) or slice(None)
                parts[self._group.rank][items].copy_(parts[0][items])
            self._group.barrier()  # from here on the leader may write its part
            self._exchange_ns += self.inside.take_times().exchange_ns  # the leader is not late: it exchanges
        self._launched, self._given = [], 0

    def broadcast(self, index: int, root: int = 0) -> None:
        """Broadcast worker `root`'s bytes: on its host, between the leaders, then on each other host."""
        between = self._between
        at = next(number for number, host in enumerate(between.hosts) if root in host)
        if at == between.number:
            self.inside.broadcast(index, between.here.index(root))
        if between.executor is not None:
            between.executor.broadcast(self.inside.parts(index)[0], at)
        if at != between.number:
            self.inside.broadcast(index)

    def take_times(self) -> Times:
        """Return the waits for workers of this host; the caller times the exchange between hosts."""
        self._note_times()
        exchange_ns, self._exchange_ns = self._exchange_ns, 0
        waits, self._waits = self._waits, Counter()
        executor = self._between.executor
        over = not self._launched and self._between.background.is_idle  # a step's traffic is reported at once
        posts = executor.mailbox.take_traffic() if over and executor is not None else {}
        return Times(exchange_ns=exchange_ns, wait_ns=waits, posts=posts)

    def traffic(self) -> Traffic:
        """Return what was read from others on this host, and what a leader sent to other hosts."""
        executor = self._between.executor
        return self.inside.traffic() + (executor.mailbox.traffic() if executor is not None else Traffic())

    def close(self) -> None:
        """Nothing to release: `group` and `between` belong to the caller."""

    def _give(self) -> None:
        """On a leader: sum the next bucket with the others, in the order of launches, which is the same on all."""
        index, executor = self._launched[self._given], self._between.executor
        assert executor is not None, "only leaders exchange with other hosts"
        self._given += 1

        def sum_between() -> None:
            # All workers here have reduced their items, so none reads its part.
            whole, *others = self.inside.parts(index)
            for place, part in enumerate(others, start=1):
                items = self._of(index, place)
                if items is not None:
                    whole[items].copy_(part[items])
            executor.all_reduce(whole)

        if self._between.overlaps:
            self._last_given = self._between.background.give(sum_between)
        else:
            sum_between()

    def _of(self, index: int, place: int) -> slice | None:
        """The items of a bucket that a worker of this host owns; None: it gets all of them."""
        if index >= len(self._owned):
            return None
        mine = self._owned[index][place]
        return slice(mine.start, mine.stop)

    def _note_times(self) -> None:
        times = self.inside.take_times()
        self._exchange_ns += times.exchange_ns
        self._waits.update({self._between.here[place]: waited for place, waited in times.wait_ns.items()})
