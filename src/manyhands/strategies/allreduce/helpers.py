"""All-reduce with helpers: processes without samples that only sum (BytePS: Jiang et al., OSDI 2020).

Every piece of the vector has one process that sums it: a worker, or a helper. Workers send it their parts and get the
sum back. A worker that sums a share w of the vector sends 1 - w of its own and its sums to n - 1 others, in all
1 + (n - 2) w; a helper that sums a share h sends its sums to n workers, n h. As much comes in. With n workers, k < n
helpers and n w + k h = 1, both are the same, and the busiest link has the least to carry, where

    w = (n - k) / (n² + k n - 2 k)      h = 2 (n - 1) / (n² + k n - 2 k)      each link: 2 n (n - 1) / (n² + k n - 2 k)

With n helpers or more, these sum everything, and each link of a worker carries the vector once in each direction,
against 2 (n - 1) / n times without helpers. That needs links that are busy in both directions at once: so the vector is
cut into segments, and the sums of one come back while the next one leaves.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from heapq import heappop, heappush
from math import gcd
from typing import Final, NamedTuple

import torch

from manyhands.engine.exchange import Resources, Traffic
from manyhands.engine.reporting import StepBook, WorkerContext
from manyhands.errors import ManyhandsError, UserError, WorkerFailed
from manyhands.native.dtypes import BY_CODE, CODES, SUMMED
from manyhands.native.wait_sign import LONG_WAIT_S, LongWait
from manyhands.places.local.status import State
from manyhands.strategies.common.collectives import schedule_collective as scheduled
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective_traffic import sent_over_links
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.strategies.common.collectives.schedule import Algorithm, How, Receive, Send, Step, Table
from manyhands.transport.link.interface import Closed, Link, PeerDied, Received
from manyhands.transport.link.wire import wire_of
from manyhands.transport.liveness import Alarm
from manyhands.transport.messages import ProtocolError
from manyhands.wire.parcels import Parcel

MOST_SEGMENTS = 32
SEGMENT_BYTES = 128 << 10
"""What a worker sends in one round, about, where the vector is long enough for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSplit:
    """How many pieces of a vector each process sums; all pieces have equal size."""

    workers: int
    helpers: int
    worker_pieces: int  # that each worker sums
    helper_pieces: int

    @property
    def pieces(self) -> int:
        return self.workers * self.worker_pieces + self.helpers * self.helper_pieces

    @property
    def busiest(self) -> Fraction:
        """What the busiest process sends, and also receives, as a multiple of the vector."""
        of_worker = self.pieces + (self.workers - 2) * self.worker_pieces
        return Fraction(max(of_worker, self.workers * self.helper_pieces), self.pieces)

    def span(self, rank: int) -> range:
        """The pieces that a rank sums; helpers are the ranks after the workers."""
        if rank < self.workers:
            return range(rank * self.worker_pieces, (rank + 1) * self.worker_pieces)
        first = self.workers * self.worker_pieces + (rank - self.workers) * self.helper_pieces
        return range(first, first + self.helper_pieces)


def split_load(workers: int, helpers: int) -> HelperSplit:
    if workers < 2 or helpers < 0:
        raise UserError(f"workers={workers}, helpers={helpers}: helpers need at least 2 workers")
    if helpers >= workers:
        return HelperSplit(workers=workers, helpers=helpers, worker_pieces=0, helper_pieces=1)
    worker, helper = workers - helpers, 2 * (workers - 1) if helpers else 0
    common = gcd(worker, helper)
    return HelperSplit(
        workers=workers, helpers=helpers, worker_pieces=worker // common, helper_pieces=helper // common
    )


