"""Proof of a schedule by running it on symbols instead of numbers.

Every rank starts with one symbol, its contribution; adding two values makes the expression of both. Expressions are
interned: equal ones have equal numbers. After the last step every chunk of every rank must be one and the same
expression, in which each contribution stands exactly once. The same expression means the same bits whatever the
values, the type and the operation: no law of arithmetic makes two expressions equal, neither a + b = b + a, which
`max` breaks for the two zeros, nor that a fold of three is two additions, which rounding may break.

Deadlock: a rank posts a step's sends before it waits, so it can wait for ever only for a message that nobody sends in
that step. `replay` refuses that, and any message that nobody receives or that carries other chunks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from typing import Generic, TypeAlias, TypeVar

from manyhands.errors import UserError
from manyhands.facts import Machines
from manyhands.strategies.common.collectives import schedule

_V = TypeVar("_V")


def prove(algorithm: schedule.Algorithm, world: int) -> None:
    """Return if the schedule is a correct all-reduce of `world` ranks, else raise ScheduleError.

    Proven: messages match one to one in FIFO order, no step waits for ever, every rank ends with each
    contribution exactly once in every chunk, and all ranks end with the same bits. Helpers contribute nothing, and
    may end with anything.
    """
    expressions = _Expressions()
    chunks = algorithm.chunks(world)
    where = f"{algorithm.name} on {world} ranks"
    # The contribution of a rank is a sequence of one number below zero, which no sum is.
    leaves = [expressions.intern((~rank,), 1 << rank) for rank in range(world)]
    held = [[leaf] * chunks for leaf in leaves]
    for held in replay(algorithm, world, lambda rank, _: leaves[rank], expressions.add):  # noqa: B007 - the last
        pass
    givers = world - algorithm.helpers
    for chunk in range(chunks):
        for rank in range(givers):
            number = held[rank][chunk]
            if rank and number == held[0][chunk]:
                continue
            missing, twice = ((1 << givers) - 1) & ~expressions.once[number], expressions.twice[number]
            if missing or twice:
                lacks, doubles = (
                    [one for one in range(world) if bits >> one & 1] for bits in (missing, twice)
                )
                raise schedule.ScheduleError(
                    f"{where}: rank {rank} ends with chunk {chunk} lacking the contributions of {lacks} "
                    f"and with those of {doubles} more than once"
                )
            if number != held[0][chunk]:
                raise schedule.ScheduleError(
                    f"{where}: ranks 0 and {rank} add chunk {chunk} in different orders, "
                    f"{expressions.text(held[0][chunk])} and {expressions.text(number)}"
                )


def replay(
    algorithm: schedule.Algorithm,
    world: int,
    start: Callable[[int, int], _V],
    add: Callable[[Sequence[_V]], _V],
) -> Iterator[list[list[_V]]]:
    """Run all ranks in one place, without links, on any kind of value; yield what they hold after each round.

    `start(rank, chunk)` is the first value of a chunk, `add` the sum of two values or of all values of a
    fold. What is yielded is indexed by rank, then chunk, and changes with the next round. Raises
    ScheduleError at the first message that does not match.
    """
    chunks = algorithm.chunks(world)
    tables = algorithm.tables(world)
    where = f"{algorithm.name} on {world} ranks"
    for rank, table in enumerate(tables):
        if len(table) != len(tables[0]):
            raise schedule.ScheduleError(
                f"{where}: rank {rank} has {len(table)} rounds, rank 0 has {len(tables[0])}"
            )
    ranks = [
        _Rank(rank, [start(rank, chunk) for chunk in range(chunks)], add, algorithm.gives(rank, world))
        for rank in range(world)
    ]
    for number, steps in enumerate(zip(*tables, strict=True), start=1):
        _play_round(ranks, steps, f"{where}, round {number}")
        yield [one.held for one in ranks]
    for one in ranks:
        if one.kept:
            kept, source = next(iter(one.kept))
            raise schedule.ScheduleError(
                f"{where}: rank {one.rank} never folds chunks {_text(kept)} kept from rank {source}"
            )


@dataclass(slots=True)
class _Rank(Generic[_V]):
    """What one rank holds, and its slots by (chunks, source)."""

    rank: int
    held: list[_V]
    add: Callable[[Sequence[_V]], _V]
    gives: bool
    kept: dict[tuple[range, int], list[_V]] = field(default_factory=dict)

    def take(self, receive: schedule.Receive, values: list[_V], where: str) -> None:
        chunks, source = receive.chunks, receive.source
        if receive.how is schedule.How.KEEP:
            if (chunks, source) in self.kept:
                raise schedule.ScheduleError(
                    f"{where}: rank {self.rank} still keeps chunks {_text(chunks)} of rank {source}"
                )
            self.kept[chunks, source] = values
        elif receive.how is schedule.How.COPY:
            self.held[chunks.start : chunks.stop] = values
        else:
            for chunk, value in zip(chunks, values, strict=True):
                mine = self.held[chunk]
                self.held[chunk] = self.add((value, mine) if source < self.rank else (mine, value))

    def fold(self, chunks: range) -> None:
        sources = [source for kept, source in self.kept if kept == chunks]
        slots = {source: self.kept.pop((chunks, source)) for source in sources}
        if self.gives:
            slots[self.rank] = self.held[chunks.start : chunks.stop]
        columns = zip(*(slots[source] for source in sorted(slots)), strict=True)
        self.held[chunks.start : chunks.stop] = [self.add(column) for column in columns]


def _play_round(ranks: Sequence[_Rank[_V]], steps: Sequence[schedule.Step], where: str) -> None:
    wires: dict[tuple[int, int], list[tuple[range, list[_V]]]] = defaultdict(list)
    for rank, step in zip(ranks, steps, strict=True):
        for send in step.sends:
            if send.to == rank.rank or not 0 <= send.to < len(ranks):
                raise schedule.ScheduleError(
                    f"{where}: rank {rank.rank} sends to rank {send.to}, which is not a peer"
                )
            if send.chunks.stop > len(rank.held):
                raise schedule.ScheduleError(
                    f"{where}: rank {rank.rank} sends chunks {_text(send.chunks)} of {len(rank.held)}"
                )
            values = rank.held[send.chunks.start : send.chunks.stop]
            wires[rank.rank, send.to].append((send.chunks, values))
    for rank, step in zip(ranks, steps, strict=True):
        for receive in step.receives:
            wire = wires.get((receive.source, rank.rank))
            if not wire:
                raise schedule.ScheduleError(
                    f"{where}: rank {rank.rank} waits forever for chunks {_text(receive.chunks)} from rank "
                    f"{receive.source}, which sends nothing more in this round"
                )
            chunks, values = wire.pop(0)
            if chunks != receive.chunks:
                raise schedule.ScheduleError(
                    f"{where}: rank {receive.source} sends chunks {_text(chunks)} to rank {rank.rank}, "
                    f"which expects chunks {_text(receive.chunks)}"
                )
            rank.take(receive, values, where)
        for chunks in step.folds:
            rank.fold(chunks)
    for (source, to), wire in wires.items():
        if wire:
            raise schedule.ScheduleError(
                f"{where}: rank {source} sends chunks {_text(wire[0][0])} to rank {to}, which receives none"
            )


def _text(chunks: range) -> str:
    return str(chunks.start) if len(chunks) == 1 else f"{chunks.start} to {chunks.stop - 1}"


class _Expressions:
    """Sums as integers: a leaf per contribution, a node per sequence of addends, each stored once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._addends: list[tuple[int, ...]] = []
        self.once: list[int] = []  # bit r: contribution r stands in the expression
        self.twice: list[int] = []  # bit r: more than once

    def add(self, addends: Sequence[int]) -> int:
        if len(addends) == 1:
            return addends[0]
        known = self._numbers.get(tuple(addends))
        if known is not None:
            return known
        once = twice = 0
        for number in addends:
            twice |= self.twice[number] | (once & self.once[number])
            once |= self.once[number]
        return self.intern(tuple(addends), once, twice)

    def text(self, number: int) -> str:
        first, *rest = self._addends[number]
        whole = f"r{~first}" if not rest else f"({'+'.join(map(self.text, (first, *rest)))})"
        return whole if len(whole) <= 120 else whole[:117] + "..."

    def intern(self, addends: tuple[int, ...], once: int, twice: int = 0) -> int:
        self._numbers[addends] = len(self._addends)
        self._addends.append(addends)
        self.once.append(once)
        self.twice.append(twice)
        return len(self._addends) - 1


