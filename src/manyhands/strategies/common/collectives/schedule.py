"""What an all-reduce algorithm is: a pure function from (rank, world) to a table of steps.

The vector is cut into chunks. From one table the executor runs the algorithm over any link, `schedule_proof` proves it
and counts what it costs, and `collective_drawing` shows it. The meaning of one step, the same in all four:

1. Every send leaves with what the rank held when the step began; one message per `Send`.
2. The receives take effect in the order in which they are listed. ADD puts the value from the lower rank on the left,
   so that two ranks that swap partial sums compute the same expression, down to the sign of a zero.
3. The folds: each chunk becomes the sum of the rank's own value and the kept ones, left to right in rank order. A
   helper has no own value.

Tables are aligned: all ranks of one algorithm have the same number of steps, some of them empty, and a message sent in
a step is received in the step of the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from manyhands.errors import ManyhandsError, UserError


class ScheduleError(ManyhandsError):
    """A schedule is wrong; the message names the algorithm, the world, the round and the rank."""


class How(Enum):
    """What becomes of a chunk that arrives."""

    ADD = "add"
    COPY = "copy"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneMessage:
    chunks: range  # a run of neighbours

    def __post_init__(self) -> None:
        if not self.chunks or self.chunks.step != 1 or self.chunks.start < 0:
            raise ScheduleError(f"a message must carry consecutive chunks, not {self.chunks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(_OneMessage):
    """One message: the `chunks` as this rank holds them, to rank `to`."""

    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive(_OneMessage):
    """One message: the `chunks` from rank `source`, and what becomes of them."""

    source: int
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one rank does in one round; by default nothing.

    `folds` come after the receives; each names a run of chunks just as the messages it sums were kept.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()
    folds: tuple[range, ...] = ()


Table = tuple[Step, ...]
Schedule = Callable[[int, int], Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One all-reduce algorithm: its schedule, how many chunks it cuts a vector into, and where it is from."""

    name: str
    schedule: Schedule
    chunks: Callable[[int], int]
    description: str
    source: str
    helpers: int = 0
    """The last ranks, so many of them, that have no vector of their own: they only sum, and want no result."""
    rotates: bool = False
    """Whether a rank's table is that of rank 0 with its number added to all ranks and chunks; one chunk a message."""

    def gives(self, rank: int, world: int) -> bool:
        return rank < world - self.helpers

    def table(self, rank: int, world: int) -> Table:
        if world < 1 or not 0 <= rank < world:
            raise UserError(f"rank={rank}, world={world}: rank must be between 0 and world - 1")
        return _cached_table(self.schedule, rank, world)

    def tables(self, world: int) -> tuple[Table, ...]:
        return tuple(self.table(rank, world) for rank in range(world))


def chunk_bounds(count: int, chunks: int, index: int) -> tuple[int, int]:
    """Where chunk `index` of `chunks` begins and ends in `count` items; the first ones are longer by one.

    Any count will do: with fewer items than chunks the last chunks are empty.
    """
    length, longer = divmod(count, chunks)
    begin = index * length + min(index, longer)
    return begin, begin + length + (index < longer)


def span_bounds(count: int, chunks: int, span: range) -> tuple[int, int]:
    return chunk_bounds(count, chunks, span[0])[0], chunk_bounds(count, chunks, span[-1])[1]


@lru_cache(maxsize=256)
def _cached_table(schedule: Schedule, rank: int, world: int) -> Table:
    return schedule(rank, world)


# A schedule laid out for one vector length: which items leave, where arriving ones go, what is done when.
#
# A payload must not change until its link has flushed it, so what arrives for chunks that are leaving in the
# same round waits in scratch; everything else is copied straight into the vector or added the moment it is
# here. Pure: the executor computes a plan once per length and then only carries it out.


class Departure(NamedTuple):
    """Items `begin` to `end` of the vector leave for rank `to`."""

    to: int
    begin: int
    end: int