def segments_for(num_bytes: int) -> int:
    """Return the number of segments for a vector, so that each round outweighs the cost of its messages."""
    return max(1, min(MOST_SEGMENTS, num_bytes // SEGMENT_BYTES))


@cache
def helped(workers: int, helpers: int, segments: int = 1) -> Algorithm:
    split = split_load(workers, helpers)

    def table(rank: int, world: int) -> Table:
        """In round q, push segment q to the processes that sum it and return the sums of segment q - 1."""
        if world != workers + helpers:
            raise UserError(f"world={world}: it is {workers} workers and {helpers} helpers")
        return tuple(_round(split, segments, rank, number) for number in range(segments + 1))

    return Algorithm(
        name=f"{helpers} helpers",
        schedule=table,
        chunks=lambda _world: split.pieces * segments,
        description="helpers and workers sum a share each; sums return while other segments are sent",
        source="BytePS: Jiang et al., OSDI 2020",
        helpers=helpers,
    )


def _round(split: HelperSplit, segments: int, rank: int, number: int) -> Step:
    def span(of: int, segment: int) -> range:
        pieces, first = split.span(of), segment * split.pieces
        return range(first + pieces.start, first + pieces.stop)

    sends, receives = [], []
    for one in _order(split):
        segment = number - 1 if one.is_sum else number
        if rank not in (one.source, one.to) or not 0 <= segment < segments:
            continue
        chunks = span(one.summer, segment)
        if rank == one.source:
            sends.append(Send(to=one.to, chunks=chunks))
        else:
            how = How.COPY if one.is_sum else How.KEEP
            receives.append(Receive(source=one.source, chunks=chunks, how=how))
    folds = (span(rank, number),) if number < segments and split.span(rank) else ()
    return Step(sends=tuple(sends), receives=tuple(receives), folds=folds)


class _Message(NamedTuple):
    """One message of a round: a worker's part for the process that sums it, or a sum on its way back."""

    source: int
    to: int
    is_sum: bool

    @property
    def summer(self) -> int:
        return self.source if self.is_sum else self.to


@cache
def _order(split: HelperSplit) -> tuple[_Message, ...]:
    """Return the messages of a round, ordered so that the ports at both ends stay busy.

    Each port carries one message at a time. A free sender picks, among the free receivers, the one with the most left
    to receive, and the longest message for it (list scheduling of an open shop: Gonzalez and Sahni, JACM 1976).
    """
    world = split.workers + split.helpers
    waiting: list[list[_Message]] = [[] for _ in range(world)]  # by sender, to the next rank first
    to_get: Counter[int] = Counter()
    for rank in range(world):
        for to in ((rank + distance) % world for distance in range(1, world)):
            if split.span(rank) and to < split.workers:
                waiting[rank].append(_Message(rank, to, is_sum=True))
            if split.span(to) and rank < split.workers:
                waiting[rank].append(_Message(rank, to, is_sum=False))
        for one in waiting[rank]:
            to_get[one.to] += len(split.span(one.summer))
    free_at: Counter[int] = Counter()  # the port in, by rank
    senders = [(0, 0, source) for source in range(world)]  # a heap: equal times in the order of ranks
    begun: list[tuple[int, int, _Message]] = []
    while senders:
        now, tried, source = heappop(senders)
        ready = [one for one in waiting[source] if free_at[one.to] <= now]
        if not ready:
            if waiting[source]:
                heappush(senders, (min(free_at[one.to] for one in waiting[source]), tried + 1, source))
            continue
        one = max(ready, key=lambda one: (to_get[one.to], len(split.span(one.summer))))
        size = len(split.span(one.summer))
        waiting[source].remove(one)
        to_get[one.to] -= size
        free_at[one.to] = now + size
        begun.append((now, len(begun), one))
        heappush(senders, (now + size, 0, source))
    return tuple(one for *_, one in sorted(begun))


_ORDERS: Final = 6  # the kind of these messages; those of an executor's are below it
_NUMBER_BYTES: Final = 8
_MOST_NUMBERS: Final = 1 << 17
_CAUSE_S: Final = 0.75


# All-reduce with helpers: the workers' collective, and the loop of a helper process.
# Gradients travel through the processes that sum them (`helpers`). Losses, flags and weights are small or sent once,
# and travel from worker to worker. Worker 0 sends orders to the helpers, as messages of int64 numbers:
#
#     first           the number of buckets; for each, its number of items and its type
#     in every step   the step, and the buckets to sum, in order: all at once, or one after the other
#     at the end      worker 0 closes its link
class HelpedCollective(scheduled.ScheduleCollective):
    """Sums inexact buckets with the helpers, and all others among the workers alone.

    `words` is over the workers, `sums` over workers and helpers; both use the same links.
    """

    def __init__(
        self,
        words: ScheduleExecutor,
        sums: ScheduleExecutor,
        links: Mapping[int, Link],
        orders: Mailbox,
        arrive: Callable[[], Mapping[int, int]] | None = None,
        codec: str = "raw",
    ) -> None:
        super().__init__(words, links, arrive, codec)
        self._sums, self._orders, self._ordered = sums, orders, 0
        self.mailboxes += [sums.mailbox, orders]

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        buckets = super().allocate(parcels)
        summed = [one for one in parcels if not one.exact]
        # Exact buckets come last, so those that helpers sum are numbered by their index.
        assert summed == list(parcels[: len(summed)]), "helpers know buckets by their places"
        self._order([len(summed), *(n for one in summed for n in (one.count, CODES[one.dtype]))])
        return buckets

    def rounds(self, parcel: Parcel) -> bool:
        return self._sums.encodes(parcel)

    def _sum(self, launched: Sequence[int]) -> None:
        """Sum the launched buckets; worker 0 first announces those that helpers take part in."""
        announced = [index for index in launched if not self._parcels[index].exact]
        if announced:
            self._order([self.step, *announced])
        for index in launched:
            bucket, parcel = self._buckets[index], self._parcels[index]
            if parcel.exact:
                self.executor.all_reduce(bucket, parcel=parcel)
            else:
                self._sums.all_reduce(bucket, parcel=parcel, algorithm=_way(self._sums, parcel))

    def _order(self, numbers: Sequence[int]) -> None:
        if self.rank != 0:
            return
        helpers = range(self.world, self._sums.world)
        self._orders.enter("orders for helpers", _ORDERS, self._ordered, 0)
        self._ordered += 1
        payload = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        self._orders.flush(self._orders.post([(helper, payload) for helper in helpers]), helpers)


def _way(executor: ScheduleExecutor, parcel: Parcel) -> Algorithm:
    helpers = executor.algorithm.helpers
    return helped(executor.world - helpers, helpers, segments_for(parcel.num_bytes))


def sent_with_helpers(
    parcels: Sequence[Parcel], workers: int, helpers: int, codec: str, *, early: bool
) -> tuple[Traffic, Traffic]:
    """What all workers and all helpers send to sum these parcels once.

    With `early`, each bucket is announced to the helpers by itself; otherwise all of a step together.
    """
    world = workers + helpers
    carries = scheduled.carrier(codec, feedback=False, seed=0, rank=0, world=world)
    totals = [Traffic(), Traffic()]
    summed = [parcel for parcel in parcels if not parcel.exact]
    for parcel in parcels:
        if parcel.exact:
            totals[0] += sent_over_links(ALGORITHMS["direct"], workers, [parcel])[0]
            continue
        way = helped(workers, helpers, segments_for(parcel.num_bytes))
        for role, sent in enumerate(sent_over_links(way, world, [parcel], carries)):
            totals[role] += sent
    orders = len(summed) if early else min(1, len(summed))
    numbers = orders + len(summed)  # an order begins with the number of the step
    totals[0] += Traffic(messages_sent=helpers * orders, bytes_sent=helpers * numbers * _NUMBER_BYTES)
    return totals[0], totals[1]


def _summing(resources: Resources, codec: str) -> ScheduleExecutor:
    rank, world = resources.rank, resources.world + resources.helpers
    carries = scheduled.carrier(codec, feedback=False, seed=resources.seed, rank=rank, world=world)
    way, links = helped(resources.world, resources.helpers), resources.links()
    return ScheduleExecutor(way, rank, world, links, resources.timeout_s, resources.alarm, carries)


def helped_collective(resources: Resources, codec: str) -> HelpedCollective:
    """Return a worker's end; if memory is shared, a barrier in it tells which worker was late."""
    rank, world, links = resources.rank, resources.world, resources.links()
    arrive = scheduled.barrier_in(resources.group()) if resources.shares_memory else None
    words = ScheduleExecutor(ALGORITHMS["direct"], rank, world, links, resources.timeout_s, resources.alarm)
    orders = Mailbox(rank, links, resources.timeout_s, resources.alarm)
    return HelpedCollective(words, _summing(resources, codec), links, orders, arrive, codec)


def help_workers(resources: Resources, codec: str, worker_context: WorkerContext) -> Traffic:
    """Run a helper: sum what workers send until worker 0 closes its link, and return what was sent.

    Raises WorkerFailed naming the worker that was lost. The time between two steps is for the workers to limit: a
    helper waits for its next order as long as worker 0 is alive.
    """
    links = resources.links()
    try:
        helper = _Helper(_summing(resources, codec), links[0], resources.alarm, worker_context, codec)
        return helper.run()
    finally:
        scheduled.close_links(links)


class _Helper:
    """The helper's state: sums the buckets that worker 0 announces."""

    def __init__(
        self,
        executor: ScheduleExecutor,
        leader: Link,
        alarm: Alarm | None,
        worker_context: WorkerContext,
        codec: str,
    ) -> None:
        self._executor, self._leader, self._alarm = executor, leader, alarm
        self._worker_context = worker_context
        self._wire = wire_of(leader.wire, codec)
        self._room = torch.empty(_MOST_NUMBERS, dtype=torch.int64)
        self._step = -1  # the one that is being summed
        self._busy_ns = self._end_ns = 0
        self._sent = Traffic()

    def run(self) -> Traffic:
        first = self._next_order()
        parcels = self._parcels(first) if first is not None else []
        vectors: dict[torch.dtype, torch.Tensor] = {}  # memory is taken for what is summed here
        for parcel in sorted(parcels, key=lambda one: one.count):
            vectors[parcel.dtype] = torch.empty(parcel.count, dtype=parcel.dtype)
        while (order := self._next_order()) is not None:
            step, *numbers = order
            for number in numbers:
                if not 0 <= number < len(parcels):
                    raise ManyhandsError(f"worker 0 named bucket {number}, but there are {len(parcels)}")
            begin = time.monotonic_ns()
            if step != self._step:
                self._book()
                self._step, self._busy_ns, self._sent = step, 0, self._executor.mailbox.traffic()
                self._worker_context.mark(step + 1, State.SERVING)
            for parcel in (parcels[number] for number in numbers):
                vector, way = vectors[parcel.dtype][: parcel.count], _way(self._executor, parcel)
                self._executor.all_reduce(vector, parcel=parcel, algorithm=way)
            self._end_ns = time.monotonic_ns()
            self._busy_ns += self._end_ns - begin
        self._book()
        return self._executor.mailbox.traffic()

    @staticmethod
    def _parcels(numbers: Sequence[int]) -> list[Parcel]:
        buckets, *rest = numbers
        if len(rest) != 2 * buckets:
            raise ManyhandsError(f"worker 0 sent {len(rest)} numbers for {buckets} buckets, not two for each")
        sizes = list(zip(rest[::2], rest[1::2], strict=True))
        for count, code in sizes:
            if count < 0 or BY_CODE.get(code) not in SUMMED:
                raise ManyhandsError(f"worker 0 announced a bucket of {count} items of type {code}")
        return [Parcel.whole(number, count, BY_CODE[code]) for number, (count, code) in enumerate(sizes)]

    def _book(self) -> None:
        """Record the finished step as one exchange; between its buckets this helper was idle."""
        if self._step < 0:
            return
        mailbox = self._executor.mailbox
        book = StepBook(self._worker_context.record, self._step, self._end_ns - self._busy_ns)
        book.exchange(self._end_ns, mailbox.traffic() - self._sent, self._wire)
        book.posts(mailbox.take_traffic(), self._wire)

    def _next_order(self) -> list[int] | None:
        """Return worker 0's next numbers; None once it has closed its link."""
        with LongWait() as wait:
            while True:
                try:
                    outcome = self._leader.receive(LONG_WAIT_S, self._room.view(torch.uint8))
                except ProtocolError as error:
                    raise ManyhandsError(f"from worker 0: {error}") from error
                if isinstance(outcome, Received):
                    size, kind = outcome.message.payload_bytes, outcome.message.kind
                    if kind != _ORDERS or size % _NUMBER_BYTES or not size:
                        raise ManyhandsError(
                            f"worker 0 sent {size} bytes of kind {kind} to a helper that expects orders"
                        )
                    return self._room[: size // _NUMBER_BYTES].tolist()
                if isinstance(outcome, Closed):
                    return None
                # Worker 0 is gone, or the alarm names another lost worker.
                died = isinstance(outcome, PeerDied)
                lost = self._alarm.lost(_CAUSE_S if died else 0.0) if self._alarm is not None else None
                if lost is None and isinstance(outcome, PeerDied):
                    lost = 0, outcome.reason
                if lost is not None:
                    raise WorkerFailed(f"rank {self._executor.rank}, waiting for orders: {lost[1]}", lost[0])
                wait.goes_on(0)
