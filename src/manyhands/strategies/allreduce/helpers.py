"""All-reduce with helpers: processes without samples that only sum (BytePS: Jiang et al., OSDI 2020).

Every piece of the vector has one process that sums it: a worker, or a helper. Workers send it their parts and get the
sum back. A worker that sums a share w of the vector sends 1 - w of its own and its sums to n - 1 others, in all
1 + (n - 2) w; a helper that sums a share h sends its sums to n workers, n h. As much comes in. With n workers, k < n
helpers and n w + k h = 1, both are the same, and the busiest link has the least to carry, where

    w = (n - k) / (n² + k n - 2 k)      h = 2 (n - 1) / (n² + k n - 2 k)      each link: 2 n (n - 1) / (n² + k n - 2 k)

With n helpers or more, these sum everything, and each link of a worker carries the vector once in each direction,
against 2 (n - 1) / n times without helpers. That needs links that are busy in both directions at once: so the vector is
cut into segments, and the sums of one come back while the next one leaves.

    round      1          2            3
    worker     push 1     push 2       push 3
                          pull 1       pull 2
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from heapq import heapify, heappop, heappush
from math import gcd
from typing import NamedTuple

from manyhands.errors import UserError
from manyhands.strategies.common.collectives.schedule import Algorithm, How, Receive, Send, Step, Table

__all__ = ["HelperSplit", "helped", "segments_for", "split_load"]

MOST_SEGMENTS = 32
SEGMENT_BYTES = 128 << 10
"""What a worker sends in one round, about, where the vector is long enough for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSplit:
    """How many pieces of a vector each process sums; all pieces have equal size."""

    workers: int
    helpers: int
    worker_pieces: int
    """The number of pieces that each worker sums."""
    helper_pieces: int
    """The number of pieces that each helper sums."""

    @property
    def pieces(self) -> int:
        return self.workers * self.worker_pieces + self.helpers * self.helper_pieces

    @property
    def worker_share(self) -> Fraction:
        return Fraction(self.worker_pieces, self.pieces)

    @property
    def helper_share(self) -> Fraction:
        """The fraction of the vector that each helper sums; 0 without helpers."""
        return Fraction(self.helper_pieces, self.pieces)

    @property
    def busiest(self) -> Fraction:
        """What the busiest process sends, and also receives, as a multiple of the vector."""
        worker = 1 + (self.workers - 2) * self.worker_share
        return max(worker, self.workers * self.helper_share)

    def span(self, rank: int) -> range:
        """The pieces that a rank sums; helpers are the ranks after the workers."""
        if rank < self.workers:
            return range(rank * self.worker_pieces, (rank + 1) * self.worker_pieces)
        first = self.workers * self.worker_pieces + (rank - self.workers) * self.helper_pieces
        return range(first, first + self.helper_pieces)


def split_load(workers: int, helpers: int) -> HelperSplit:
    """Return the split that minimizes the load of the busiest link."""
    if workers < 2 or helpers < 0:
        raise UserError(f"workers={workers}, helpers={helpers}: two workers or more have something to sum")
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
    """The all-reduce of `workers`, ranks 0 and up, with `helpers`, the ranks after them."""
    split = split_load(workers, helpers)
    return Algorithm(
        name=f"{helpers} helpers",
        schedule=partial(_table, split, segments),
        chunks=lambda _world: split.pieces * segments,
        description="helpers and workers sum a share each, and segments come back while others leave",
        source="BytePS: Jiang et al., OSDI 2020",
        helpers=helpers,
    )


def _table(split: HelperSplit, segments: int, rank: int, world: int) -> Table:
    """In round q, push segment q to the processes that sum it and return the sums of segment q - 1."""
    if world != split.workers + split.helpers:
        raise UserError(f"world={world}: it is {split.workers} workers and {split.helpers} helpers")
    return tuple(_round(split, segments, rank, number) for number in range(segments + 1))


def _round(split: HelperSplit, segments: int, rank: int, number: int) -> Step:
    def span(of: int, segment: int) -> range:
        pieces, first = split.span(of), segment * split.pieces
        return range(first + pieces.start, first + pieces.stop)

    sends, receives = [], []
    for one in _of_rank(split, rank):
        segment = number - 1 if one.is_sum else number
        if not 0 <= segment < segments:
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
    waiting = _messages(split)
    to_get: Counter[int] = Counter()
    for messages in waiting.values():
        for one in messages:
            to_get[one.to] += len(split.span(one.summer))
    free_at: Counter[int] = Counter()  # the port in, by rank
    turns = [(0, 0, source) for source in waiting]
    heapify(turns)
    begun: list[tuple[int, int, _Message]] = []
    while turns:
        now, tried, source = heappop(turns)
        ready = [one for one in waiting[source] if free_at[one.to] <= now]
        if not ready:
            if waiting[source]:
                heappush(turns, (min(free_at[one.to] for one in waiting[source]), tried + 1, source))
            continue
        one = max(ready, key=lambda one: (to_get[one.to], len(split.span(one.summer))))
        size = len(split.span(one.summer))
        waiting[source].remove(one)
        to_get[one.to] -= size
        free_at[one.to] = now + size
        begun.append((now, len(begun), one))
        heappush(turns, (now + size, 0, source))
    return tuple(one for *_, one in sorted(begun))


@cache
def _of_rank(split: HelperSplit, rank: int) -> tuple[_Message, ...]:
    return tuple(one for one in _order(split) if rank in (one.source, one.to))


def _messages(split: HelperSplit) -> dict[int, list[_Message]]:
    """Return what each rank sends in a round, starting with the next rank."""
    world = split.workers + split.helpers
    found: dict[int, list[_Message]] = {rank: [] for rank in range(world)}
    for rank in range(world):
        for distance in range(1, world):
            to = (rank + distance) % world
            if split.span(rank) and to < split.workers:
                found[rank].append(_Message(rank, to, is_sum=True))
            if split.span(to) and rank < split.workers:
                found[rank].append(_Message(rank, to, is_sum=False))
    return found