# What a schedule costs, counted from its table: steps, messages, bytes, and alpha-beta-gamma time.
#
# A message of b bytes takes alpha + b * beta, reducing b bytes takes b * gamma (Hockney's model with
# reduction, as in Thakur, Rabenseifner and Gropp 2005). A rank has one port out and one port in, which work
# at the same time and each carry one message after the other; it reduces when its round's messages are in,
# and continues to its next round without waiting for ranks it exchanges nothing with. So the time is that of
# the longest chain of waits, found by playing the rounds through.


_Seconds: TypeAlias = Callable[[int, int, int], float]
"""The time of a message: (source, to, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one all-reduce.

    `steps` is the sum over rounds of the most messages that any rank sends or receives in that round;
    `messages` and `bytes_sent` are what each rank sends.
    """

    steps: int
    messages: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    _tables: tuple[schedule.Table, ...] = field(repr=False)
    _size: Callable[[range], int] = field(repr=False)  # the bytes of a run of chunks

    def time(self, alpha: float, beta: float, gamma: float) -> float:
        """Time until the last rank is done; alpha per message, beta per byte sent, gamma per byte reduced."""
        return self._played(lambda _source, _to, size: alpha + size * beta, None, gamma)

    def time_on(self, machines: Machines) -> float:
        """Time on these machines, where a host's link to the others carries one message after the other each way."""
        hosts = [machines.host_of(rank) for rank in range(len(self._tables))]
        inside, between = machines.inside.seconds, machines.between.seconds
        return self._played(
            lambda source, to, size: (inside if hosts[source] == hosts[to] else between)(size),
            hosts,
            1 / machines.added_per_s,
        )

    def _played(self, seconds: _Seconds, hosts: Sequence[int] | None, gamma: float) -> float:
        clocks, size = [0.0] * len(self._tables), self._size
        free: dict[tuple[int, bool], float] = defaultdict(float)  # when a host's link is free, out and in
        for steps in zip(*self._tables, strict=True):
            left: dict[tuple[int, int], deque[float]] = defaultdict(deque)
            finished = list(clocks)
            # The rank that is free first sends first: those of a host take turns on its link.
            waiting = [(finished[rank], rank, 0) for rank, step in enumerate(steps) if step.sends]
            heapify(waiting)
            while waiting:
                now, rank, number = heappop(waiting)
                send = steps[rank].sends[number]
                if hosts is not None and hosts[rank] != hosts[send.to]:
                    now = max(now, free[hosts[rank], True], free[hosts[send.to], False])
                end = finished[rank] = now + seconds(rank, send.to, size(send.chunks))
                if hosts is not None and hosts[rank] != hosts[send.to]:
                    free[hosts[rank], True] = free[hosts[send.to], False] = end
                left[rank, send.to].append(end)
                if number + 1 < len(steps[rank].sends):
                    heappush(waiting, (end, rank, number + 1))
            for rank, step in enumerate(steps):
                port = clocks[rank]
                for receive in step.receives:
                    carried = port + seconds(receive.source, rank, size(receive.chunks))
                    port = max(carried, left[receive.source, rank].popleft())
                # Bytes added in a round; what is kept counts when it arrives, although its fold may come later.
                added = sum(
                    size(receive.chunks) for receive in step.receives if receive.how is not schedule.How.COPY
                )
                finished[rank] = max(finished[rank], port) + gamma * added
            clocks = finished
        return max(clocks)


def cost(algorithm: schedule.Algorithm, world: int, num_bytes: int, item_bytes: int = 1) -> Cost:
    if num_bytes < 0 or item_bytes < 1 or num_bytes % item_bytes:
        raise UserError(
            f"num_bytes={num_bytes}, item_bytes={item_bytes}: num_bytes must be a multiple of item_bytes"
        )
    tables, chunks = algorithm.tables(world), algorithm.chunks(world)

    @cache
    def size(span: range) -> int:
        begin, end = schedule.span_bounds(num_bytes // item_bytes, chunks, span)
        return (end - begin) * item_bytes

    return Cost(
        steps=sum(
            max(max(len(step.sends), len(step.receives)) for step in steps)
            for steps in zip(*tables, strict=True)
        ),
        messages=tuple(sum(len(step.sends) for step in table) for table in tables),
        bytes_sent=tuple(sum(size(s.chunks) for step in table for s in step.sends) for table in tables),
        _tables=tables,
        _size=size,
    )