class Landing(NamedTuple):
    """Items `begin` to `end` arrive from rank `source`.

    They land at `scratch` of the scratch space, or in the vector itself where that is None. `deferred` ones take effect
    when the round's departures are flushed, others at once; kept ones only lie there for their fold.
    """

    source: int
    begin: int
    end: int
    how: How
    scratch: int | None
    deferred: bool


class Fold(NamedTuple):
    """Items `begin` to `end` become the sum of what lies at these places of the scratch space, in this order.

    None stands for the rank's own items.
    """

    begin: int
    end: int
    addends: tuple[int | None, ...]


class Round(NamedTuple):
    """One step of the schedule in items instead of chunks; `peers` are those that items leave for."""

    departures: tuple[Departure, ...]
    landings: tuple[Landing, ...]
    folds: tuple[Fold, ...]
    peers: tuple[int, ...]


class Plan(NamedTuple):
    """All rounds of one rank for one length, and the scratch items they need."""

    rounds: tuple[Round, ...]
    scratch_count: int
    # The chunks (first item, one after the last) that end as this rank computed them, and were not sent since
    own_results: tuple[tuple[int, int], ...]


def lay_plan(table: Table, rank: int, chunks: int, count: int, *, gives: bool = True) -> Plan:
    layout = _Layout(rank, chunks, count, gives=gives)
    rounds = tuple(layout.round(step) for step in table)
    own: set[int] = set()
    for step in table:
        own.difference_update(*(send.chunks for send in step.sends))
        for receive in step.receives:
            if receive.how is How.ADD:
                own.update(receive.chunks)
            elif receive.how is How.COPY:
                own.difference_update(receive.chunks)
        own.update(*step.folds)
    results = tuple(chunk_bounds(count, chunks, chunk) for chunk in sorted(own))
    return Plan(rounds=rounds, scratch_count=layout.peak, own_results=results)


class _Layout:
    """Hands out scratch space: kept chunks stay until their fold, others until the end of their round."""

    def __init__(self, rank: int, chunks: int, count: int, *, gives: bool) -> None:
        self._rank, self._gives = rank, gives
        self._chunks, self._count = chunks, count
        self._kept: dict[tuple[range, int], int] = {}
        self._top = self.peak = 0

    def round(self, step: Step) -> Round:
        bounds = [self._bounds(send.chunks) for send in step.sends]
        departures = tuple(
            Departure(to=send.to, begin=begin, end=end)
            for send, (begin, end) in zip(step.sends, bounds, strict=True)
        )
        busy = [send.chunks for send in step.sends]
        landings, folds = [], []
        for receive in step.receives:
            landings.append(self._land(receive, busy))
            if landings[-1].deferred:
                busy.append(receive.chunks)  # what comes later for these chunks must not overtake it
        for span in step.folds:
            places: dict[int, int | None] = {
                source: self._kept.pop((kept, source)) for kept, source in list(self._kept) if kept == span
            }
            if self._gives:
                places[self._rank] = None
            begin, end = self._bounds(span)
            folds.append(Fold(begin=begin, end=end, addends=tuple(at for _, at in sorted(places.items()))))
        if not self._kept:
            self._top = 0
        peers = tuple(dict.fromkeys(departure.to for departure in departures))
        return Round(departures=departures, landings=tuple(landings), folds=tuple(folds), peers=peers)

    def _land(self, receive: Receive, busy: list[range]) -> Landing:
        mine, how, scratch = receive.chunks, receive.how, None
        begin, end = self._bounds(mine)
        overlaps = any(mine.start < span.stop and span.start < mine.stop for span in busy)
        deferred = how is not How.KEEP and overlaps
        if deferred or how is not How.COPY:
            scratch = self._top
            self.peak = max(self.peak, scratch + end - begin)
            if how is How.KEEP:
                self._kept[mine, receive.source] = scratch
            if deferred or how is How.KEEP:
                self._top += end - begin  # what is added at once leaves its place to the next
        return Landing(
            source=receive.source, begin=begin, end=end, how=how, scratch=scratch, deferred=deferred
        )

    def _bounds(self, span: range) -> tuple[int, int]:
        return span_bounds(self._count, self._chunks, span)
