"""A schedule laid out for one vector length: which items leave, where arriving ones go, what is done when.

A payload must not change until its link has flushed it, so what arrives for chunks that are leaving in the
same round waits in scratch; everything else is copied straight into the vector or added the moment it is
here. Pure: the executor computes a plan once per length and then only carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.strategies.common.collectives.schedule import How, Receive, Step, Table, span_bounds

__all__ = ["Departure", "Fold", "Landing", "Plan", "Round", "lay_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Items `begin` to `end` of the vector leave for rank `to`."""

    to: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Items `begin` to `end` arrive from rank `source`.

    They land at `scratch` of the scratch space, or in the vector itself where that is None. `deferred` ones
    take effect when the round's departures are flushed, others at once; kept ones only lie there for their
    fold.
    """

    source: int
    begin: int
    end: int
    how: How
    scratch: int | None
    deferred: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Items `begin` to `end` become the sum of what lies at these places of the scratch space, in this order.

    None stands for the rank's own items.
    """

    begin: int
    end: int
    addends: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of the schedule in items instead of chunks; `peers` are those that items leave for."""

    departures: tuple[Departure, ...]
    landings: tuple[Landing, ...]
    folds: tuple[Fold, ...]
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All rounds of one rank for one length, the scratch items they need, and those of the longest fold."""

    rounds: tuple[Round, ...]
    scratch_count: int
    fold_count: int
    own_results: tuple[tuple[int, int], ...]
    """The chunks (first item, one after the last) that end as this rank computed them, and were not sent since."""


def lay_plan(table: Table, rank: int, chunks: int, count: int, *, gives: bool = True) -> Plan:
    """Lay out `table` of `rank` for a vector of `count` items in `chunks` chunks; a helper `gives` nothing."""
    layout = _Layout(rank, chunks, count, gives=gives)
    rounds = tuple(layout.round(step) for step in table)
    longest = max((fold.end - fold.begin for work in rounds for fold in work.folds), default=0)
    own = tuple(span_bounds(count, chunks, range(chunk, chunk + 1)) for chunk in _own_results(table))
    return Plan(rounds=rounds, scratch_count=layout.peak, fold_count=longest, own_results=own)


def _own_results(table: Table) -> list[int]:
    own: set[int] = set()
    for step in table:
        for send in step.sends:
            own.difference_update(send.chunks)
        for receive in step.receives:
            if receive.how is How.ADD:
                own.update(receive.chunks)
            elif receive.how is How.COPY:
                own.difference_update(receive.chunks)
        for span in step.folds:
            own.update(span)
    return sorted(own)


class _Layout:
    """Hands out scratch space: kept chunks stay until their fold, others until the end of their round."""

    def __init__(self, rank: int, chunks: int, count: int, *, gives: bool) -> None:
        self._rank = rank
        self._gives = gives
        self._chunks = chunks
        self._count = count
        self._kept: dict[tuple[range, int], int] = {}
        self._top = 0
        self.peak = 0

    def round(self, step: Step) -> Round:
        """Lay out one step."""
        departures = tuple(
            Departure(to=send.to, begin=begin, end=end)
            for send in step.sends
            for begin, end in (self._bounds(send.chunks),)
        )
        busy = [send.chunks for send in step.sends]
        landings = []
        for receive in step.receives:
            landing = self._land(receive, busy)
            landings.append(landing)
            if landing.deferred:
                busy.append(receive.chunks)  # what comes later for these chunks must not overtake it
        folds = tuple(self._fold(span) for span in step.folds)
        if not self._kept:
            self._top = 0
        peers = tuple(dict.fromkeys(departure.to for departure in departures))
        return Round(departures=departures, landings=tuple(landings), folds=folds, peers=peers)

    def _land(self, receive: Receive, busy: list[range]) -> Landing:
        begin, end = self._bounds(receive.chunks)
        deferred = receive.how is not How.KEEP and any(_overlap(receive.chunks, span) for span in busy)
        scratch: int | None = None
        if deferred or receive.how is not How.COPY:
            scratch = self._top
            self.peak = max(self.peak, scratch + end - begin)
        if deferred or receive.how is How.KEEP:
            self._top += end - begin  # what is added at once leaves its place to the next
        if receive.how is How.KEEP:
            self._kept[receive.chunks, receive.source] = self._top - (end - begin)
        return Landing(
            source=receive.source, begin=begin, end=end, how=receive.how, scratch=scratch, deferred=deferred
        )

    def _fold(self, span: range) -> Fold:
        places: dict[int, int | None] = {
            source: self._kept.pop((kept, source)) for kept, source in list(self._kept) if kept == span
        }
        if self._gives:
            places[self._rank] = None
        begin, end = self._bounds(span)
        return Fold(begin=begin, end=end, addends=tuple(places[source] for source in sorted(places)))

    def _bounds(self, span: range) -> tuple[int, int]:
        return span_bounds(self._count, self._chunks, span)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
